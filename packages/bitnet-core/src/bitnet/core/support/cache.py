"""The cache on disk of compiled kernels and of other things that take long to make again: one file each, shared by a
user's processes. A bad entry counts as a miss.

An entry is a header (magic, schema, key, payload length, SHA-256 of the payload) and the payload. It is written under a
temporary name and renamed, so a reader sees a whole entry or none, even if the writer is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bitnet.core.support import env, log

SCHEMA = 1
"""Version of the entry format; part of every key."""
LIMIT = 512 * 2**20
"""Maximum bytes of all entries together; the least recently used are evicted first."""

listeners: list[Callable[[str, float], None]] = []
"""Callbacks that receive the name of a compiled kernel and the seconds it took, to show progress."""


def report(label: str, seconds: float) -> None:
    """Log that something was compiled, and call the listeners."""
    log.logger.info("compiled %s in %.2f s", label, seconds)
    for listener in listeners:
        listener(label, seconds)


_MAGIC = b"BITNETKC"
_HEADER = struct.Struct("<8sI32sQ32s")
_ENDING = ".kernel"
_TEMPORARY = ".tmp-"
_ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The cache's contents: ``entries`` files of ``size`` bytes in total, at most ``limit``."""

    folder: Path | None
    entries: int
    size: int
    limit: int


def cache_folder() -> Path:
    """bitnet's cache folder: ``BITNET_CACHE_DIR``, else the platform's cache folder for this user.

    Raises:
        RuntimeError: The user has no home folder.
    """
    if given := env.text("BITNET_CACHE_DIR"):
        return Path(given).expanduser().absolute()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "bitnet"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bitnet"
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "bitnet"


