"""Model files that are cut short while they are mapped: an error that names the file, not the end of the process."""

from __future__ import annotations

from typing import Any

from bitnet.core.support.guard import guard_with


def guard_model_files() -> None:
    """From now on, a model file that loses pages while it is open makes its users raise ``ModelFileError``.

    Without this the system ends the process with SIGBUS. A handler of that signal is installed while model files are
    open; it answers for their addresses alone, and hands everything else to the handler that was there before. The
    ``bitnet`` command calls this; a program that has the library calls it, or not, before it loads a model.

    It does nothing where the native library is not there, and on Windows, which lets nobody cut a mapped file short.
    """
    guard_with(_native)


def _native() -> Any:
    from bitnet.core.cpu.native import library  # when a file is mapped, which many commands never do

    return library().handle
