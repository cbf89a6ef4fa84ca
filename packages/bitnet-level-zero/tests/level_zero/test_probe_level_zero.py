"""The probe's result if the loader, one of its functions, the driver, the device or permission for it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bitnet.core import list_devices
from bitnet.core.hal import Backend, ProbeStatus
from bitnet.core.support.dynlib import open_library
from bitnet.level_zero import backend as module
from bitnet.level_zero import loader
from bitnet.level_zero.backend import BACKEND
from bitnet.level_zero.loader import UNINITIALIZED, LevelZeroError

NOWHERE = ("libze_loader_that_is_nowhere.so.1",)


def use(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A machine whose loader is the first of these libraries that opens."""
    monkeypatch.setattr(loader, "loader", lambda: open_library(list(names)))


def test_it_is_discovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BITNET_GPU_FAKE", raising=False)
    (report,) = [report for report in list_devices() if report.name == "level-zero"]
    assert report.distribution == "bitnet-level-zero"
    assert report.probe.status is not ProbeStatus.BROKEN, report.probe.reason
    assert isinstance(BACKEND, Backend)


def test_importing_it_opens_no_driver() -> None:
    code = "import sys, bitnet.level_zero.backend; sys.exit('bitnet.level_zero.loader' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, *NOWHERE)
    result = BACKEND.probe()
    assert result.status is ProbeStatus.DRIVER_MISSING
    assert NOWHERE[0] in result.reason
    assert "libze1" in result.hint
    assert result.tried[NOWHERE[0]]


def test_a_system_that_has_no_level_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    assert BACKEND.probe().status is ProbeStatus.UNSUPPORTED


@pytest.mark.skipif(sys.platform != "linux", reason="It takes Linux's libm for a loader.")
def test_a_loader_that_lacks_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "libm.so.6")
    result = BACKEND.probe()
    assert result.status is ProbeStatus.DRIVER_TOO_OLD
    assert "libm.so.6 has no function zeInit" in result.reason
    assert "Update" in result.hint


@pytest.mark.skipif(sys.platform != "linux", reason="Device nodes are Linux's.")
@pytest.mark.parametrize(
    ("denied", "driver", "status", "hint"),
    [
        (["/dev/dri/renderD128"], NOWHERE, ProbeStatus.NO_PERMISSION, "usermod -aG render"),
        (["/dev/dri/renderD128"], ("libm.so.6",), ProbeStatus.NO_PERMISSION, "usermod -aG render"),
        ([], NOWHERE, ProbeStatus.DRIVER_MISSING, "libze-intel-gpu1"),
        ([], ("libm.so.6",), ProbeStatus.NO_DEVICE, "lspci"),
    ],
)
def test_no_driver_comes_up(
    monkeypatch: pytest.MonkeyPatch, denied: list[str], driver: tuple[str, ...], status: ProbeStatus, hint: str
) -> None:
    """A driver without a device says that it is not initialised, as the loader does without a driver."""
    monkeypatch.setattr(module, "denied_nodes", lambda _: denied)
    monkeypatch.setattr(loader, "DRIVER", driver)
    error = LevelZeroError("zeInit failed.", device="level-zero", result=UNINITIALIZED)
    result = module._no_driver(error, {}, {})
    assert result.status is status
    assert hint in result.hint


def test_other_failures_are_broken_drivers() -> None:
    error = LevelZeroError("zeInit failed.", device="level-zero", result=0x7FFFFFFE)
    assert module._no_driver(error, {}, {}).status is ProbeStatus.BROKEN


def test_kernels_are_named_after_the_backend() -> None:
    assert {"embed_level-zero", "attention_merge_level-zero"} <= set(BACKEND.kernels())
    assert all(name.endswith("_level-zero") for name in BACKEND.kernels())
