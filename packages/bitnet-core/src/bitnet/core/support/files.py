"""Writing a file whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from bitnet.core.errors import BitNetError

if sys.platform != "win32":
    import fcntl

_DESCRIPTORS = "/proc/self/fd"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes its name, in one step, once everything is written; until then, what was there stays.

    Where the system has unnamed files (Linux), it has no name before, and whatever ends the process leaves nothing.
    Elsewhere its name ends in ``.tmp``, and what a process left that was killed is removed by the next one that writes
    the same file.

    A pipe or a device, such as ``/dev/stdout``, is not replaced but written to.

    Raises:
        BitNetError: The file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()  # a link stays one
        if (handle := _unnamed(target.parent)) is not None:
            with open(f"{_DESCRIPTORS}/{handle}", "wb", opener=lambda name, flags: handle) as file:
                yield file
                _settle(file)
                _name(handle, target)
            return
        _remove_abandoned(target)
        temporary = _temporary(target)
        try:
            with temporary.open("xb") as file:
                _mark_in_use(file.fileno())
                yield file
                _settle(file)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BitNetError(f"{path} cannot be written: {error.strerror or error}.") from error


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _unnamed(folder: Path) -> int | None:
    """A descriptor of a new file without a name; None where the system, or the file system, has no such."""
    if not hasattr(os, "O_TMPFILE") or not Path(_DESCRIPTORS).is_dir():
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError as error:
        # A kernel that does not know the flag opens the folder, which is EISDIR.
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


def _name(handle: int, target: Path) -> None:
    """Give an unnamed file its name. One that is there is replaced, by way of a name that is there for a moment."""
    folder = os.open(target.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        try:
            _link(handle, target.name, folder)
        except FileExistsError:
            temporary = _temporary(target)
            _link(handle, temporary.name, folder)
            try:
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    finally:
        os.close(folder)


def _link(handle: int, name: str, folder: int) -> None:
    os.link(f"{_DESCRIPTORS}/{handle}", name, dst_dir_fd=folder, follow_symlinks=True)


def _mark_in_use(handle: int) -> None:
    """Lock a temporary file for as long as it is open, by which others know that it is not abandoned."""
    if sys.platform != "win32":
        with suppress(OSError):  # a file system without locks: others cannot lock it either
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_abandoned(target: Path) -> None:
    """Remove what processes left that were killed while they wrote ``target``."""
    beginning, ending = f".{target.name}.", ".tmp"
    with suppress(OSError):
        for path in target.parent.iterdir():
            name = path.name
            if name.startswith(beginning) and name.endswith(ending) and len(name) == len(beginning) + 8 + len(ending):
                with suppress(OSError):  # in use, or gone
                    _remove_unused(path)


def _remove_unused(path: Path) -> None:
    if sys.platform == "win32":
        path.unlink()  # which Windows refuses while the file is open
        return
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(handle)
