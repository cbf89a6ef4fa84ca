"""Copies that are taken later: each array gets its own copy, and areas are used again."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu.drivers.staging import Staging, StagingPool


class Device:
    """Copies when an event is waited for, as late as a device may."""

    def __init__(self) -> None:
        self.areas: list[Any] = []
        self.copies: dict[int, bytes] = {}
        self.pool = StagingPool(self.make, self.wait)

    def make(self, nbytes: int) -> Staging:
        self.areas.append(ctypes.create_string_buffer(b"\xa5" * nbytes, nbytes))
        return Staging(ctypes.addressof(self.areas[-1]), len(self.areas) - 1)

    def wait(self, staged: Staging) -> None:
        content = self.copies.pop(staged.event)
        ctypes.memmove(staged.address, content, len(content))

    def fetch(self, source: np.ndarray[Any, Any], array: np.ndarray[Any, Any]) -> Any:
        return self.pool.fetch(array, lambda staged: self.copies.__setitem__(staged.event, source.tobytes()))


@pytest.mark.parametrize("length", [1, 5, 8])
def test_two_are_under_way_and_their_areas_are_used_again(length: int) -> None:
    device, rng = Device(), np.random.default_rng()
    for _ in range(3):
        sources = rng.integers(0, 1000, (2, length))
        arrays = [np.full(length, -1) for _ in sources]
        waits = [device.fetch(source, array) for source, array in zip(sources, arrays, strict=True)]
        for wait in waits:
            wait()
        assert np.array(arrays).tolist() == sources.tolist()
    assert len(device.areas) == 2
    assert {len(area) for area in device.areas} == {1 << (8 * length - 1).bit_length()}


def test_what_was_never_taken_is_freed_too() -> None:
    device = Device()
    device.fetch(np.arange(3), np.empty(3, np.int64))
    device.fetch(np.arange(3), np.empty(3, np.int64))()
    assert [staged.event for staged in device.pool.empty()] == [0, 1]
    assert device.pool.empty() == []
