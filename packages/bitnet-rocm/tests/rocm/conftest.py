"""What tests of this package share: code objects by ziglang's clang, and the test driver that stands in for HIP."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.clc.amd import architecture
from bitnet.core.testing.guard import HEADERS as GUARD
from bitnet.rocm.compiler import SOURCES, options

HERE = Path(__file__).parents[1]
REPOSITORY = HERE.parents[2]
INTEL = Path(sys.prefix) / "lib" / "libintelocl.so"
"""Intel's OpenCL for CPUs, where its wheel puts it: the test driver computes by it."""
ZIG = (sys.executable, "-m", "ziglang")
CLANG = (*ZIG, "clang", "-x", "cl", "-target", "amdgcn-amd-amdhsa")
Require: TypeAlias = Callable[[str, str | None], None]
Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def compiled(require_device: Require, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``compiled(kernel, "gfx1100", "-c")`` compiles as ``libamd_comgr`` does; the compiler must say nothing."""
    require_device("ziglang", None if find_spec("ziglang") else "ziglang is not installed")
    folder = tmp_path_factory.mktemp("code")

    def compiled(spec: KernelSpec, name: str, stage: str) -> Path:
        kind = architecture(name)
        assert kind is not None
        source = folder / f"{Path(spec.file).name}-{name}-{hash(spec) % 2**32:08x}.cl"
        source.write_text(SOURCES.text(spec.file), encoding="utf-8")
        device = kind.abilities(compute_units=64, group=1024, local_bytes=65536)
        flags = (f"-mcpu={name}", *options(device), *(f"-D{constant}={value}" for constant, value in spec.defines))
        made = source.with_suffix(".s" if stage == "-S" else ".o")
        done = subprocess.run([*CLANG, *flags, stage, source, "-o", made], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), f"{spec} for {name}:\n{done.stderr}"
        return made

    return compiled


@pytest.fixture(scope="session")
def disassembly(compiled: Callable[..., Path]) -> Callable[[KernelSpec, str], str]:
    """``disassembly(kernel, "gfx1100")`` is its assembly."""
    return lambda spec, name: compiled(spec, name, "-S").read_text()


@pytest.fixture(scope="session")
def code_object(compiled: Callable[..., Path]) -> Callable[[KernelSpec, str], bytes]:
    """``code_object(kernel, "gfx1100")`` is what a driver loads; nothing is left undefined in it."""

    def linked(spec: KernelSpec, name: str) -> bytes:
        made = compiled(spec, name, "-c")
        code = made.with_suffix(".hsaco")
        subprocess.run([*ZIG, "ld.lld", "-shared", "--no-undefined", made, "-o", code], check=True)
        return code.read_bytes()

    return linked


def build(folder: Path, *flags: str) -> Path:
    """The test driver as ``ROCM_PATH`` wants it: both libraries are one file."""
    lib = folder / "lib"
    lib.mkdir(parents=True)
    sources = [str(path) for path in sorted((HERE / "hip_on_opencl").glob("*.c"))]
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-fvisibility=hidden", f"-I{GUARD}"]
    command = [*ZIG, "cc", *options, *flags, *sources]
    subprocess.run([*command, "-lpthread", "-o", str(lib / "libamdhip64.so.7")], check=True)
    (lib / "libamd_comgr.so.3").symlink_to("libamdhip64.so.7")
    return folder


@pytest.fixture
def build_driver(hip: Path) -> Callable[..., Path]:
    """``build_driver(folder, "-DNAME")`` builds another test driver."""
    return build


def _absent() -> str | None:
    """Why the test driver cannot be made or used here, if it cannot."""
    if sys.platform != "linux":
        return "the test driver is for Linux"
    if not find_spec("ziglang"):
        return "ziglang is not installed"
    if not INTEL.exists():
        return f"{INTEL} is not there (pip install intel-opencl-rt intel-cmplr-lib-rt)"
    try:
        ctypes.CDLL("libOpenCL.so.1")
    except OSError as error:
        return f"{error} (Debian: apt install ocl-icd-libopencl1)"
    return None


@pytest.fixture(scope="session")
def hip(require_device: Require, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test driver, and a folder ``cache`` for what its compiler makes."""
    require_device("rocm-test-driver", _absent())
    folder = build(tmp_path_factory.mktemp("rocm"))
    (folder / "vendors").mkdir()
    (folder / "vendors" / "one.icd").write_text(f"{INTEL}\n")
    return folder


@pytest.fixture
def run(hip: Path) -> Run:
    """``run("-c", code, HIP_TEST_ARCH="gfx906")`` runs Python on the test driver; it must end with ``status``."""

    def run(*arguments: str, status: int | None = 0, **environment: Any) -> subprocess.CompletedProcess[str]:
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("BITNET_", "OCL_", "HIP_", "ROC"))}
        own = {"ROCM_PATH": hip, "OCL_ICD_VENDORS": hip / "vendors", "BITNET_CACHE_DIR": hip / "cache"}
        environ = clean | {name: str(value) for name, value in (own | environment).items()}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=REPOSITORY, check=False)
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done

    return run
