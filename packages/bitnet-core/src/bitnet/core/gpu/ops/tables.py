"""Launches for ternary embeddings and output heads; backends have kernels with these names and arguments.

They are never part of a fused group, and need a device with the feature
:data:`~bitnet.core.hal.TERNARY_TABLES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer, Launch, launch
from bitnet.core.gpu.drivers.windows import Windows, in_two
from bitnet.core.gpu.ops.rows import ceil_div
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import DenseMatmul, Embed
from bitnet.core.hal.check import ternary_table

GROUP = 64
"""Work-items of a work-group."""
LANES = 16
"""Work-items that share rows of the table."""
EACH = 2
"""Rows of the table that these work-items share."""
HEAD_ROWS = GROUP // LANES * EACH
"""Rows of the table of a work-group."""
MAX_ROWS = 8
"""Rows of activations computed per read of the table."""


def table_launches(ctx: Context, op: Embed | DenseMatmul, bucket: Bucket) -> list[Launch]:
    """``embed`` or ``dense_matmul`` of a ternary table."""
    w = table_of(ctx, op)
    if isinstance(op, Embed):
        args = (ctx.step, ctx.offset("tokens"), w.codes, w.scales, ctx.tensors[op.out])
        return [launch("table_embed", (bucket.tokens, 1, 1), GROUP, args, _shape(w))]
    head = (ctx.step, ctx.tensors[op.x], w.codes, w.scales, ctx.tensors[op.out], np.int32(w.rows))
    defines = {**_shape(w), "WG": GROUP, **_head_shape(bucket)}
    grid = (ceil_div(w.rows, HEAD_ROWS), ceil_div(bucket.rows, defines["TOKENS"]), 1)
    return [launch("table_matmul", grid, GROUP, head, defines)]


@dataclass(frozen=True, slots=True)
class WindowedTables:
    """Launches for APIs that bind matrices in parts: Vulkan and WebGPU. Both have kernels with these arguments."""

    windows: Windows

    def lower(self, ctx: Context, op: Embed | DenseMatmul, bucket: Bucket) -> list[Launch]:
        """``embed`` or ``dense_matmul`` of a ternary table: a launch for each part."""
        w = table_of(ctx, op)
        return [self._launch(ctx, op, bucket, w, *window) for window in self.windows(w.codes, w.rows)]

    @staticmethod
    def _launch(
        ctx: Context, op: Embed | DenseMatmul, bucket: Bucket, w: TernaryBuffer, codes: Buffer, first: int, rows: int
    ) -> Launch:
        args: tuple[Arg, ...]
        if isinstance(op, Embed):
            sizes = (np.uint32(n) for n in (ctx.offset("tokens"), first, rows))
            args = (ctx.step, codes, w.scales, ctx.tensors[op.out], *sizes)
            return launch("table_embed", (bucket.tokens, 1, 1), GROUP, args, _shape(w))
        sizes, defines = (np.uint32(n) for n in (rows, first, w.rows)), _shape(w) | _head_shape(bucket)
        args = (ctx.step, ctx.tensors[op.x], codes, w.scales, ctx.tensors[op.out], *sizes)
        grid = (*in_two(ceil_div(rows, HEAD_ROWS)), ceil_div(bucket.rows, defines["TOKENS"]))
        return launch("table_matmul", grid, GROUP, args, defines)


def table_of(ctx: Context, op: Embed | DenseMatmul) -> TernaryBuffer:
    """The ternary table of an operation that has one."""
    name = ternary_table(ctx.program, op)
    assert name is not None
    return ctx.ternary((name,))


def row_digits(ctx: Context, w: TernaryBuffer) -> tuple[Buffer, Buffer]:
    """Working memory for the rows of a head that is multiplied by digits: three int8 digits of each element, and the
    value of a unit for each row and group."""
    assert w.group is not None
    most = ctx.program.limits.max_rows
    units = ctx.scratch("row units", most * (w.cols // w.group) * 4)
    return ctx.scratch("row digits", most * 3 * w.cols), units


def _shape(w: TernaryBuffer) -> dict[str, int]:
    """What both kernels are compiled for: the row and its groups."""
    assert w.group is not None
    return {"COLS": w.cols, "ROW_BYTES": w.row_bytes, "GROUP": w.group}


def _head_shape(bucket: Bucket) -> dict[str, int]:
    """How a work-group of ``table_matmul`` divides its work."""
    return {"LANES": LANES, "EACH": EACH, "TOKENS": min(bucket.rows, MAX_ROWS)}
