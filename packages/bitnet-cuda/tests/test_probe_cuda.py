"""The probe's result, with a fake driver that is missing, forbidden, broken, old or sees no GPU."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core.gpu import probing
from bitnet.core.hal import DeviceType, ProbeResult, ProbeStatus
from bitnet.core.support.dynlib import Library
from bitnet.cuda import backend as module
from bitnet.cuda.backend import BACKEND, DRIVER

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
OK = driver.CUresult.CUDA_SUCCESS
Patch = pytest.MonkeyPatch


def loader(patch: Patch, failure: str = "", tried: str = "") -> None:
    """The driver's library opens, or does not."""
    name = DRIVER["linux"][0]
    found = Library(None if failure else object(), name, {name: tried}, failure)  # type: ignore[arg-type]
    patch.setattr(module, "open_library", lambda names: found)


def gpus(patch: Patch, *capabilities: tuple[int, int], version: int = 13000, init: Any = OK) -> None:
    """A driver of CUDA ``version`` with a GPU of each of the capabilities."""
    loader(patch)
    attribute = driver.CUdevice_attribute

    def read(what: Any, device: int) -> tuple[Any, int]:
        major, minor = capabilities[device]
        values = {
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 46,
        }
        return OK, values.get(what, 0)

    calls: dict[str, Callable[..., tuple[Any, ...]]] = {
        "cuDriverGetVersion": lambda: (OK, version),
        "cuInit": lambda flags: (init,),
        "cuDeviceGetCount": lambda: (OK, len(capabilities)),
        "cuDeviceGet": lambda index: (OK, index),
        "cuDeviceGetAttribute": read,
        "cuDeviceGetUuid": lambda device: (OK, SimpleNamespace(bytes=bytes(range(16)))),
        "cuDeviceGetName": lambda size, device: (OK, b"Made-up 9000\0\0"),
        "cuDeviceTotalMem": lambda device: (OK, 8 << 30),
        "cuDeviceGetPCIBusId": lambda size, device: (OK, b"0000:01:00.0\0"),
    }
    for name, call in calls.items():
        patch.setattr(driver, name, call)
    patch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 13, 0))


def refused(status: ProbeStatus) -> ProbeResult:
    """The probe's result, which must have this status, and a reason and a hint."""
    result = BACKEND.probe()
    assert result.status is status, result
    assert result.reason
    assert result.hint
    assert not result.devices
    return result


def test_no_driver(monkeypatch: Patch) -> None:
    loader(monkeypatch, "missing", "libcuda.so.1: cannot open shared object file")
    result = refused(ProbeStatus.DRIVER_MISSING)
    assert "libcuda.so.1" in result.reason
    assert "Install the NVIDIA driver" in result.hint
    assert dict(result.tried)["libcuda.so.1"]


def test_no_permission_for_the_library(monkeypatch: Patch) -> None:
    loader(monkeypatch, "no-permission", "Permission denied")
    refused(ProbeStatus.NO_PERMISSION)


def test_a_driver_that_is_broken(monkeypatch: Patch) -> None:
    loader(monkeypatch, "broken", "undefined symbol: nvidia_open")
    assert "undefined symbol: nvidia_open" in refused(ProbeStatus.BROKEN).reason


def test_a_driver_too_old(monkeypatch: Patch) -> None:
    gpus(monkeypatch, (9, 0), version=12080)
    result = refused(ProbeStatus.DRIVER_TOO_OLD)
    assert "12.8" in result.reason
    assert "13.0" in result.reason
    assert result.versions["driver"] == "12.8"
    assert result.versions["driver-needed"] == "13.0"


def test_no_device(monkeypatch: Patch) -> None:
    gpus(monkeypatch, init=driver.CUresult.CUDA_ERROR_NO_DEVICE)
    assert "CUDA_VISIBLE_DEVICES" in refused(ProbeStatus.NO_DEVICE).hint
    gpus(monkeypatch)
    refused(ProbeStatus.NO_DEVICE)


@pytest.mark.skipif(sys.platform != "linux", reason="device nodes are Linux's")
def test_no_permission_on_a_device_node(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(probing, "Path", lambda path: tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("nvidia0"))
    gpus(monkeypatch, init=driver.CUresult.CUDA_ERROR_NO_DEVICE)
    result = refused(ProbeStatus.NO_PERMISSION)
    assert str(tmp_path / "nvidia0") in result.reason
    assert "nvidiactl" not in result.reason
    assert result.hint.startswith("sudo chmod a+rw ")


def test_a_driver_that_does_not_start(monkeypatch: Patch) -> None:
    gpus(monkeypatch, init=driver.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in refused(ProbeStatus.BROKEN).reason


def test_gpus_that_are_too_old(monkeypatch: Patch) -> None:
    gpus(monkeypatch, (6, 1))
    result = refused(ProbeStatus.UNSUPPORTED)
    assert "7.5" in result.reason
    assert "Made-up 9000" in result.reason


def test_what_is_told_of_a_gpu(monkeypatch: Patch) -> None:
    gpus(monkeypatch, (6, 1), (7, 5), (9, 0))
    result = BACKEND.probe()
    assert result.status is ProbeStatus.OK
    old, new = result.devices
    assert (old.index, new.index) == ("1", "2")
    assert new.name == "cuda:2"
    assert "int8-tensor-cores" in new.features
    assert "int8-tensor-cores" not in old.features
    assert new.type is DeviceType.DISCRETE
    assert new.memory == 8 << 30
    assert new.id == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_no_bindings(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "cuda-bindings" in refused(ProbeStatus.LIBRARY_MISSING).reason


def test_no_run_time_compiler(monkeypatch: Patch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    result = refused(ProbeStatus.LIBRARY_MISSING)
    assert "libnvrtc.so.13" in result.reason
    assert "bitnet-cuda" in result.hint
