"""A device untested on hardware says so until its self-check has passed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.checks.verified import marked, remember
from bitnet.core.gpu.clc import Abilities, device, open_device
from bitnet.core.hal import DeviceInfo, DeviceType
from bitnet.core.hal.probe import NOT_VERIFIED, TEST_DRIVER

INFO = DeviceInfo(
    "made-up", "0", "id", "Made-up 9", "Nobody", DeviceType.DISCRETE, driver_version="7.0", details={"compiler": "3.0"}
)
OTHERS = (
    replace(INFO, id="another"),
    replace(INFO, driver_version="7.1"),
    replace(INFO, details={"compiler": "3.1"}),
    replace(INFO, backend="another"),
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "cache"))


def test_opening_verifies_a_device_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = SimpleNamespace(close=lambda: None, memory=lambda: (0, 0))
    found = marked(INFO)
    assert found.details == {"compiler": "3.0", "verified": NOT_VERIFIED}
    monkeypatch.setattr(device, "wrong_products", lambda device, tokens: "3 of 48 products are wrong")
    with pytest.raises(DeviceError, match="3 of 48 products are wrong"):
        open_device(found, driver, Abilities(8, 256, 32768), self_check=True)
    assert marked(INFO).details["verified"] == NOT_VERIFIED
    monkeypatch.setattr(device, "wrong_products", lambda device, tokens: "")
    open_device(found, driver, Abilities(8, 256, 32768))
    assert marked(INFO).details["verified"] == NOT_VERIFIED
    open_device(found, driver, Abilities(8, 256, 32768), self_check=True)
    assert marked(INFO) == INFO
    assert marked(replace(INFO, index="1")).details == INFO.details
    assert all(marked(other).details["verified"] == NOT_VERIFIED for other in OTHERS)


def test_a_test_driver_is_never_verified() -> None:
    remember(info := replace(INFO, vendor=TEST_DRIVER))
    assert marked(info).details == {"compiler": "3.0", "note": "a test driver: computed on the CPU"}


def test_where_nothing_can_be_written_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "file"))
    remember(INFO)
    assert marked(INFO).details["verified"] == NOT_VERIFIED
