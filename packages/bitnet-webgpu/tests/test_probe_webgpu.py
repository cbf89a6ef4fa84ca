"""The webgpu backend is discovered, says what it lacks, and is opened only where there is a device."""

import subprocess
import sys
from typing import get_args

import pytest

from bitnet.core import list_devices
from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.hal import Backend, DeviceInfo, DeviceType, Op, ProbeStatus
from bitnet.webgpu import backend as module
from bitnet.webgpu import ops
from bitnet.webgpu.backend import BACKEND

MADE_UP = DeviceInfo("webgpu", "7", "made-up", "Made-up 9000", "Nobody", DeviceType.DISCRETE)


def machine(monkeypatch: pytest.MonkeyPatch, *devices: DeviceInfo, written: bool = True) -> None:
    """A machine with these devices, and a backend with all of its operations or with none."""
    monkeypatch.setattr(module, "find_devices", lambda: list(devices))
    monkeypatch.setattr(ops, "OPERATIONS", dict.fromkeys(get_args(Op)) if written else {})


def test_it_is_discovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BITNET_GPU_FAKE", raising=False)
    (report,) = [report for report in list_devices() if report.name == "webgpu"]
    assert report.distribution == "bitnet-webgpu"
    assert report.probe.status is not ProbeStatus.BROKEN, report.probe.reason
    assert isinstance(BACKEND, Backend)


def test_importing_it_opens_no_driver() -> None:
    code = "import sys, bitnet.webgpu.backend; sys.exit('bitnet.webgpu.device' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("devices", [(), (MADE_UP,)])
def test_operations_that_are_not_written(monkeypatch: pytest.MonkeyPatch, devices: tuple[DeviceInfo, ...]) -> None:
    machine(monkeypatch, *devices, written=False)
    result = BACKEND.probe()
    assert result.status is ProbeStatus.UNSUPPORTED
    assert "operations of webgpu are not written yet" in result.reason
    assert "ops.py" in result.hint


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert BACKEND.probe().status is ProbeStatus.NO_DEVICE
    with pytest.raises(DeviceUnavailableError, match="webgpu:7 is gone"):
        BACKEND.open(MADE_UP)


def test_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, MADE_UP)
    result = BACKEND.probe()
    assert (result.status, list(result.devices)) == (ProbeStatus.OK, [MADE_UP])


def test_kernels_are_named_after_the_backend() -> None:
    assert all(name.endswith("_webgpu") for name in BACKEND.kernels())
