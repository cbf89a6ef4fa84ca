"""Page-locked memory to which a device copies while later work runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Page-locked host memory, and the event that signals the end of the copy to it."""

    address: int
    event: Any


class StagingPool:
    """A pool of staging areas; each is reused once its copy has been read.

    Args:
        make: Allocates an area of the given number of bytes.
        wait: Waits for an area's event.
    """

    def __init__(self, make: Callable[[int], Staging], wait: Callable[[Staging], None]) -> None:
        self._make, self._wait = make, wait
        self._all: list[Staging] = []
        self._spare: dict[int, list[Staging]] = {}

    def fetch(self, array: npt.NDArray[Any], copy: Callable[[Staging], None]) -> Callable[[], None]:
        """Implements :class:`~bitnet.core.gpu.Fetching`.

        Args:
            copy: Begins to copy ``array.nbytes`` bytes to an area, and records its event after the copy.
        """
        size = 1 << max(array.nbytes - 1, 0).bit_length()
        spare = self._spare.setdefault(size, [])
        if not spare:
            made = self._make(size)
            self._all.append(made)
            spare.append(made)
        staged = spare.pop()
        copy(staged)

        def take() -> None:
            self._wait(staged)
            ctypes.memmove(array.ctypes.data, staged.address, array.nbytes)
            spare.append(staged)

        return take

    def empty(self) -> list[Staging]:
        """Remove and return all areas, for the driver to free."""
        gone, self._all = self._all, []
        self._spare.clear()
        return gone
