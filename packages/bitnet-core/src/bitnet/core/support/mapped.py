"""A file mapped into memory, read-only."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError
from bitnet.core.support.guard import GuardedMap

PIECE = 1 << 22
"""Bytes hashed before their pages are released."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the small text begins that git keeps in place of a large file."""


class MappedFile:
    """A regular file, mapped for as long as this object or a view of it lives.

    The mapping is shared: if another program writes to the file, reads here change. :meth:`check` detects that;
    :meth:`release` and :meth:`sha256` call it.

    Attributes:
        map: The mapping, for reading single values.
        size: Bytes of the file.

    Raises:
        ModelFileError: The file is missing or empty, or cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            info = path.stat()  # before opening, which would block forever on a named pipe
            if stat.S_ISDIR(info.st_mode):
                hint = f"'bitnet convert {path} model.gguf' converts a Hugging Face folder to a GGUF file."
                raise ModelFileError("is a folder.", path=path, hint=hint)
            if not stat.S_ISREG(info.st_mode):
                raise ModelFileError("is not a regular file.", path=path)
            if info.st_size == 0:
                raise ModelFileError("is empty.", path=path, field="magic", offset=0)
            self._handle = os.open(path, os.O_RDONLY)  # kept open, to check its size later
            weakref.finalize(self, os.close, self._handle)
            self._as_opened = self._state()
            self.map, self._copied = _map(self._handle, info.st_size)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ModelFileError(f"cannot be opened: {reason}.", path=path, hint="Check the path.") from error
        self.map.guard()
        self.size = len(self.map)
        if self.map[: len(LFS_POINTER)] == LFS_POINTER:
            raise ModelFileError(
                "is a Git LFS pointer: a note of where the file is, not the file.",
                path=path,
                hint="Run 'git lfs install' and 'git lfs pull' in its folder, or download the file itself.",
            )

    def bytes(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """``uint8[size]`` of the file, without copying."""
        return np.frombuffer(self.map, np.uint8, size, offset)

    @property
    def lost(self) -> bool:
        """Whether reads have hit missing pages, so that data read from them is not the file's."""
        return self.map.lost

    def check(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            ModelFileError: It was cut short or written to.
        """
        size, _ = state = self._state()
        if self.lost or size < self.size:
            what = f"was cut short while it was in use: {size} of {self.size} bytes are left."
            if size >= self.size:
                what = "could not be read to its end while it was in use: it was cut short, or its disk failed."
        elif state != self._as_opened:
            what = "was written to while it was in use."
        else:
            return
        hint = "Load it again; to replace a model file, write a new file and rename it."
        raise ModelFileError(what, path=self.path, hint=hint)

    def _state(self) -> tuple[int, int]:
        """The file's size and modification time."""
        info = os.fstat(self._handle)
        return info.st_size, info.st_mtime_ns

    @property
    def identity(self) -> tuple[int, ...]:
        """Values that differ between files, and before and after a write to the same file."""
        info = os.fstat(self._handle)
        return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the mapped file; errors as for :meth:`hash_into`."""
        digest = hashlib.sha256()
        self.hash_into(digest)
        return digest.hexdigest()

    def hash_into(self, digest: hashlib._Hash) -> None:
        """Update a digest with the mapped file, even if another file has taken its name.

        Raises:
            ModelFileError: The file has changed since it was opened.
        """
        for begin in range(0, self.size, PIECE):
            size = min(PIECE, self.size - begin)
            digest.update(self.bytes(begin, size).data)
            self.release(begin, size)
        self.check()

    def release(self, offset: int, size: int) -> None:
        """Release mapped pages that were read, if the platform can. Reading them again reloads them from the file.

        Raises:
            ModelFileError: The file has changed since it was opened.
        """
        self.check()
        if self._copied or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _map(handle: int, size: int) -> tuple[GuardedMap, bool]:
    """The mapping of an open file, and whether it is a copy in memory: some file systems, such as that of a browser's
    files in Pyodide, map none."""
    try:
        return GuardedMap(handle, 0, access=mmap.ACCESS_READ), False
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
    copy = GuardedMap(-1, size)
    while (at := copy.tell()) < size:
        copy.write(os.read(handle, min(PIECE, size - at)) or _cut_short())
    return copy, True


def _cut_short() -> bytes:
    raise OSError(errno.EIO, "it was cut short while it was read")


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array is part of a mapping, which has whole pages."""
    owner: Any = array
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner is not None