class KernelCache:
    """The compiled kernels of this user.

    If the folder cannot be written to, a warning is logged once, and entries are still read. With
    ``BITNET_NO_KERNEL_CACHE=1`` nothing is read or written.

    Args:
        limit: Maximum bytes of all entries together.
        level: How it is logged that the folder cannot be used.

    Raises:
        InvalidInputError: ``BITNET_NO_KERNEL_CACHE`` is neither 1 nor 0.
    """

    def __init__(self, *, limit: int = LIMIT, level: int = logging.WARNING) -> None:
        self._limit, self._level = limit, level
        self._off = env.flag("BITNET_NO_KERNEL_CACHE")
        self._writable = not self._off
        self.folder: Path | None = None
        try:
            self.folder = cache_folder() / "kernels"
            with contextlib.suppress(FileNotFoundError):
                _check_rights(self.folder.stat())
        except (OSError, RuntimeError) as error:
            self._off = True
            self._give_up(error)

    @staticmethod
    def key(*, source: str | bytes, device: str, driver: str, options: str, compiler: str) -> str:
        """The name of an entry: SHA-256 of everything that the compiled kernel depends on, each part preceded by its
        length."""
        digest = hashlib.sha256()
        for part in (source, device, driver, options, compiler, str(SCHEMA)):
            data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()

    def get(self, key: str) -> bytes | None:
        """The payload stored under ``key``; None if there is none or it is damaged."""
        if self.folder is None or self._off:
            return None
        path = self.folder / (key + _ENDING)
        try:
            payload = _read(path, key, self._limit)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.logger.debug("kernel cache: %s is not used: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the modification time records the last use
        return payload

    def put(self, key: str, payload: bytes, *, label: str, seconds: float) -> None:
        """Store a compiled kernel under ``key`` and log how long it took to compile. Disk errors are not raised.

        Args:
            label: Name of the kernel, for the log.
            seconds: How long it took.
        """
        report(label, seconds)
        self.keep(key, payload)

    def keep(self, key: str, payload: bytes) -> None:
        """Store what is not a kernel under ``key``. Disk errors are not raised."""
        if self.folder is None or not self._writable or len(payload) + _HEADER.size > self._limit:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_rights(self.folder.stat())
            self._write(key, payload)
            self._evict()
        except OSError as error:
            self._give_up(error)

    def stats(self) -> CacheStats:
        """What is in the cache now."""
        sizes = [found.st_size for _, found in self._entries()]
        return CacheStats(self.folder, len(sizes), sum(sizes), self._limit)

    def clear(self) -> CacheStats:
        """Remove every entry; other files are left alone.

        Returns:
            What was removed.

        Raises:
            OSError: An entry cannot be removed.
        """
        sizes = []
        for path, found in [*self._entries(), *self._entries(_TEMPORARY)]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                sizes.append(found.st_size)
        return CacheStats(self.folder, len(sizes), sum(sizes), self._limit)

    def _write(self, key: str, payload: bytes) -> None:
        assert self.folder is not None
        header = _HEADER.pack(_MAGIC, SCHEMA, bytes.fromhex(key), len(payload), hashlib.sha256(payload).digest())
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(header)
                file.write(payload)
            Path(name).replace(self.folder / (key + _ENDING))
        except BaseException as error:
            _remove(Path(name))
            # Windows refuses to replace a file that another process is reading, but that file has the same content.
            if not isinstance(error, PermissionError) or self.get(key) is None:
                raise

    def _evict(self) -> None:
        """Remove the least recently used entries until the rest fits, and temporary files of killed processes."""
        now = time.time()
        for path, found in self._entries(_TEMPORARY):
            if now - found.st_mtime > _ABANDONED_SECONDS:
                _remove(path)
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        size = sum(found.st_size for _, found in entries)
        for path, found in entries:
            if size <= self._limit:
                break
            _remove(path)
            size -= found.st_size

    def _entries(self, prefix: str = "") -> Iterator[tuple[Path, os.stat_result]]:
        """The entries that exist now; with a prefix, the unfinished ones."""
        try:
            paths = list(self.folder.iterdir()) if self.folder is not None else []
        except OSError:
            return
        for path in paths:
            if path.name.startswith(prefix) if prefix else path.name.endswith(_ENDING):
                with contextlib.suppress(OSError):
                    found = path.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield path, found

    def _give_up(self, error: Exception) -> None:
        self._writable = False
        where = self.folder or "the user's cache folder"
        why = str(getattr(error, "strerror", None) or error).removesuffix(".")  # without the temporary file's name
        log.once(
            self._level,
            f"Compiled kernels cannot be kept in {where}: {why}. Set BITNET_CACHE_DIR to a writable folder.",
        )


def _read(path: Path, key: str, limit: int) -> bytes:
    """The payload of an entry; raises ValueError with the reason if it is damaged."""
    with open(path, "rb", opener=_open_file) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        _check_rights(found)
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise ValueError("its header is cut off")
        magic, schema, own_key, length, checksum = _HEADER.unpack(head)
        if magic != _MAGIC or schema != SCHEMA:
            raise ValueError("it is not an entry of this version")
        if own_key.hex() != key:
            raise ValueError("it belongs to another key")
        if length > limit:
            raise ValueError(f"it claims {length} bytes")
        payload = file.read(length + 1)
    if len(payload) != length or hashlib.sha256(payload).digest() != checksum:
        raise ValueError("its checksum does not fit")
    return payload


def _open_file(path: str, flags: int) -> int:
    """Open an entry without following links and without blocking, in case it is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))


def _check_rights(found: os.stat_result) -> None:
    """Raise PermissionError if another user may have written the file: its content runs on our device."""
    if sys.platform == "win32" or sys.platform == "emscripten":
        return
    open_to_others = found.st_mode & 0o022
    if found.st_uid != os.geteuid() and (found.st_uid != 0 or open_to_others):
        raise PermissionError("it belongs to another user")
    if open_to_others:
        raise PermissionError(f"others may write to it (its mode is {stat.S_IMODE(found.st_mode):o}); remove it")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another process may have been first
        path.unlink()
