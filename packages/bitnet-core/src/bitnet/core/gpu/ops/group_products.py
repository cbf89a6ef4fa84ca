"""Products of weights with scales of groups, for APIs that bind matrices in parts: Vulkan and WebGPU.

Both have kernels with these names, constants and arguments; :func:`in_parts` adds those of ternary tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Arg, Buffer, Launch, launch
from bitnet.core.gpu.drivers.windows import Windows, in_two
from bitnet.core.gpu.ops.rows import ceil_div, next_power_of_two, power_of_two
from bitnet.core.gpu.ops.scaled import group_layout
from bitnet.core.gpu.ops.tables import WindowedTables
from bitnet.core.gpu.ops.variants import GroupScaledMatmul, TernaryTable
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import TernaryMatmul

GROUP = 64
"""Invocations of a work-group of a product of few tokens."""
LANES = 16
"""Minimum invocations that share a row, unless the row has fewer groups."""
HELD = 2
"""Rows that these invocations share, for one token."""
FEW_TOKENS = 8
"""Steps with more tokens than this use the tiled product."""
TERMS = 4096
"""Terms of groups held by a work-group: 16 KiB, which every device supports."""
TILE_SIDE, TILE_N, TILE_GROUP = 8, 64, 128
"""Sizes of a work-group of the tiled product, as in its sources: invocations along the tokens, rows, invocations."""
TILE_EACH = (2, 4)
"""Choices for the tokens of an invocation of the tiled product: the first with which one work-group covers the step,
else the last."""


@dataclass(frozen=True, slots=True)
class GroupProducts:
    """Launches of such products on a device that binds matrices by ``windows``."""

    windows: Windows

    def lower(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer | None = None) -> list[Launch]:
        """A product of few tokens reads each weight once; one of many tokens is tiled. Into ``out`` if given."""
        w = ctx.ternary(op.weights)
        shape = group_defines(w) | {"ADD": int(op.add), "WIDE": int(w.cols % 16 == 0)}
        few = _few(w, shape["EACH"], bucket.tokens)
        made = []
        for args, rows in self.parts(ctx, op, out or ctx.tensors[op.out]):
            if bucket.tokens <= FEW_TOKENS:
                across = in_two(ceil_div(rows, GROUP // few["LANES"] * few["HELD"]))
                grid = (*across, ceil_div(bucket.tokens, few["TOKENS"]))
                made.append(launch("ternary_groups", grid, GROUP, args, shape | few))
            else:
                each = next((n for n in TILE_EACH if TILE_SIDE * n >= bucket.tokens), TILE_EACH[-1])
                grid = (ceil_div(rows, TILE_N), ceil_div(bucket.tokens, TILE_SIDE * each), 1)
                loads = ceil_div(TILE_SIDE * each * 2 * shape["PLANES"], TILE_GROUP)
                tile = {"EACH_M": each, "X_LOADS": loads}
                made.append(launch("ternary_groups_tiled", grid, TILE_GROUP, args, shape | tile))
        return made

    def parts(self, ctx: Context, op: TernaryMatmul, out: Buffer) -> Iterator[tuple[tuple[Arg, ...], int]]:
        """The arguments of any kernel of such a product, for each part of the weights, and the part's rows."""
        w, x = ctx.ternary(op.weights), (ctx.tensors[op.x], ctx.tensors[op.scale])
        for codes, first, rows in self.windows(w.codes, w.rows):
            sizes = (np.uint32(n) for n in (rows, first, w.rows))
            yield (ctx.step, *x, codes, w.scales, out, *sizes), rows


def in_parts(windows: Windows) -> Dispatch:
    """The entries of a lowering's table for weights with scales of groups: products, embeddings and heads."""
    return {GroupScaledMatmul: GroupProducts(windows).lower, TernaryTable: WindowedTables(windows).lower}


def group_defines(w: TernaryBuffer) -> dict[str, int]:
    """What all these kernels are compiled for: the row, its groups, how many of them a block of 128 columns has, and
    the bit pairs of a group."""
    assert w.group is not None
    layout = group_layout(w)
    return {"COLS": w.cols, "GROUP": w.group, "EACH": layout.sets, "PLANES": layout.planes}


def _few(w: TernaryBuffer, each: int, tokens: int) -> dict[str, int]:
    """How a work-group of a product of few tokens divides its work, so that its rows' terms fit."""
    assert w.group is not None
    count = w.cols // w.group
    pitch = count + (count % 2 == 0 and count < TERMS)  # odd, so that the rows fall into different banks
    lanes = min(next_power_of_two(ceil_div(count, each)), LANES)
    while lanes < GROUP and GROUP // lanes * pitch > TERMS:
        lanes *= 2
    slots = GROUP // lanes
    held = HELD if tokens == 1 and slots * HELD * pitch <= TERMS else 1
    most = power_of_two(max(TERMS // (slots * held * pitch), 1))
    return {"LANES": lanes, "HELD": held, "TOKENS": min(tokens, FEW_TOKENS, most), "PITCH": pitch}
