"""Parts of buffers: what a kernel sees of one that is larger than a binding, or than one grid reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

from bitnet.core.gpu.driver import Buffer
from bitnet.core.gpu.failures import binding_too_large

MOST_GROUPS = 65535
"""Work-groups along one side of a grid, as many as every Vulkan and WebGPU device takes."""


def in_two(groups: int) -> tuple[int, int]:
    """A number of work-groups as a grid of two dimensions, each as large as a device allows; some may be too many."""
    rows = -(-groups // MOST_GROUPS)
    return -(-groups // rows), rows


@dataclass(frozen=True, slots=True)
class Window:
    """``nbytes`` of a buffer, from ``offset`` on, as a kernel's argument."""

    buffer: Buffer
    offset: int
    nbytes: int


def memory_of(buffer: Buffer) -> Buffer:
    """The buffer itself, or the one that a window is part of."""
    return buffer.buffer if isinstance(buffer, Window) else buffer


def bound(buffer: Buffer, largest: int, kernel: str, device: str) -> tuple[Any, int, int]:
    """What a kernel binds of a buffer or a window: the memory, the offset, and the size in bytes.

    The size is whole vectors of 16 bytes, which kernels read at a time; buffers must end at a multiple of them.

    Args:
        largest: Maximum bytes of a binding.
        kernel: Name of the kernel, for the error, as ``device`` is the device's.

    Raises:
        OutOfMemoryError: The binding would be larger.
    """
    window = buffer if isinstance(buffer, Window) else Window(buffer, 0, buffer.nbytes)
    size = -(-window.nbytes // 16) * 16
    if size > largest:
        raise binding_too_large(kernel, size, largest, device)
    return window.buffer, window.offset, size


def row_windows(
    buffer: Buffer, rows: int, row_bytes: int, *, largest: int, alignment: int, most_rows: int | None = None
) -> Iterator[tuple[Buffer, int, int]]:
    """A matrix in as few parts as can be bound: each part, its first row, and its number of rows.

    Args:
        largest: Maximum bytes of a binding.
        alignment: What a binding's offset is a multiple of, in bytes; a power of two.
        most_rows: Maximum rows of a part, where a grid reaches no more.
    """
    reached = rows if most_rows is None else most_rows
    if rows * row_bytes <= largest and rows <= reached:
        yield buffer, 0, rows
        return
    multiple = alignment // gcd(alignment, row_bytes)  # of rows, so that every part begins where a binding may
    each = max(min(largest // row_bytes, reached) // multiple, 1) * multiple
    for first in range(0, rows, each):
        count = min(each, rows - first)
        yield Window(buffer, first * row_bytes, count * row_bytes), first, count
