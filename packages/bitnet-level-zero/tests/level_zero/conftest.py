"""A Level Zero driver for these tests, built here, under the system's own loader; and Intel's driver without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

from bitnet.core.testing.guard import HEADERS as GUARD

REPOSITORY = Path(__file__).parents[4]
HOOK = Path(__file__).parents[2] / "modules_build.py"
SOURCES = Path(__file__).parents[1] / "driver"
INTEL = Path(sys.prefix) / "lib" / "libintelocl.so"
"""Where the wheel intel-opencl-rt puts Intel's OpenCL for CPUs."""
HEADERS = Path("/usr/include/level_zero/ze_ddi.h")
LOADER = "libze_loader.so.1"

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
Require: TypeAlias = Callable[[str, str | None], None]


def _absent() -> str | None:
    """Why the test driver cannot be made or used here, if it cannot."""
    if not INTEL.exists():
        return f"{INTEL} is not there (pip install intel-opencl-rt intel-cmplr-lib-rt)."
    if not HEADERS.exists():
        return f"{HEADERS} is not there (Debian: apt install libze-dev)."
    try:
        ctypes.CDLL(LOADER)
        ctypes.CDLL("libOpenCL.so.1")
    except OSError as error:
        return f"{error} (Debian: apt install libze1 ocl-icd-libopencl1)."
    return None


@pytest.fixture(scope="session")
def hook() -> ModuleType:
    """The build hook."""
    spec = importlib.util.spec_from_file_location("level_zero_modules_build", HOOK)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="session")
def driver_library(require_device: Require, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test driver's library. It is built by clang, as `ziglang` carries it."""
    require_device("level-zero-test-driver", _absent())
    made = tmp_path_factory.mktemp("driver") / "libze_bitnet_test.so"
    options = [
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-unused",
        "-Wl,-Bsymbolic",
        f"-I{GUARD}",
        "-idirafter",
        "/usr/include",
    ]
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    command = [sys.executable, "-m", "ziglang", "cc", *options, "-o", str(made), *sources]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


@pytest.fixture(scope="session")
def run_python() -> Run:
    """``run_python(arguments, variables, folder)`` runs Python with only these of the variables that tests go by."""

    def run(arguments: tuple[str, ...], own: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BITNET_", "OCL_", "ZE_"))}
        command = [sys.executable, *arguments]
        return subprocess.run(command, check=False, env={**kept, **own}, capture_output=True, text=True, cwd=folder)

    return run


@pytest.fixture
def on_driver(driver_library: Path, run_python: Run, tmp_path: Path) -> Run:
    """``on_driver(arguments, **environment)`` runs Python where the test driver is the only driver.

    The loader is the system's, with its validation layer on.
    """
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    (vendors / "one.icd").write_text(f"{INTEL}\n")
    own = {
        "OCL_ICD_VENDORS": str(vendors),
        "ZE_ENABLE_ALT_DRIVERS": str(driver_library),
        "ZE_ENABLE_VALIDATION_LAYER": "1",
        "ZE_ENABLE_PARAMETER_VALIDATION": "1",
        "BITNET_CACHE_DIR": str(tmp_path / "cache"),
    }

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_python(arguments, {**own, **environment}, REPOSITORY)

    return run
