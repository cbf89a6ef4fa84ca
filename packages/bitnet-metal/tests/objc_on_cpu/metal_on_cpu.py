"""The Metal backend on the test library of this folder, where it is imported: kernels run on the CPU.

The library's own list of what went wrong (leaks, over-releases, messages to nil, faults of kernels) ends the process
with status 3 and is printed. With ``METAL_TEST_UNCHECKED=1`` kernels do not look up their accesses, in a quarter of the
time.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from bitnet.core.support.dynlib import Library, open_library
from bitnet.metal import objc

HERE = Path(__file__).resolve().parent
SHIM = HERE.parent / "shim"
SOURCES = [HERE / name for name in ("objc.cpp", "foundation.cpp", "metal.cpp")]


def build() -> Path:
    """The test library, kept by the content of its sources."""
    inputs = [*SOURCES, HERE / "objc.h", HERE / "foundation.h", SHIM / "shim.h"]
    folder = Path(os.environ.get("BITNET_METAL_SHIM_CACHE", Path(tempfile.gettempdir(), "bitnet-metal-shim")))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"metal-{hashlib.sha256(b''.join(file.read_bytes() for file in inputs)).hexdigest()[:32]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-fvisibility=hidden"]
            command = [sys.executable, "-m", "ziglang", "c++", *flags, "-fno-sanitize=undefined", *map(str, SOURCES)]
            subprocess.run([*command, "-ldl", "-lpthread", "-o", f"{made}/metal.so"], check=True)
            Path(made, "metal.so").replace(path)
    return path


def open_test_library() -> dict[str, Library]:
    """In place of :func:`bitnet.metal.objc.open_libraries`."""
    return dict.fromkeys(objc.LIBRARIES, _LIBRARY)


def problems() -> str:
    """What went wrong until now."""
    text: bytes = _HANDLE.test_problems()
    return text.decode()


def _report() -> None:
    if found := problems():
        print(f"The Metal test library found:\n{found}", file=sys.stderr, flush=True)
        sys.stdout.flush()  # what pytest has said is still there
        os._exit(3)


_UNCHECKED = ["--unchecked"] if os.environ.get("METAL_TEST_UNCHECKED") else []
os.environ["METAL_TEST_COMPILER"] = shlex.join([sys.executable, str(SHIM / "metal_compile.py"), *_UNCHECKED])
_LIBRARY = open_library(str(build()))
assert _LIBRARY.handle is not None, _LIBRARY.tried
_HANDLE = _LIBRARY.handle
_HANDLE.test_problems.restype = ctypes.c_char_p
objc.open_libraries = open_test_library
atexit.register(_report)
