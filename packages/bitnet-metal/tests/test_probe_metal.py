"""The probe's result on systems without Metal."""

from __future__ import annotations

import sys

import pytest

from bitnet.metal.backend import BACKEND


def test_another_system_is_refused_politely() -> None:
    if sys.platform == "darwin":
        pytest.skip("this is macOS")
    result = BACKEND.probe()
    assert result.status.value == "unsupported"
    assert result.reason == f"Metal is a part of macOS; this system is {sys.platform}."
    assert not result.devices
