"""Programs of the CPU device with an inaccessible page behind each array, so that a stray access ends the process."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.cpu.lowering import LoweredProgram
from bitnet.core.cpu.memory import LINE, Arena, aligned
from bitnet.core.testing.guard import guarded


class GuardedArena(Arena):
    """An arena whose pieces are each in guarded memory of their own.

    A cache line lies between a piece and its guard, since kernels may read a vector past the end. It is poisoned, so
    that no result depends on it. The arena's own memory is left untouched, and so never committed.
    """

    def __init__(self, library: ctypes.CDLL, size: int, *, device: str, what: str) -> None:
        super().__init__(library, size, device=device, what=what)
        self._what = what
        self._pieces: list[npt.NDArray[np.uint8]] = []

    def take(self, size: int) -> int:
        super().take(size)
        piece = guarded(aligned(size) + LINE)
        piece[-LINE:] = 0xFF
        self._pieces.append(piece)
        return piece.ctypes.data

    def check(self) -> None:
        """Fail if something was written behind a piece."""
        for number, piece in enumerate(self._pieces):
            assert (piece[-LINE:] == 0xFF).all(), f"a kernel has written behind array {number} of {self._what}"


class GuardedProgram(LoweredProgram):
    """A lowered program in guarded memory; dense weights that would stay in their file are copied there."""

    def close(self) -> None:
        for arena in self._arenas:
            assert isinstance(arena, GuardedArena)
            arena.check()
        super().close()

    def _arena(self, size: int, what: str) -> Arena:
        arena = GuardedArena(self._library, size, device=self._native.name, what=what)
        self._arenas.append(arena)
        return arena

    def _stay(self, array: npt.NDArray[Any]) -> int:
        copy = guarded(array.nbytes)
        copy[:] = array.reshape(-1).view(np.uint8)
        self._kept.append(copy)
        return copy.ctypes.data
