"""Turns truncation of a mapped model file into an error that names the file, instead of a crash of the process."""

from __future__ import annotations

from typing import Any

from bitnet.core.support.guard import guard_with


def guard_model_files() -> None:
    """From now on, if an open model file loses pages, reads raise ``ModelFileError``.

    Otherwise the system ends the process with SIGBUS. A signal handler is installed while model files are open. It
    handles only their addresses and passes everything else to the previous handler. The ``bitnet`` command calls this
    function; programs that use the library may call it before they load a model.

    It does nothing if the native library is missing, or on Windows, where mapped files cannot be truncated.
    """
    guard_with(_native)


def _native() -> Any:
    from bitnet.core.cpu.native import library  # imported only when a file is mapped, as many commands never do that

    return library().handle
