"""Atomic writing of files, and reading and writing of pipes without waiting for ever."""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from bitnet.core.errors import BitNetError

if sys.platform == "win32":
    import msvcrt
elif sys.platform != "emscripten":
    import fcntl

WAIT = 5.0
"""Seconds to wait for another process to open the other end of a named pipe."""
_DESCRIPTORS = "/proc/self/fd"
_NOW = getattr(os, "O_NONBLOCK", 0)
"""Flag with which opening a named pipe does not wait for its other end; Windows has no such pipes."""


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a file, or ``most`` + 1 bytes if it has more. A pipe is read to its end.

    Raises:
        OSError: It cannot be read, or is a named pipe that no process has opened for writing within :data:`WAIT`.
        ValueError: The path has a null character.
    """
    handle = os.open(path, os.O_RDONLY | _NOW | getattr(os, "O_BINARY", 0))
    try:
        begin = b""
        if _is_pipe(handle) and not select.select([handle], [], [], WAIT)[0]:
            with suppress(BlockingIOError):  # a writer that is silent; it may take its time
                begin = os.read(handle, 1)
                if not begin:
                    raise OSError(errno.ETIMEDOUT, "it is a named pipe that no process writes to")
        if _NOW:
            os.set_blocking(handle, True)
        with open(handle, "rb", closefd=False) as file:
            return begin + file.read(most + 1 - len(begin))
    finally:
        os.close(handle)


def _open_to_write(path: str, flags: int) -> int:
    """As ``os.open``, but a named pipe that no process has opened for reading within :data:`WAIT` is an error."""
    end = time.monotonic() + WAIT
    while True:
        try:
            handle = os.open(path, flags | _NOW)
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not Path(path).is_fifo():
                raise
            if time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, "it is a named pipe that no process reads") from None
        time.sleep(0.05)
    if _NOW:
        os.set_blocking(handle, True)
    return handle


def _is_pipe(handle: int) -> bool:
    return bool(_NOW) and stat.S_ISFIFO(os.fstat(handle).st_mode)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes its name in one step once everything is written; until then, an old file stays in place.

    If the system has unnamed files (Linux), it has no name until then, so a killed process leaves nothing behind.
    Elsewhere it has a name ending in ``.tmp``; if a process was killed, the next one to write the same file removes its
    leftover.

    A pipe or a device, such as ``/dev/stdout``, is written to directly.

    Raises:
        BitNetError: The file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with open(path, "wb", opener=_open_to_write) as file:
                yield file
            return
        target = path.resolve()  # replace the link's target, not the link
        if (handle := _unnamed(target.parent)) is not None:
            with open(f"{_DESCRIPTORS}/{handle}", "wb", opener=lambda name, flags: handle) as file:
                yield file
                _settle(file)
                _name(handle, target)
            return
        _remove_abandoned(target)
        temporary, named = _begun(target)
        try:
            with named:
                yield named
                _settle(named)
                if sys.platform != "win32":  # while it is locked: else another process may take it for abandoned
                    temporary.replace(target)
            if sys.platform == "win32":  # which renames no open file
                temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BitNetError(f"{path} cannot be written: {error.strerror or error}.") from error


def lock(handle: int) -> None:
    """Lock an open file until it is closed, or this process ends in whatever way.

    Raises:
        OSError: Another process has locked it, or the file system has no locks.
    """
    if sys.platform == "win32":
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    elif sys.platform != "emscripten":  # where no other process could hold it
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def free_space(path: Path) -> int:
    """Bytes free on the disk of a file or a folder, which need not exist yet."""
    while True:
        try:
            return shutil.disk_usage(path).free
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent


def incomplete(path: Path) -> Path:
    """Where a download of the file is kept until it is whole."""
    return path.with_name(f"{path.name}.incomplete")


def length(path: Path) -> int:
    """Bytes of the file; 0 if there is none, which another process may have renamed at any time."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def resolved(path: Path) -> Path:
    """Where links lead; the path as it is if another process removes one meanwhile, for which ``resolve`` may raise."""
    try:
        return path.resolve()
    except OSError:
        return path.absolute()


def files_below(folder: Path, ending: str = "") -> list[Path]:
    """What is in a folder and its subfolders, except folders, and has a name with this ending; sorted.

    A folder that another process has removed, also while this reads it, has nothing; ``Path.rglob`` may raise.
    """
    found = ((parent, name) for parent, _, names in os.walk(folder) for name in names if name.endswith(ending))
    return sorted(Path(parent, name) for parent, name in found)


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")


def _unnamed(folder: Path) -> int | None:
    """A descriptor of a new unnamed file; None if the system or the file system does not support these."""
    if not hasattr(os, "O_TMPFILE") or not Path(_DESCRIPTORS).is_dir():
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError as error:
        # A kernel that does not know the flag tries to open the folder itself, which fails with EISDIR.
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


def _name(handle: int, target: Path) -> None:
    """Give an unnamed file its name. An existing file is replaced by linking to a temporary name and renaming that."""
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


def _begun(target: Path) -> tuple[Path, BinaryIO]:
    """A new temporary file, locked while it is open, so that other processes know it is not abandoned."""
    while True:
        temporary = _temporary(target)
        file = temporary.open("xb")
        if sys.platform == "win32" or _mark_in_use(file.fileno(), temporary):
            return temporary, file
        file.close()


def _mark_in_use(handle: int, temporary: Path) -> bool:
    """Lock a temporary file; False: before that, another process has taken it for abandoned, and removes it."""
    try:
        lock(handle)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks, so others cannot lock it either
        return True
    return temporary.exists()


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of processes that were killed while writing ``target``."""
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
        lock(handle)
        path.unlink()
    finally:
        os.close(handle)
