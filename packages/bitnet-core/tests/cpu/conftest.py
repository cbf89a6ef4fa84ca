"""Shared by the tests of the CPU device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.testing.arenas import GuardedProgram


@pytest.fixture(scope="session")
def library(require_device: Callable[[str, str | None], None]) -> ctypes.CDLL:
    """The native library of this machine."""
    handle = native.library().handle
    require_device("cpu:scalar", None if handle else "there is no native library for this platform")
    assert handle is not None
    return handle


@pytest.fixture(params=native.levels(native.library().handle))
def device(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[CpuDevice]:
    """A device for each level, with guarded memory around what a program holds."""

    class Guarded(CpuDevice):
        lowered = GuardedProgram

    opened = Guarded(BACKEND.probe().devices[0], library, level=request.param, threads=2)
    yield opened
    opened.close()
