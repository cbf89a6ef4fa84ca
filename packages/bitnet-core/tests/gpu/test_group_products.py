"""How products with scales of groups divide their work: every legal shape fits the memory that each device grants."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu import Bucket, Buffer, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops.group_products import GroupProducts
from bitnet.core.hal import TernaryMatmul
from bitnet.core.hal.operands import MAX_K

SHARED = 16 << 10
"""Bytes of work-group memory that Vulkan and WebGPU promise."""
OP = TernaryMatmul("x", "s", ("w",), "out")


def lower(cols: int, group: int, rows: int, tokens: int, parts: int = 1) -> list[Launch]:
    memory = SimpleNamespace(nbytes=rows * -(-cols // 128) * 32)
    w = TernaryBuffer(memory, memory, rows, cols, -(-cols // 128) * 32, group)
    ctx: Any = SimpleNamespace(step=memory, tensors=dict.fromkeys(("x", "s", "out"), memory), ternary=lambda _: w)

    def windows(matrix: Buffer, count: int) -> Iterator[tuple[Buffer, int, int]]:
        each = -(-count // parts)
        for first in range(0, count, each):
            yield matrix, first, min(each, count - first)

    return GroupProducts(windows).lower(ctx, OP, Bucket(tokens, 0, 0))


def shared(spec: KernelSpec, items: int) -> tuple[int, int]:
    """Bytes that a kernel takes, from what it is compiled for, and the terms of a row that it keeps."""
    d = {name: int(value) for name, value in spec.defines}
    if spec.entry == "ternary_groups":
        return items // d["LANES"] * d["HELD"] * d["TOKENS"] * d["PITCH"] * 4, d["PITCH"]
    return 2 * d["PLANES"] * (8 * d["EACH_M"] + 64) * 16, d["COLS"] // d["GROUP"]


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 2048])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 4096, None])
def test_it_fits(group: int | None, tokens: int) -> None:
    rng = np.random.default_rng()
    for cols in (4096, 12288, MAX_K, *(int(n) * (group or 4) for n in rng.integers(1, MAX_K // (group or 4), 20))):
        for made in lower(cols, group or cols, 5, tokens):
            taken, kept = shared(made.kernel, made.block[0])
            assert taken <= SHARED, (cols, made)
            assert kept >= cols // (group or cols), (cols, made)


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_row_and_token_has_a_place(tokens: int, parts: int) -> None:
    """The launches' rows are those of the matrix, each once, and their grids reach all of them and all tokens."""
    for rows in (1, 63, 64, 65, 1000, 700_001):
        next_row = 0
        for made in lower(4096, 128, rows, tokens, parts):
            d = {name: int(value) for name, value in made.kernel.defines}
            count, first, total = (int(n) for n in np.frombuffer(made.scalars, np.uint32))
            few = made.kernel.entry == "ternary_groups"
            reached = (
                made.grid[0] * made.grid[1] * (made.block[0] // d["LANES"] * d["HELD"]) if few else made.grid[0] * 64
            )
            deep = made.grid[2] * d["TOKENS"] if few else made.grid[1] * 8 * d["EACH_M"]
            assert (first, total) == (next_row, rows)
            assert reached >= count
            assert deep >= tokens
            assert max(made.grid) <= 65535
            next_row += count
        assert next_row == rows
