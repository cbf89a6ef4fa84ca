"""Launches for ternary embeddings and output heads: on the tensor cores where they support a head, else as on every
GPU."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Bucket, Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.ops.tables import table_launches
from bitnet.core.hal import DenseMatmul, Embed
from bitnet.core.hal.check import ternary_table
from bitnet.cuda.products import DECODE_TOKENS, SPLIT_GROUP, TENSOR_CORES, shared_bytes

CHUNK = 512
"""Columns of K that a warp of table_mma takes at a time."""
TILE_ROWS = 32
"""Rows of the table that a warp of table_mma takes at a time."""
MIN_WARPS, MAX_WARPS, STAGED_WARPS = 8, 12, 8
"""Minimum and maximum warps of a block of table_mma that has all of x in shared memory, and warps of one that has a
CHUNK of x at a time (a staged block). A multiprocessor has one block. With more warps, threads have too few registers.
"""
FULL_TOKENS = 4
"""Maximum rows of x of a block with more than :data:`STAGED_WARPS`: they fill the columns of one product."""
STAGED_TOKENS = {64: 16, 128: 32}
"""Maximum rows of x of a staged block, by columns that share a scale. More rows need too many registers."""


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
        if isinstance(op, DenseMatmul) and self._tensor_cores and w.group in STAGED_TOKENS and w.cols % CHUNK == 0:
            return self._head(ctx, op, bucket, w)
        return table_launches(ctx, op, bucket)

    def _head(self, ctx: Context, op: DenseMatmul, bucket: Bucket, w: TernaryBuffer) -> list[Launch]:
        """The rows of x as halves, and their product with the table."""
        assert w.group is not None
        tokens = min(bucket.rows, STAGED_TOKENS[w.group])
        staged = tokens > DECODE_TOKENS or _x_bytes(w.cols, tokens, staged=False) > self._shared
        while staged and _x_bytes(w.cols, tokens, staged) > self._shared:
            tokens //= 2
        tiles, most = ceil_div(w.rows, TILE_ROWS), ctx.program.limits.max_rows
        warps = STAGED_WARPS if staged or tokens > FULL_TOKENS else _warps(tiles, self._multiprocessors)
        halves = ctx.scratch("table halves", most * w.cols * 4)
        units = ctx.scratch("table units", most * w.cols // min(STAGED_TOKENS) * 4)
        shape = (("COLS", w.cols), ("GROUP", w.group))
        defines = (*shape, ("TOKENS", tokens), ("STAGED", int(staged)), ("WARPS", warps))
        split, product = KernelSpec("split_units", "split_units", shape), KernelSpec("table_mma", "table_mma", defines)
        x = (ctx.step, ctx.tensors[op.x], halves, units)
        args = (ctx.step, halves, units, w.codes, w.scales, ctx.tensors[op.out], np.int32(w.rows))
        grid = (min(ceil_div(tiles, warps), self._multiprocessors), ceil_div(bucket.rows, tokens), 1)
        shared = _x_bytes(w.cols, tokens, staged)
        return [
            Launch(split, (bucket.rows, 1, 1), (SPLIT_GROUP, 1, 1), x, overlaps=True),
            Launch(product, grid, (32 * warps, 1, 1), args, shared=shared, overlaps=True),
        ]


def _x_bytes(cols: int, tokens: int, staged: bool) -> int:
    """Bytes of shared memory of a block of table_mma: the halves of x, or two stages of them, and a float for each
    unit."""
    halves = 2 * (4 * CHUNK + 128) if staged else 4 * cols + 128
    return tokens * (halves + cols // min(STAGED_TOKENS) * 4)


def _warps(tiles: int, multiprocessors: int) -> int:
    """Warps per block that leave the fewest warps idle in the last round of tiles."""
    few = max(1, min(MAX_WARPS, ceil_div(tiles, multiprocessors)))

    def idle(warps: int) -> int:
        return -tiles % (warps * multiprocessors)

    return min(range(min(MIN_WARPS, few), few + 1), key=lambda warps: (idle(warps), -warps))
