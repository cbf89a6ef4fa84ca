"""Model files that are cut short while they are mapped: an error that names the file, not the end of the process."""

from __future__ import annotations

import mmap

_wanted = False


def guard_model_files() -> None:
    """From now on, a model file that loses pages while it is open makes its users raise ``ModelFileError``.

    Without this the system ends the process with SIGBUS. A handler of that signal is installed while model files are
    open; it answers for their addresses alone, and hands everything else to the handler that was there before. The
    ``bitnet`` command calls this; a program that has the library calls it, or not, before it loads a model.

    It does nothing where the native library is not there, and on Windows, which lets nobody cut a mapped file short.
    """
    global _wanted  # noqa: PLW0603 - as a signal's handler is the process's
    _wanted = True


class GuardedMap(mmap.mmap):
    """A mapped file that is read only, and guarded where :func:`guard_model_files` was called before it was made."""

    _range = -1

    def guard(self) -> None:
        """To be called once; ends with the map."""
        if not _wanted:
            return
        import numpy as np

        from bitnet.core.cpu.native import library

        if (native := library().handle) is not None:
            self._native = native
            self._range = native.bitnet_guard(np.frombuffer(self, np.uint8).ctypes.data, len(self))

    @property
    def lost(self) -> bool:
        """Whether pages went away, and are read as zeros since."""
        return self._range >= 0 and bool(self._native.bitnet_guard_lost(self._range))

    def __del__(self) -> None:
        if self._range >= 0:
            self._native.bitnet_unguard(self._range)
