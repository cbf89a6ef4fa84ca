"""A file mapped into memory, read-only."""

from __future__ import annotations

import hashlib
import mmap
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError

PIECE = 1 << 22
"""Bytes that are hashed before their pages are let go."""


class MappedFile:
    """A regular file, mapped for as long as this object or a view of it lives.

    Attributes:
        map: The mapping, for reading single values.
        size: Bytes of the file.

    Raises:
        ModelFileError: The file is not there, empty, or cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            info = path.stat()  # before opening, which would wait for ever on a named pipe
            if stat.S_ISDIR(info.st_mode):
                hint = f"'bitnet convert {path} model.gguf' makes a GGUF file of a Hugging Face folder."
                raise ModelFileError("is a folder.", path=path, hint=hint)
            if not stat.S_ISREG(info.st_mode):
                raise ModelFileError("is not a regular file.", path=path)
            if info.st_size == 0:
                raise ModelFileError("is empty.", path=path, field="magic", offset=0)
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ModelFileError(f"cannot be opened: {reason}.", path=path, hint="Check the path.") from error
        self.size = len(self.map)

    def bytes(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """``uint8[size]`` of the file; nothing is copied."""
        return np.frombuffer(self.map, np.uint8, size, offset)

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all of it: of what is mapped, whatever has its name by now."""
        digest = hashlib.sha256()
        for begin in range(0, self.size, PIECE):
            size = min(PIECE, self.size - begin)
            digest.update(self.bytes(begin, size).data)
            self.release(begin, size)
        return digest.hexdigest()

    def release(self, offset: int, size: int) -> None:
        """Let go of mapped pages where the platform can; they come back from the file when read again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
