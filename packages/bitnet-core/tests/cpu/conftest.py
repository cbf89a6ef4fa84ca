"""Shared by the tests of the CPU device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from bitnet.core.cpu import native


@pytest.fixture(scope="session")
def library(require_device: Callable[[str, str | None], None]) -> ctypes.CDLL:
    """The native library of this machine."""
    handle = native.library().handle
    require_device("cpu:scalar", None if handle else "there is no native library for this platform")
    assert handle is not None
    return handle
