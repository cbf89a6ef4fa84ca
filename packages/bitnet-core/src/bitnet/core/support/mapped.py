"""A model file on a disk: mapped into memory, read-only, or read in slices where files cannot be mapped."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError
from bitnet.core.support.guard import GuardedMap
from bitnet.core.support.source import PIECE, ByteSource, SlicedSource

MAX_SEEK = (1 << 31) - 1
"""Maximum bytes of a seek: a browser's Python takes a C ``long``, which has 32 bits there."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the small text begins that git keeps in place of a large file."""


class OpenFile(ByteSource):
    """A regular file, open for as long as this object lives.

    Raises:
        ModelFileError: The file is missing or empty, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        try:
            info = path.stat()  # before opening, which would block forever on a named pipe
            if stat.S_ISDIR(info.st_mode):
                hint = f"'bitnet convert {path} model.gguf' converts a Hugging Face folder to a GGUF file."
                raise ModelFileError("is a folder.", path=path, hint=hint)
            if not stat.S_ISREG(info.st_mode):
                raise ModelFileError("is not a regular file.", path=path)
            if info.st_size == 0:
                raise ModelFileError("is empty.", path=path, field="magic", offset=0)
            self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # kept open, to check its size later
            weakref.finalize(self, os.close, self._handle)
            self._as_opened = self._state()
            self.size = self._as_opened[0]
            self._begin_reading()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ModelFileError(f"cannot be opened: {reason}.", path=path, hint="Check the path.") from error
        if self.prefix(len(LFS_POINTER))[: len(LFS_POINTER)] == LFS_POINTER:
            raise ModelFileError(
                "is a Git LFS pointer: a note of where the file is, not the file.",
                path=path,
                hint="Run 'git lfs install' and 'git lfs pull' in its folder, or download the file itself.",
            )

    def _begin_reading(self) -> None:
        """Prepare to read the open file."""

    def beside(self, name: str) -> ByteSource | None:
        path = self.path.with_name(name)
        return type(self)(path) if path.exists() else None

    def check(self) -> None:
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
        info = os.fstat(self._handle)
        return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


class MappedFile(OpenFile):
    """A file that is mapped for as long as this object or a view of it lives.

    The mapping is shared: if another program writes to the file, reads here change. :meth:`check` detects that;
    :meth:`release` and :meth:`bitnet.core.support.source.ByteSource.sha256` call it.

    Attributes:
        map: The mapping, for reading single values.
    """

    def _begin_reading(self) -> None:
        self.map, self._copied = _map(self._handle, self.size)
        self.map.guard()
        self.size = len(self.map)

    def prefix(self, size: int) -> mmap.mmap:
        return self.map

    def bytes(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """``uint8[size]`` of the file, without copying."""
        return np.frombuffer(self.map, np.uint8, size, offset)

    @property
    def lost(self) -> bool:
        """Whether reads have hit missing pages, so that data read from them is not the file's."""
        return self.map.lost

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


class SlicedFile(OpenFile, SlicedSource):
    """A file of which only what is asked for is read."""

    def _begin_reading(self) -> None:
        SlicedSource.__init__(self, self.path, self.size)

    def read(self, offset: int, size: int) -> bytes:
        os.lseek(self._handle, 0, os.SEEK_SET)
        for begin in range(0, offset, MAX_SEEK):
            os.lseek(self._handle, min(MAX_SEEK, offset - begin), os.SEEK_CUR)
        return os.read(self._handle, size)

    def release(self, offset: int, size: int) -> None:
        self.check()


def open_file(path: Path) -> OpenFile:
    """A file, mapped. In a browser, where a mapping is a copy in Python's memory, it is read in slices."""
    return SlicedFile(path) if sys.platform == "emscripten" else MappedFile(path)


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
