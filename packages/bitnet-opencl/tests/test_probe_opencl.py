"""The probe's result if OpenCL is missing, broken, old or forbidden, with fake drivers for the loader."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bitnet.core.hal import DeviceType, ProbeStatus
from bitnet.opencl import backend as module
from bitnet.opencl.backend import BACKEND

cl = pytest.importorskip("pyopencl")

linux = pytest.mark.skipif(sys.platform != "linux", reason="vendor folders are Linux's way to find OpenCL drivers")


def probe(vendors: Path) -> dict[str, object]:
    """The probe of a new process, as a loader reads its folder once."""
    code = (
        "import json; from bitnet.opencl.backend import BACKEND; r = BACKEND.probe();"
        "print(json.dumps([r.status.value, r.reason, r.hint, dict(r.tried)]))"
    )
    environment = os.environ | {"OCL_ICD_VENDORS": str(vendors), "OCL_ICD_FILENAMES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return dict(zip(("status", "reason", "hint", "tried"), json.loads(done.stdout), strict=True))


@linux
def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = probe(tmp_path / "nothing")
    assert result["status"] == "driver-missing"
    assert str(tmp_path / "nothing") in str(result["reason"])
    assert "OCL_ICD_VENDORS" in str(result["hint"])


@linux
def test_a_driver_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "gone.icd").write_text("libgone-from-here.so.7\n")
    result = probe(tmp_path)
    assert result["status"] == "driver-missing"
    assert "libgone-from-here.so.7" in str(result["reason"])
    assert "cannot open shared object file" in str(result["tried"])


@linux
def test_a_library_that_is_no_driver(tmp_path: Path) -> None:
    (tmp_path / "other.icd").write_text("libc.so.6\n")
    result = probe(tmp_path)
    assert result["status"] in ("no-device", "no-permission")
    assert result["reason"]


def test_no_pyopencl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = BACKEND.probe()
    assert result.status is ProbeStatus.LIBRARY_MISSING
    assert result.hint == "pip install pyopencl"


def made_up(version: str, *, kind: int = cl.device_type.GPU, unified: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=" Made-up 9000 ",
        version=version,
        type=kind,
        available=True,
        compiler_available=True,
        host_unified_memory=unified,
        extensions="cl_khr_fp16 cl_khr_subgroups",
        vendor="Nobody",
        global_mem_size=2**33,
        driver_version="1.0",
        max_compute_units=7,
    )


def use(monkeypatch: pytest.MonkeyPatch, *devices: SimpleNamespace) -> None:
    platform = SimpleNamespace(name="Made-up platform", version="OpenCL 3.0", get_devices=lambda: list(devices))
    monkeypatch.setattr(cl, "get_platforms", lambda: [platform])


def test_a_device_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, made_up("OpenCL 1.1 old"))
    result = BACKEND.probe()
    assert result.status is ProbeStatus.DRIVER_TOO_OLD
    assert "1.2" in result.reason
    assert "Made-up 9000 (OpenCL 1.1 old)" in result.reason


@pytest.mark.parametrize("denied", [True, False])
def test_a_platform_without_devices(monkeypatch: pytest.MonkeyPatch, denied: bool) -> None:
    use(monkeypatch)
    monkeypatch.setattr(module, "denied_nodes", lambda _: ["/dev/dri/renderD128"] if denied else [])
    result = BACKEND.probe()
    assert result.status is (ProbeStatus.NO_PERMISSION if denied else ProbeStatus.NO_DEVICE)
    assert ("/dev/dri/renderD128" in result.reason) == denied
    assert result.hint


@linux
@pytest.mark.parametrize("variable", ["POCL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_pocl_without_its_cache(tmp_path: Path, variable: str) -> None:
    """A file in the folder's place keeps root out, too; where the folder can be made, PoCL has its device."""
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # it has no platform
        platforms = []
    if not any("Portable" in platform.name for platform in platforms):
        pytest.skip("PoCL is not installed (Debian: pocl-opencl-icd)")
    place = tmp_path / "cache"
    value, folder = {
        "POCL_CACHE_DIR": (place / "own", place / "own"),
        "XDG_CACHE_HOME": (place, place / "pocl/kcache"),
        "HOME": (place, place / ".cache/pocl/kcache"),
    }[variable]
    code = "from bitnet.opencl.backend import BACKEND; r = BACKEND.probe(); print(r.status.value, r.reason, r.hint)"
    cleared = dict.fromkeys(("POCL_CACHE_DIR", "XDG_CACHE_HOME"), "") | {variable: str(value)}
    environment = {name: value for name, value in (os.environ | cleared).items() if value}

    def probed() -> str:
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    place.touch()
    said = f"no-device PoCL cannot write to its cache, {folder}, and offers no device without it. Let this user"
    assert probed().startswith(said)
    place.unlink()
    assert probed().startswith("ok ")


def test_types_and_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only usable devices are listed, each under the number its driver's order gives it."""
    devices = [
        made_up("OpenCL 1.2 a"),
        made_up("OpenCL 1.0 b"),
        made_up("OpenCL 3.0 c", unified=True),
        made_up("OpenCL 2.0 d", kind=cl.device_type.CPU, unified=True),
    ]
    use(monkeypatch, *devices)
    found = {info.name: info for info in BACKEND.probe().devices}
    assert {name: info.type for name, info in found.items()} == {
        "opencl:0": DeviceType.DISCRETE,
        "opencl:2": DeviceType.INTEGRATED,
        "opencl:3": DeviceType.CPU,
    }
    assert found["opencl:0"].features[:2] == ("f16", "subgroups")
    assert found["opencl:0"].description == "Made-up 9000 (Made-up platform)"
