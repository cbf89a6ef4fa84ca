"""Windows of buffers, for buffers that are larger than one binding or one grid can cover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeAlias

from bitnet.core.gpu.drivers.failures import binding_too_large
from bitnet.core.gpu.drivers.interface import Buffer

Windows: TypeAlias = Callable[[Buffer, int], Iterator[tuple[Buffer, int, int]]]
"""Splits a matrix with a number of rows into bindable parts: (part, first row, number of rows)."""
MAX_GROUPS = 65535
"""Maximum work-groups along one side of a grid that every Vulkan and WebGPU device supports."""


def in_two(groups: int) -> tuple[int, int]:
    """A two-dimensional grid with at least ``groups`` work-groups, within the limits of each dimension."""
    rows = -(-groups // MAX_GROUPS)
    return -(-groups // rows), rows


@dataclass(frozen=True, slots=True)
class Window:
    """``nbytes`` bytes of a buffer, from ``offset`` on, as a kernel argument."""

    buffer: Buffer
    offset: int
    nbytes: int


def memory_of(buffer: Buffer) -> Buffer:
    """The buffer itself, or the buffer of a window."""
    return buffer.buffer if isinstance(buffer, Window) else buffer


def bound(buffer: Buffer, largest: int, kernel: str, device: str) -> tuple[Any, int, int]:
    """A kernel's binding of a buffer or window: memory, offset, and size in bytes.

    The size is rounded up to 16 bytes, because kernels read vectors of 16 bytes; buffers must be padded accordingly.

    Args:
        largest: Maximum bytes of a binding.
        kernel: Name of the kernel, for errors, like ``device``.

    Raises:
        OutOfMemoryError: The binding would exceed ``largest``.
    """
    window = buffer if isinstance(buffer, Window) else Window(buffer, 0, buffer.nbytes)
    size = -(-window.nbytes // 16) * 16
    if size > largest:
        raise binding_too_large(kernel, size, largest, device)
    return window.buffer, window.offset, size


def row_windows(
    buffer: Buffer, rows: int, row_bytes: int, *, largest: int, alignment: int, most_rows: int | None = None
) -> Iterator[tuple[Buffer, int, int]]:
    """Split a matrix into as few bindable parts as possible: each part, its first row, and its number of rows.

    Args:
        largest: Maximum bytes of a binding.
        alignment: Required alignment of a binding's offset in bytes, a power of two.
        most_rows: Maximum rows of a part, limited by the grid.
    """
    reached = rows if most_rows is None else most_rows
    if rows * row_bytes <= largest and rows <= reached:
        yield buffer, 0, rows
        return
    multiple = alignment // gcd(alignment, row_bytes)  # of rows, so that every part begins at an aligned offset
    each = max(min(largest // row_bytes, reached) // multiple, 1) * multiple
    for first in range(0, rows, each):
        count = min(each, rows - first)
        yield Window(buffer, first * row_bytes, count * row_bytes), first, count
