"""Maps of files that may be cut short, guarded by the native library where a program asked for that."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

_library: Callable[[], Any] | None = None


def guard_with(library: Callable[[], Any]) -> None:
    """Guard every file mapped from now on.

    Args:
        library: Gives the native library, which has ``bitnet_guard``; None where there is none. Called once a map.
    """
    global _library  # noqa: PLW0603 - as a signal's handler is the process's
    _library = library


class GuardedMap(mmap.mmap):
    """A mapped file that is read only, and guarded where :func:`guard_with` was called before it was made."""

    _range = -1

    def guard(self) -> None:
        """To be called once; ends with the map."""
        if _library is None:
            return
        import numpy as np

        if (native := _library()) is not None:
            self._native = native
            self._range = native.bitnet_guard(np.frombuffer(self, np.uint8).ctypes.data, len(self))

    @property
    def lost(self) -> bool:
        """Whether pages went away, and are read as zeros since."""
        return self._range >= 0 and bool(self._native.bitnet_guard_lost(self._range))

    def __del__(self) -> None:
        if self._range >= 0:
            self._native.bitnet_unguard(self._range)
