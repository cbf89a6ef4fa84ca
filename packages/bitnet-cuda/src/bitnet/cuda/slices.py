"""Launches of ternary_slices: products of few tokens whose blocks have a slice of K each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bitnet.core.gpu import Buffer, Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.ops.products import product_defines, row_sums
from bitnet.core.hal import TernaryMatmul
from bitnet.cuda.tiles import ALIGNMENT, PANEL, TiledMatrix
from bitnet.cuda.weights import ternary

UNIT = 32
"""Bytes of a row's codes in a unit of 128 columns."""
MAX_UNITS = 32
"""Longest slice, in units. Longer ones were not measured, but for 16 tokens, where ternary_few is faster."""
MIN_SLOTS = 3
"""Minimum units of activations in shared memory: one that is multiplied, one that is freed, one that is fetched."""
MIN_SHARED, MAX_SHARED = 115 * 1024, 161 * 1024
"""Bytes of shared memory that a block requests. With less, several blocks would fit a multiprocessor. For those, and
for a block with more, the driver takes nearly all of the first-level cache for shared memory, and attention, which
comes next, then lacks room for its loads in flight: 34 µs in place of 25."""
CLUSTERED = 10 / 11
"""Share of the multiprocessors that clusters of several blocks can occupy at once."""


class SliceShape(NamedTuple):
    """What a block of ternary_slices computes, and what that takes on an H200.

    Attributes:
        rows: Rows of W; a multiple of 64.
        tokens: Tokens: 16, 32 or 64.
        split: Blocks of a cluster that share K.
        parts: Warpgroups of a block that share K, for each 64 rows.
        start: Nanoseconds of a block, besides those of its units.
        cost: Nanoseconds of a unit.
    """

    rows: int
    tokens: int
    split: int
    parts: int
    start: int = 0
    cost: int = 0


SHAPES = (
    SliceShape(64, 16, 1, 4, 3000, 60),
    SliceShape(64, 32, 1, 4, 3100, 80),
    SliceShape(128, 16, 1, 1, 3100, 180),
    SliceShape(128, 32, 1, 1, 3100, 240),
    SliceShape(128, 64, 1, 1, 3100, 260),
    SliceShape(128, 32, 4, 1, 3900, 160),
    SliceShape(128, 64, 4, 1, 3900, 180),
)


def slice_shape(w: TernaryBuffer, tokens: int, multiprocessors: int) -> SliceShape | None:
    """The shape with the least estimated time for a matrix, or None if none fits it."""

    def time(shape: SliceShape) -> int:
        blocks = ceil_div(w.rows, shape.rows) * ceil_div(tokens, shape.tokens) * shape.split
        at_once = int(multiprocessors * (CLUSTERED if shape.split > 1 else 1))
        return ceil_div(blocks, at_once) * (shape.start + _units(w, shape) * shape.cost)

    fitting = [shape for shape in SHAPES if shape.tokens < 2 * tokens and _units(w, shape) <= MAX_UNITS]
    return min((shape for shape in fitting if slice_slots(w, shape)), key=time, default=None)


def _units(w: TernaryBuffer, shape: SliceShape) -> int:
    """Units of the longest slice."""
    return ceil_div(w.row_bytes // UNIT, shape.split)


def slice_slots(w: TernaryBuffer, shape: SliceShape) -> int:
    """Units of activations for which shared memory has room; 0 if they are too few."""
    units, activations = _units(w, shape), shape.tokens * PANEL
    slots = min(units, (MAX_SHARED - _others(w, shape)) // activations)
    return slots if slots >= (units if shape.parts > 1 else min(units, MIN_SLOTS)) else 0


def _others(w: TernaryBuffer, shape: SliceShape) -> int:
    """Bytes of shared memory besides the activations: codes, and the sums that a block's parts receive."""
    parts = shape.split * shape.parts
    passed = shape.parts * (parts - 1) * ceil_div(shape.tokens // 8, parts) * 2 * shape.rows * 16
    return ALIGNMENT + shape.rows * (_units(w, shape) * UNIT + 16) + passed


def slice_product(
    ctx: Context, op: TernaryMatmul, tokens: int, out: Buffer, activation: str, shape: SliceShape
) -> Launch:
    """A product, with the activation after it that ``activation`` names."""
    w = ternary(ctx, op.weights)
    slots = slice_slots(w, shape)
    defines = {
        "COLS": w.cols,
        "ROW_BYTES": w.row_bytes,
        "BM": shape.rows,
        "BN": shape.tokens,
        "KSPLIT": shape.split,
        "KPARTS": shape.parts,
        "SLOTS": slots,
        **product_defines(op, activation),
        **w.defines,
    }
    x = TiledMatrix(ctx.tensors[op.x], ctx.shape(op.x)[0], w.cols, shape.tokens, PANEL)
    args = (ctx.step, x, ctx.tensors[op.scale], row_sums(ctx, op.x), w.codes, w.scales, out, np.int32(w.rows))
    grid = ceil_div(w.rows, shape.rows), ceil_div(tokens, shape.tokens), shape.split
    spec, block = KernelSpec("ternary_slices", "ternary_slices", tuple(defines.items())), 2 * shape.rows * shape.parts
    shared = max(_others(w, shape) + slots * shape.tokens * PANEL, MIN_SHARED)
    return Launch(spec, grid, (block, 1, 1), args, shared, overlaps=True)
