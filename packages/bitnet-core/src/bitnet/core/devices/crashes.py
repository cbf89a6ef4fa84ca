"""Records crashes of backends: while a backend's code runs, a marker is on disk, and it stays there after a crash.

A marker is a file that its process keeps locked. The system releases the lock however the process ends. Unlike a
process id, a lock cannot be confused with one of another process, container or boot. If the folder cannot be written
to, crashes are not recorded, and nothing fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bitnet.core.support.cache import cache_folder
from bitnet.core.support.files import lock

_FOLDER, _BETWEEN = "running", "@"
_NEW = "" if sys.platform == "win32" else "."
"""Prefix of a marker's name until it is locked: without it, other processes would take the marker for a dead process's.
Empty on Windows, which cannot rename an open file."""


@contextlib.contextmanager
def watching(what: str) -> Iterator[None]:
    """Leave a marker if this process ends before the context does.

    Args:
        what: A backend (``cuda``) or a device (``cuda:0``).
    """
    handle, path = _mark(what)
    try:
        yield
    finally:
        if path is not None:
            if sys.platform == "win32":  # which cannot remove open files
                os.close(handle)
            with contextlib.suppress(OSError):
                path.unlink()
            if sys.platform != "win32":
                os.close(handle)


def left_by(backend: str) -> Mapping[Path, str]:
    """Markers of processes that ended in the code of a backend or its devices, mapped to the backend's or device's
    name."""
    return dict(_abandoned(backend))


def forget(markers: Iterable[Path]) -> None:
    """Remove markers."""
    for path in markers:
        with contextlib.suppress(OSError):
            path.unlink()


def _mark(what: str) -> tuple[int, Path | None]:
    backend, _, index = what.partition(":")
    prefix = _NEW + _BETWEEN.join((backend, index, ""))
    try:
        folder = cache_folder() / _FOLDER
        try:
            handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        except FileNotFoundError:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    except (OSError, RuntimeError):
        return -1, None
    made = Path(name)
    with contextlib.suppress(OSError):  # not every file system has locks; then a child must find out
        lock(handle)
    with contextlib.suppress(OSError):  # somebody may have removed it
        made = made.rename(made.with_name(made.name.removeprefix(_NEW)))
    return handle, made


def _abandoned(backend: str) -> Iterator[tuple[Path, str]]:
    """Markers of a backend and its devices whose processes have ended."""
    try:
        paths = list((cache_folder() / _FOLDER).iterdir())
    except (OSError, RuntimeError):
        return
    for path in paths:
        name, *index = path.name.split(_BETWEEN)
        if name == backend and len(index) == 2 and not _held(path):
            yield path, ":".join(filter(None, (name, index[0])))


def _held(path: Path) -> bool:
    """Whether the marker's process is alive, or this cannot be determined."""
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return True
    try:
        lock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
