"""Launches of ternary_group_few: products of few tokens of weights with a scale for each 128 columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bitnet.core.gpu import Buffer, Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.ops.products import product_defines, row_sums
from bitnet.core.hal import GatedQuant, GluNormQuant, NormQuant, TernaryMatmul
from bitnet.cuda.slices import MAX_SHARED, MIN_SHARED, UNIT
from bitnet.cuda.tiles import ALIGNMENT, PANEL, TiledMatrix
from bitnet.cuda.weights import ternary

GROUP, WHOLE = 128, 8
"""Columns of a scale, and the number of scales of a row that the copy engine takes multiples of: 16 bytes."""
MIN_SLOTS = 4
"""Minimum groups in shared memory: two that are multiplied, one that is read, one that is fetched."""
TOKENS = range(17, 65)
"""Numbers of tokens for which the kernel was faster than others for the products of Bonsai 8B and 27B, but for gates
and ups of the latter without bounds (43.9 µs for 42.3). Of 16 tokens it was for the widest alone, by a tenth."""


class GroupShape(NamedTuple):
    """What a block of ternary_group_few computes, and what that takes on an H200.

    Attributes:
        rows: Rows of W: 64, 128 or 192.
        tokens: Tokens: 16, 32 or 64.
        cost: Nanoseconds of a group.
    """

    rows: int
    tokens: int
    cost: int


SHAPES = (
    GroupShape(64, 32, 161),
    GroupShape(128, 32, 255),
    GroupShape(192, 32, 362),
    GroupShape(64, 64, 190),
    GroupShape(128, 64, 320),
    GroupShape(192, 64, 482),
)
START = 2200
"""Nanoseconds of a block besides its groups."""


def few_groups_shape(w: TernaryBuffer, tokens: int, multiprocessors: int) -> GroupShape | None:
    """The shape with the least estimated time for a matrix, or None if the kernel does not compute the product."""

    def time(shape: GroupShape) -> int:
        blocks = ceil_div(w.rows, shape.rows) * ceil_div(tokens, shape.tokens)
        return ceil_div(blocks, multiprocessors) * (START + w.cols // GROUP * shape.cost)

    if w.group != GROUP or w.cols % (WHOLE * GROUP) or tokens not in TOKENS:
        return None
    fitting = [shape for shape in SHAPES if group_slots(w, shape) >= MIN_SLOTS]
    return min((shape for shape in fitting if shape.tokens < 2 * tokens), key=time, default=None)


def group_slots(w: TernaryBuffer, shape: GroupShape) -> int:
    """Groups for whose activations and codes shared memory has room, beside all scales of the rows."""
    room = MAX_SHARED - ALIGNMENT - _scales(w, shape)
    return min(w.cols // GROUP, room // _stage(shape))


def few_groups_product(
    ctx: Context, op: TernaryMatmul, tokens: int, out: Buffer, activation: str, shape: GroupShape, *, bounded: bool
) -> Launch:
    """A product, with the activation after it that ``activation`` names.

    Args:
        bounded: The activations' row sums are the greatest sums of magnitudes in a group, where they are found.
    """
    w = ternary(ctx, op.weights)
    slots = group_slots(w, shape)
    defines = {
        "COLS": w.cols,
        "BM": shape.rows,
        "BN": shape.tokens,
        "SLOTS": slots,
        "BOUND": int(bounded and _summed(ctx, op.x)),
    }
    defines |= product_defines(op, activation)
    x = TiledMatrix(ctx.tensors[op.x], ctx.shape(op.x)[0], w.cols, shape.tokens, PANEL)
    codes = TiledMatrix(w.codes, w.rows, w.row_bytes, shape.rows // 2, UNIT)
    args = (ctx.step, x, codes, ctx.tensors[op.scale], row_sums(ctx, op.x), w.scales, out, np.int32(w.rows))
    grid, threads = (ceil_div(w.rows, shape.rows), ceil_div(tokens, shape.tokens), 1), 2 * shape.rows + 32
    shared = max(ALIGNMENT + _scales(w, shape) + slots * _stage(shape), MIN_SHARED)
    spec = KernelSpec("ternary_group_few", "ternary_group_few", tuple(defines.items()))
    return Launch(spec, grid, (threads, 1, 1), args, shared, overlaps=True)


def _summed(ctx: Context, name: str) -> bool:
    """Whether steps of few tokens find the row sums of an int8 tensor: unless transform_quant makes it, whose clusters
    share a row."""
    made = (op for op in ctx.program.ops if isinstance(op, NormQuant | GluNormQuant | GatedQuant) and op.out == name)
    return not any(isinstance(op, GatedQuant) or op.transform for op in made)


def _scales(w: TernaryBuffer, shape: GroupShape) -> int:
    """Bytes of the scales of a block's rows."""
    return shape.rows * w.cols // GROUP * 2


def _stage(shape: GroupShape) -> int:
    """Bytes of a group's activations and codes."""
    return shape.tokens * PANEL + shape.rows * UNIT
