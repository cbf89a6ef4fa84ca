"""Copies a model file to where it is kept: a copy that was cut is gone on with, and its hash is checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError
from bitnet.core.support.source import PIECE, ByteSource

_SHOWN = 16
"""Hex digits of a hash shown in errors."""


class Store(Protocol):
    """A file that is written, and read again."""

    @property
    def length(self) -> int:
        """Bytes that it has."""

    def read(self, offset: int, size: int) -> bytes | bytearray:
        """At most ``size`` bytes; none at its end."""

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write ``uint8[n]``.

        Raises:
            ModelFileError: There is no room for them.
        """

    def truncate(self, size: int) -> None:
        """Cut it."""


def copy(
    source: ByteSource, store: Store, *, sha256: str | None = None, progress: Callable[[int, int], object] | None = None
) -> None:
    """Copy a file piece by piece. If ``sha256`` is given, the bytes that a store already has are kept.

    Args:
        sha256: The file's hash, hexadecimal.
        progress: Called with the number of bytes that are there, and with that of all. What it raises ends the copy.

    Raises:
        ModelFileError: The source cannot be read any more, or there is no room: what has been copied stays, and the
            next call goes on from there. Or the hash is another one: nothing stays.
    """
    digest, have = hashlib.sha256(), store.length
    if sha256 is None or have > source.size:
        have = 0
        store.truncate(0)
    at = 0
    while at < have:
        piece = store.read(at, min(PIECE, have - at))
        digest.update(piece)
        at += len(piece)
    while have < source.size:
        if progress is not None:
            progress(have, source.size)
        data = source.bytes(have, min(PIECE, source.size - have))
        store.write(have, data)
        digest.update(data.data)
        have += len(data)
    source.check()
    if progress is not None:
        progress(have, source.size)
    if sha256 is not None and digest.hexdigest() != sha256.lower():
        store.truncate(0)
        raise ModelFileError(
            f"its hash begins with {digest.hexdigest()[:_SHOWN]} but should begin with {sha256[:_SHOWN]}. The copy was "
            "removed.",
            path=source.path,
            hint="Copy it again. If it happens again, something on the way modifies the file.",
        )
