"""The native library compiled so that undefined behaviour ends the process: models on every level of this processor."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from emulated import NIGHT, build_hook

RUN = """
import sys
from pathlib import Path

import numpy as np

from bitnet.core.cpu import native

native.PATHS = (Path(sys.argv[1]),)
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.testing.tables import TableTests
from watched_model import run_model

library = native.library().handle
for level in native.levels(library):
    device = CpuDevice(BACKEND.probe().devices[0], library, level=level, threads=3)
    print(level, flush=True)
    for name in ("narrow", "512-wide"):
        run_model(device, name)
    TableTests().test_sampling_from_a_ternary_head(device, np.random.default_rng(), rows=7, kind="random")
    device.close()
"""


def trapping_library() -> Path:
    """The library with an illegal instruction wherever behaviour would be undefined, kept in the build cache."""
    hook = build_hook()
    target = hook.TARGETS[hook.host()]
    path: Path = hook.cache() / hook.digest(target) / "trapping.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = hook.settings()
    checks = {"-fno-sanitize=undefined": "-fsanitize=undefined", "-O3": "-O1"}
    flags = [*(checks.get(flag, flag) for flag in settings["flags"]), "-fsanitize-trap=undefined"]
    with FileLock(f"{path}.lock"):  # tests run in several processes
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                of_the_wheel = hook.settings
                hook.__dict__["settings"] = lambda: {**settings, "flags": flags}
                try:
                    inputs = ["-shared", "-O2", *hook.objects(target, folder)]
                finally:
                    hook.__dict__["settings"] = of_the_wheel
                hook.link(target, inputs, linked := Path(folder, path.name))
                linked.replace(path)
    return path


@NIGHT
def test_no_behaviour_is_undefined(library: ctypes.CDLL) -> None:
    tools = Path(__file__).parents[4] / "tools"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tools)!r}){RUN}", str(trapping_library())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
