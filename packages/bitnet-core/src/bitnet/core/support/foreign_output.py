"""Keeps what plug-ins and drivers print to standard output out of the command line's answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import TextIO

_lock = threading.Lock()
_asked = 0
_inside = 0
_kept: tuple[int | None, TextIO | None] = (None, None)


@contextlib.contextmanager
def kept_apart() -> Iterator[None]:
    """Enable :func:`to_stderr` in this context, for programs whose standard output others read."""
    global _asked  # noqa: PLW0603
    _asked += 1
    try:
        yield
    finally:
        _asked -= 1


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """Redirect standard output, from C and Python, to standard error while foreign code runs.

    Does nothing outside :func:`kept_apart`: a program that uses bitnet as a library owns its streams.
    """
    if not _asked:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def flush_c() -> None:
    """Flush C's stdio buffers, which would otherwise be written at the end of the process."""
    with contextlib.suppress(OSError, AttributeError):
        _c_library().fflush(None)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)


def _enter() -> None:
    global _inside, _kept  # noqa: PLW0603
    with _lock:
        _inside += 1
        if _inside > 1:
            return
        flush_c()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        real = None
        with contextlib.suppress(OSError):  # if one of the two is closed
            real = os.dup(1)
            os.dup2(2, 1)
        _kept = real, sys.stdout
        sys.stdout = sys.stderr


def _leave() -> None:
    global _inside, _kept  # noqa: PLW0603
    with _lock:
        _inside -= 1
        if _inside:
            return
        flush_c()
        real, python = _kept
        _kept = None, None
        if python is not None and sys.stdout is sys.stderr:
            sys.stdout = python
        if real is not None:
            os.dup2(real, 1)
            os.close(real)
