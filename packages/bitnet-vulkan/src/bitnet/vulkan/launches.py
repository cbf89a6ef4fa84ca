"""What all lowerings of this backend make launches with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitnet.core.gpu import Arg, DenseBuffer, KernelSpec, Launch
from bitnet.vulkan.hardware import Hardware
from bitnet.vulkan.memory import Window


def launch(
    file: str, entry: str, grid: tuple[int, int, int], group: int, args: tuple[Arg, ...], defines: Mapping[str, int]
) -> Launch:
    """``grid`` work-groups of ``group`` invocations."""
    return Launch(KernelSpec(file, entry, tuple(defines.items())), grid, (group, 1, 1), args)


def parts(hardware: Hardware, weight: DenseBuffer) -> Iterator[tuple[Any, int, int]]:
    """A matrix as parts that a kernel can bind: the part, its first row, its rows."""
    rows, cols = weight.shape
    row_bytes = cols * (2 if weight.dtype == "f16" else 4)
    largest = hardware.largest_binding
    buffer: Any = weight.data
    if buffer.size <= largest:
        yield buffer, 0, rows
        return
    step = largest // row_bytes
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
