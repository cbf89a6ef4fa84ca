"""What all lowerings of this backend make launches with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitnet.core.gpu import Arg, DenseBuffer, KernelSpec, Launch
from bitnet.vulkan.hardware import Hardware
from bitnet.vulkan.memory import Window

MOST_GROUPS = 65535
"""Work-groups along one side of a grid, as many as every device takes."""


def launch(
    file: str, entry: str, grid: tuple[int, int, int], group: int, args: tuple[Arg, ...], defines: Mapping[str, int]
) -> Launch:
    """``grid`` work-groups of ``group`` invocations."""
    return Launch(KernelSpec(file, entry, tuple(defines.items())), grid, (group, 1, 1), args)


def parts(hardware: Hardware, weight: DenseBuffer, group_rows: int = 0) -> Iterator[tuple[Any, int, int]]:
    """A matrix as parts that a kernel can bind, and that a grid reaches: the part, its first row, its rows.

    Args:
        group_rows: Rows that a work-group does; 0 where the grid does not count rows.
    """
    rows, cols = weight.shape
    row_bytes = cols * (2 if weight.dtype == "f16" else 4)
    largest, reached = hardware.largest_binding, group_rows * MOST_GROUPS or rows
    buffer: Any = weight.data
    if buffer.size <= largest and rows <= reached:
        yield buffer, 0, rows
        return
    step = min(largest // row_bytes, reached)
    while step * row_bytes % max(hardware.alignment, 16):
        step -= 1
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield Window(buffer, first * row_bytes, count * row_bytes), first, count


def pitch(chunks: int) -> int:
    """Between planes of activations: a quarter of the 32 banks past a multiple of them."""
    return chunks + (2 - chunks) % 8


def power_of_two(n: int) -> int:
    """The largest that is not above ``n``."""
    return 1 << (n.bit_length() - 1)
