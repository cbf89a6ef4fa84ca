"""Sends values through the pipes between a process and its child, without extra copies of arrays.

Both ends are ours and trust each other: values are pickled.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

_COUNT = struct.Struct("<Q")


def send(pipe: BinaryIO, value: Any) -> None:
    """Write a value.

    Raises:
        OSError: The other end no longer reads.
    """
    arrays: list[pickle.PickleBuffer] = []
    parts = [memoryview(pickle.dumps(value, protocol=5, buffer_callback=arrays.append)), *(a.raw() for a in arrays)]
    pipe.write(b"".join([_COUNT.pack(len(parts)), *(_COUNT.pack(part.nbytes) for part in parts)]))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Read the next value; its arrays are writable.

    Raises:
        EOFError: The other end has closed the pipe.
        OSError: The pipe cannot be read.
    """
    (count,) = _COUNT.unpack(_read(pipe, _COUNT.size))
    sizes = [_COUNT.unpack(_read(pipe, _COUNT.size))[0] for _ in range(count)]
    first, *arrays = [_read(pipe, size) for size in sizes]
    return pickle.loads(first, buffers=arrays)


def _read(pipe: BinaryIO, size: int) -> bytearray:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = pipe.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        view = view[count:]
    return found
