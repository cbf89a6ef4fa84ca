"""Launches for ternary embeddings and output heads: on the tensor cores where they support a head, else as on every
GPU."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Bucket, Context, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.tables import table_launches, ternary_table
from bitnet.core.hal import DenseMatmul, Embed
from bitnet.cuda.products import DECODE_TOKENS, SPLIT_GROUP, TENSOR_CORES, shared_bytes

GROUPS, CHUNK = (64, 128), 512
"""Columns that may share a scale in table_mma, and columns whose codes a warp has on their way."""
TILE_ROWS = 32
"""Rows of the table that a warp of table_mma takes at a time."""
LEAST_WARPS, MOST_WARPS = 8, 12
"""Warps of a block of table_mma, of which a multiprocessor has one. With more, threads have too few registers."""


class TableOps:
    """The launches for a device with ``multiprocessors`` and a compute capability such as ``(9, 0)``."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int]) -> None:
        self._multiprocessors = multiprocessors
        self._tensor_cores, self._shared = capability >= TENSOR_CORES, shared_bytes(capability)

    def lower(self, ctx: Context, op: Embed | DenseMatmul, bucket: Bucket) -> list[Launch]:
        """``embed`` or ``dense_matmul`` of a ternary table."""
        name = ternary_table(ctx.program, op)
        assert name is not None
        w = ctx.ternary((name,))
        tokens = min(bucket.rows, DECODE_TOKENS)
        while tokens > 1 and self._x_bytes(w.cols, tokens) > self._shared:
            tokens //= 2
        able = self._tensor_cores and w.cols % CHUNK == 0 and self._x_bytes(w.cols, tokens) <= self._shared
        if isinstance(op, Embed) or not able or w.group not in GROUPS:
            return table_launches(ctx, op, bucket)
        most = ctx.program.limits.max_rows
        halves, units = ctx.scratch("table halves", most * w.cols * 4), ctx.scratch("table units", most * w.cols // 16)
        shape = (("COLS", w.cols), ("GROUP", w.group))
        tiles = ceil_div(w.rows, TILE_ROWS)
        warps = _warps(tiles, self._multiprocessors)
        grid = (min(ceil_div(tiles, warps), self._multiprocessors), ceil_div(bucket.rows, tokens), 1)
        product = KernelSpec("table_mma", "table_mma", (*shape, ("TOKENS", tokens), ("WARPS", warps)))
        args = (ctx.step, halves, units, w.codes, w.scales, ctx.tensors[op.out], np.int32(w.rows))
        split = KernelSpec("split_units", "split_units", shape)
        given = (ctx.step, ctx.tensors[op.x], halves, units)
        return [
            Launch(split, (bucket.rows, 1, 1), (SPLIT_GROUP, 1, 1), given, overlaps=True),
            Launch(product, grid, (32 * warps, 1, 1), args, shared=self._x_bytes(w.cols, tokens), overlaps=True),
        ]

    @staticmethod
    def _x_bytes(cols: int, tokens: int) -> int:
        """Bytes of shared memory of a block of table_mma: halves of x and, for each unit, a float."""
        return tokens * (2 * (2 * cols + 64) + cols // min(GROUPS) * 4)


def _warps(tiles: int, multiprocessors: int) -> int:
    """Warps per block, so that the last of the rounds in which blocks process tiles has as many as possible."""
    few = max(1, min(MOST_WARPS, ceil_div(tiles, multiprocessors)))

    def idle(warps: int) -> int:
        return -tiles % (warps * multiprocessors)

    return min(range(min(LEAST_WARPS, few), few + 1), key=lambda warps: (idle(warps), -warps))
