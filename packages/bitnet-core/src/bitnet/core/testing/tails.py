"""Poison behind each buffer, for devices whose drivers check bounds and answer reads past the end with zeros.

A zero hides such a read wherever it is multiplied or added to no effect; what is not a number does not. What kernels
write there is found, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.gpu import Launch
from bitnet.core.gpu.drivers.windows import Window

TAIL = 4096
"""Bytes behind a buffer."""


class Tails:
    """The buffers that a driver allocates from now on have tails, which kernels reach.

    Args:
        word: The poison, four bytes.
        largest: Maximum bytes of a binding; larger buffers have no tail within the reach of kernels.
    """

    def __init__(self, driver: Any, word: np.int32, largest: int) -> None:
        self._driver, self._word, self._largest = driver, word, largest
        self._alloc, self._free, self._record = driver.alloc, driver.free, driver.record
        self._begins: dict[int, tuple[Any, int]] = {}
        self._written: list[str] = []
        driver.alloc, driver.free, driver.record = self.alloc, self.free, self.record

    def alloc(self, nbytes: int) -> Any:
        """A buffer of so many bytes, poisoned as its tail is."""
        begin = -(-nbytes // 16) * 16
        buffer = self._alloc(begin + TAIL)
        self._driver.upload(buffer, self._poison(begin + TAIL))
        object.__setattr__(buffer, "nbytes", nbytes)  # some drivers freeze it
        self._begins[id(buffer)] = buffer, begin
        return buffer

    def free(self, buffer: Any) -> None:
        """Free a buffer, after a look at its tail."""
        if id(buffer) in self._begins:
            self._look(*self._begins.pop(id(buffer)))
        self._free(buffer)

    def record(self, launches: Sequence[Launch]) -> object:
        """A recording of launches that see the tails."""
        return self._record([replace(launch, args=tuple(map(self._reached, launch.args))) for launch in launches])

    def check(self) -> None:
        """Fail if kernels have written behind a buffer since the last check."""
        for buffer, begin in self._begins.values():
            self._look(buffer, begin)
        written, self._written = self._written, []
        assert not written, "; ".join(written)

    def _reached(self, arg: Any) -> Any:
        if id(arg) not in self._begins or (size := self._begins[id(arg)][1] + TAIL) > self._largest:
            return arg
        return Window(arg, 0, size)

    def _look(self, buffer: Any, begin: int) -> None:
        tail = np.empty(TAIL // 4, np.int32)
        self._driver.download(buffer, tail, begin)
        if (wrong := np.flatnonzero(tail != self._word)).size:
            behind = begin + 4 * int(wrong[0]) - buffer.nbytes
            self._written.append(f"a kernel wrote {behind:,} bytes behind a buffer of {buffer.nbytes:,}")
            self._driver.upload(buffer, self._poison(TAIL), begin)

    def _poison(self, nbytes: int) -> npt.NDArray[np.int32]:
        return np.full(nbytes // 4, self._word)
