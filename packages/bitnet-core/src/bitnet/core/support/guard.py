"""File mappings that survive truncation of the file, with the help of the native library."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

_library: Callable[[], Any] | None = None


def guard_with(library: Callable[[], Any]) -> None:
    """Guard all files mapped from now on.

    Args:
        library: Returns the native library, which has ``bitnet_guard``, or None if there is none. Called once per
            mapping.
    """
    global _library  # noqa: PLW0603 - signal handlers are global to the process, too
    _library = library


class GuardedMap(mmap.mmap):
    """A read-only mapping of a file, guarded if :func:`guard_with` was called before."""

    _range = -1

    def guard(self) -> None:
        """Guard the mapping until it is closed. Must be called only once."""
        if _library is None:
            return
        import numpy as np

        if (native := _library()) is not None:
            self._native = native
            self._range = native.bitnet_guard(np.frombuffer(self, np.uint8).ctypes.data, len(self))

    @property
    def lost(self) -> bool:
        """Whether pages have disappeared from the file and are now read as zeros."""
        return self._range >= 0 and bool(self._native.bitnet_guard_lost(self._range))

    def __del__(self) -> None:
        if self._range >= 0:
            self._native.bitnet_unguard(self._range)
