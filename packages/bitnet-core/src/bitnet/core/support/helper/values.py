"""Turns values into the data of requests and answers, without extra copies of arrays.

Both ends are ours and trust each other: values are pickled.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

_ALIGNED = 16


def dumped(value: Any) -> list[bytes | memoryview]:
    """A value's data: the number of its arrays and their sizes, the arrays, each aligned, and the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    data: list[bytes | memoryview] = [struct.pack(f"<{1 + len(arrays)}Q", len(arrays), *map(len, arrays))]
    for array in arrays:
        data += bytes(-len(data[-1]) % _ALIGNED), array
    return [*data, bytes(-len(data[-1]) % _ALIGNED), pickled]


def loaded(data: bytearray) -> Any:
    """The value of :func:`dumped`; its arrays are writable and share the memory of ``data``."""
    view, arrays = memoryview(data), []
    (count,) = struct.unpack_from("<Q", data)
    begin = _aligned(8 + 8 * count)
    for size in struct.unpack_from(f"<{count}Q", data, 8):
        arrays.append(view[begin : begin + size])
        begin = _aligned(begin + size)
    return pickle.loads(view[begin:], buffers=arrays)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED
