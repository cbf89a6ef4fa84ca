"""Page-locked memory that a device copies to while work submitted later runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Page-locked memory of the host, and the event that is recorded when the copy to it is complete."""

    address: int
    event: Any


class StagingPool:
    """Staging areas, each used again once its copy has been taken.

    Args:
        make: Allocates an area of a number of bytes.
        wait: Waits for an area's event.
    """

    def __init__(self, make: Callable[[int], Staging], wait: Callable[[Staging], None]) -> None:
        self._make, self._wait = make, wait
        self._all: list[Staging] = []
        self._spare: dict[int, list[Staging]] = {}

    def fetch(self, array: npt.NDArray[Any], copy: Callable[[Staging], None]) -> Callable[[], None]:
        """Implements :class:`~bitnet.core.gpu.Fetching`.

        Args:
            copy: Begins to copy ``array.nbytes`` bytes to an area, and has its event recorded behind the copy.
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
        """All areas, for the driver to free; none is in the pool any more."""
        gone, self._all = self._all, []
        self._spare.clear()
        return gone
