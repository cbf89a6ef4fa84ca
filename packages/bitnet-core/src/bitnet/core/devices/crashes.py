"""Backends that have ended a process: a marker is on disk while a backend's code runs, and stays if it crashes.

A marker is a file that its process keeps locked. The system lets go of the lock however the process ends, and no other
process, container or restart can be taken for it, as it could be by a number. A folder that cannot be written keeps no
history, and nothing fails for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bitnet.core.support.cache import cache_folder

if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


_FOLDER, _BETWEEN = "running", "@"


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
            if sys.platform == "win32":  # which removes no open file
                os.close(handle)
            with contextlib.suppress(OSError):
                path.unlink()
            if sys.platform != "win32":
                os.close(handle)


def left_by(backend: str) -> Mapping[Path, str]:
    """The markers of processes that ended in the code of a backend or of its devices, each with that name."""
    return dict(_abandoned(backend))


def forget(markers: Iterable[Path]) -> None:
    """Remove markers."""
    for path in markers:
        with contextlib.suppress(OSError):
            path.unlink()


def _mark(what: str) -> tuple[int, Path | None]:
    backend, _, index = what.partition(":")
    prefix = _BETWEEN.join((backend, index, ""))
    try:
        folder = cache_folder() / _FOLDER
        try:
            handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        except FileNotFoundError:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    except (OSError, RuntimeError):
        return -1, None
    with contextlib.suppress(OSError):  # not every file system has locks; a child will have to decide then
        _lock(handle)
    return handle, Path(name)


def _abandoned(backend: str) -> Iterator[tuple[Path, str]]:
    """Markers of a backend and its devices whose processes are gone."""
    try:
        paths = list((cache_folder() / _FOLDER).iterdir())
    except (OSError, RuntimeError):
        return
    for path in paths:
        name, *index = path.name.split(_BETWEEN)
        if name == backend and len(index) == 2 and not _held(path):
            yield path, ":".join(filter(None, (name, index[0])))


def _held(path: Path) -> bool:
    """Whether the marker's process lives, or that cannot be known."""
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return True
    try:
        _lock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
