"""Kernels that read or write past an array of the CPU device: the suite's guards notice each."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.hal import DenseMatmul, Limits
from bitnet.core.testing import poison
from bitnet.core.testing.arenas import GuardedProgram
from bitnet.core.testing.rig import Rig, dense, tensor
from emulated import build_hook

ROOT = Path(__file__).parents[4]
SUITE = "tests/conformance/test_cpu.py"
PYTEST = ["-n0", "-q", "-x", "-p", "no:cacheprovider", "-m", "nightly or not nightly", SUITE, "-k"]
ONE_ROW_MORE = """
import sys
import pytest
from bitnet.core.cpu.lowering import LoweredProgram
plain = LoweredProgram._pack
def pack(self, *given, wait):
    packed = plain(self, *given, wait=wait)
    return packed._replace(rows=packed.rows + 64)
LoweredProgram._pack = pack
sys.exit(pytest.main(sys.argv[1:]))
"""
WITH_LIBRARY = """
import sys
from pathlib import Path
import pytest
from bitnet.core.cpu import native
native.PATHS = (Path(sys.argv[1]),)
sys.exit(pytest.main(sys.argv[2:]))
"""
OTHERS = "amx", "vbmi_avx512", "avx512", "vnni_avx2", "avx2"


OLD = "n + DENSE_CHUNK < o->out.columns ? n + DENSE_CHUNK : o->out.columns"
NEW = "n + DENSE_CHUNK"
"""The last chunk of rows of a dense product goes past the last row."""


def mutant_library(folder: Path) -> Path:
    """The native library with a changed source, at the level `scalar` alone, which stands for the others."""
    hook, kernels = build_hook(), folder / "kernels"
    shutil.copytree(hook.KERNELS, kernels)
    replace(kernels / "dense_matmul.h", OLD, NEW)
    replace(
        kernels / "features.c",
        "level_runs(const level_t *level) {",
        "level_runs(const level_t *level) { if (level) return true;",
    )
    target = hook.TARGETS[hook.host()]
    settings = hook.settings()
    settings["unit"] = [
        unit for unit in settings["unit"] if unit["source"] != "level.c" or unit["flags"] == ["-DLEVEL=scalar"]
    ]
    same = [f"-Dlevel_{other}=level_scalar" for other in OTHERS]
    settings["flags"] = [*(flag.replace("-O3", "-O1") for flag in settings["flags"]), *same]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, "KERNELS", kernels)
        patch.setattr(hook, "settings", lambda: settings)
        hook.link(target, ["-shared", "-O2", *hook.objects(target, folder)], made := folder / "mutant.so")
    return made


def replace(file: Path, old: str, new: str) -> None:
    source = file.read_text(encoding="utf-8")
    assert old in source
    file.write_text(source.replace(old, new), encoding="utf-8")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_kernel_that_is_told_more_rows_than_there_are_ends_the_process(library: ctypes.CDLL) -> None:
    done = run(ONE_ROW_MORE, *PYTEST, "test_ternary_matmul and scalar and m1-n7-")
    assert done.returncode < 0, done.stdout + done.stderr


def test_a_write_behind_an_array_is_told(library: ctypes.CDLL) -> None:
    """Also where it stays within the cache line that vectors may be read from."""
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=1)
    poison.poison_memory(device, lambda driver, memory: None)
    assert device.lowered is GuardedProgram
    specs = [tensor("x", "f32", "R", 16), tensor("out", "f32", "R", 16)]
    weight = dense(np.ones((16, 16), np.float32))
    rig = Rig(device, [DenseMatmul("x", "w", "out")], specs, {"w": weight}, limits=Limits(1, max_rows=1))
    out = rig.executable._lowered.arrays["out"]  # type: ignore[attr-defined]
    behind = (ctypes.c_float * 17).from_address(out.ctypes.data)
    behind[16] = 1.0
    with pytest.raises(AssertionError, match="behind array 1 of the activations"):
        rig.executable.close()
    behind[16] = np.array([0xFFFFFFFF], np.uint32).view(np.float32)[0]
    rig.executable.close()
    device.close()


@pytest.mark.nightly(unless_changed=["kernels/cpu", "packages/bitnet-core/src/bitnet/core/testing"])
@pytest.mark.skipif(sys.platform != "linux", reason="the linker's options are those of ELF")
def test_a_kernel_with_a_row_too_many_ends_the_process(library: ctypes.CDLL, tmp_path: Path) -> None:
    done = run(WITH_LIBRARY, str(mutant_library(tmp_path)), *PYTEST, "test_dense_matmul and not table and scalar")
    assert done.returncode < 0, done.stdout + done.stderr
