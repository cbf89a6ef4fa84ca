"""Memory for the native library, on huge pages if the system has them, handed out in pieces."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import OutOfMemoryError
from bitnet.core.support import system

LINE = 64
"""Bytes of a cache line and of the widest vector; every piece is aligned to this."""


def aligned(size: int) -> int:
    return -(-size // LINE) * LINE


class Arena:
    """``size`` zeroed bytes, freed by :meth:`close` or with the object. Addresses from :meth:`take` are then invalid.

    Args:
        device: The device's name, for errors.

    Raises:
        OutOfMemoryError: There is not enough memory.
    """

    def __init__(self, library: ctypes.CDLL, size: int, *, device: str, what: str) -> None:
        self.size = size + LINE  # a kernel may read a vector past the end of a row
        total = system.memory_total()
        # If the system overcommits, missing memory is noticed only when touched, and the process is killed.
        fits = self.size < 2**62 and (not total or self.size <= total)
        address = library.bitnet_pages_alloc(self.size) if fits else None
        if not address:
            raise OutOfMemoryError(
                f"{size:,} bytes for {what} exceed the available memory.",
                device=device,
                hint="Use a smaller model, a shorter context or fewer sequences.",
            )
        self._next: int = address
        self._end = self._next + self.size
        self.close = weakref.finalize(self, library.bitnet_pages_free, address, self.size)
        self.close.atexit = False  # a daemon thread may compute until the process ends

    def take(self, size: int) -> int:
        """The address of the next ``size`` bytes."""
        address = self._next
        self._next += aligned(size)
        assert self._next <= self._end, "more was taken from the arena than it was made for"
        return address


def view(address: int, shape: tuple[int, ...], dtype: npt.DTypeLike, row_stride: int) -> npt.NDArray[Any]:
    """An array over native memory, its rows ``row_stride`` bytes apart."""
    kind = np.dtype(dtype)
    size = row_stride * shape[0] if len(shape) > 1 else kind.itemsize * shape[0]
    strides = (row_stride, kind.itemsize) if len(shape) > 1 else (kind.itemsize,)
    buffer = (ctypes.c_char * size).from_address(address)
    array: npt.NDArray[Any] = np.ndarray(shape, kind, memoryview(buffer).cast("B"), strides=strides)
    return array
