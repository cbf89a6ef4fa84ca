"""Where the bytes of a model file come from: a mapped file, or one that is read in slices."""

from __future__ import annotations

import builtins
import hashlib
import mmap
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError

AHEAD = 1 << 20
"""Minimum bytes that are read at a time of a header, whose length is not known before."""
PIECE = 1 << 22
"""Bytes that are hashed at a time."""


class ByteSource(ABC):
    """The bytes of a file.

    Attributes:
        path: Its path, name or address, for errors.
        size: Its number of bytes.
    """

    path: str | Path
    size: int

    @abstractmethod
    def prefix(self, size: int) -> mmap.mmap | builtins.bytes:
        """The first ``size`` bytes, or more of them."""

    @abstractmethod
    def bytes(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """``uint8[size]`` of the file, from ``offset`` on.

        Raises:
            ModelFileError: They cannot be read.
        """

    @abstractmethod
    def beside(self, name: str) -> ByteSource | None:
        """Another file of the same folder; None if there is none."""

    @property
    @abstractmethod
    def identity(self) -> tuple[int, ...]:
        """Values that differ between files, and before and after a write to the same file."""

    @property
    def lost(self) -> bool:
        """Whether bytes that were read are not the file's."""
        return False

    def check(self) -> None:  # noqa: B027  # only files that others can write to
        """Check that the file has not changed since it was opened.

        Raises:
            ModelFileError: It was cut short or written to.
        """

    def release(self, offset: int, size: int) -> None:  # noqa: B027  # only sources that keep what was read
        """Release the memory of bytes that were read, if there is any. Reading them again reloads them.

        Raises:
            ModelFileError: The file has changed since it was opened.
        """

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the file; errors as for :meth:`hash_into`."""
        digest = hashlib.sha256()
        self.hash_into(digest)
        return digest.hexdigest()

    def hash_into(self, digest: hashlib._Hash) -> None:
        """Update a digest with the file, even if another one has taken its name.

        Raises:
            ModelFileError: The file has changed since it was opened.
        """
        for begin in range(0, self.size, PIECE):
            size = min(PIECE, self.size - begin)
            digest.update(self.bytes(begin, size).data)
            self.release(begin, size)
        self.check()


class SlicedSource(ByteSource):
    """A file that is read in slices, of which only the header is kept.

    Args:
        path: Its name or address, for errors.
        size: Its number of bytes.
    """

    def __init__(self, path: str | Path, size: int) -> None:
        if size == 0:
            raise ModelFileError("is empty.", path=path, field="magic", offset=0)
        self.path, self.size = path, size
        self._begin = b""

    @abstractmethod
    def read(self, offset: int, size: int) -> builtins.bytes | bytearray:
        """At most ``size`` bytes from ``offset`` on, and at least one; no bytes: the file ends before.

        Raises:
            ModelFileError: They cannot be read.
        """

    @property
    def identity(self) -> tuple[int, ...]:
        return id(self), self.size

    def beside(self, name: str) -> ByteSource | None:
        return None

    def prefix(self, size: int) -> builtins.bytes:
        have = len(self._begin)
        if size > have:  # at least twice as many, so that copying what is there takes no more time than reading
            wanted = min(max(size - have, have, AHEAD), self.size - have)
            self._begin += self.bytes(have, wanted).tobytes()
        return self._begin

    def bytes(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if offset + size <= len(self._begin):
            return np.frombuffer(self._begin, np.uint8, size, offset)
        out, at = np.empty(size, np.uint8), 0
        while at < size:
            piece = self.read(offset + at, size - at)
            if not piece:
                raise ModelFileError(
                    f"ends at byte {offset + at}; it should have {self.size} bytes.",
                    path=self.path,
                    hint="It was cut short meanwhile: open it again.",
                )
            out[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        out.flags.writeable = False
        return out
