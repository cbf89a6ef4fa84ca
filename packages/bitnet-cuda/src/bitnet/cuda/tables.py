"""Launches for ternary embeddings and output heads: on the tensor cores where they support a head, else as on every
GPU."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Bucket, Context, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.tables import table_launches, ternary_table
from bitnet.core.hal import DenseMatmul, Embed
from bitnet.cuda.products import DECODE_TOKENS, SPLIT_GROUP, TENSOR_CORES, shared_bytes

CHUNK = 512
"""Columns of K that a warp of table_mma takes at a time."""
TILE_ROWS = 32
"""Rows of the table that a warp of table_mma takes at a time."""
LEAST_WARPS, MOST_WARPS, STAGED_WARPS = 8, 12, 8
"""Warps of a block of table_mma, of which a multiprocessor has one: with more, threads have too few registers. The last
where rows of x are in shared memory a CHUNK at a time."""
STAGED_TOKENS = {64: 16, 128: 32}
"""Maximum rows of x of such a block, by the columns that may share a scale: more take too many registers."""


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
        group = w.group
        if isinstance(op, Embed) or not self._tensor_cores or group not in STAGED_TOKENS or w.cols % CHUNK:
            return table_launches(ctx, op, bucket)
        tokens = min(bucket.rows, STAGED_TOKENS[group])
        staged = tokens > DECODE_TOKENS or _x_bytes(w.cols, tokens, staged=False) > self._shared
        while staged and _x_bytes(w.cols, tokens, staged) > self._shared:
            tokens //= 2
        most = ctx.program.limits.max_rows
        halves, units = ctx.scratch("table halves", most * w.cols * 4), ctx.scratch("table units", most * w.cols // 16)
        shape = (("COLS", w.cols), ("GROUP", group))
        tiles = ceil_div(w.rows, TILE_ROWS)
        warps = STAGED_WARPS if staged else _warps(tiles, self._multiprocessors)
        grid = (min(ceil_div(tiles, warps), self._multiprocessors), ceil_div(bucket.rows, tokens), 1)
        defines = (*shape, ("TOKENS", tokens), ("STAGED", int(staged)), ("WARPS", warps))
        product, split = KernelSpec("table_mma", "table_mma", defines), KernelSpec("split_units", "split_units", shape)
        args = (ctx.step, halves, units, w.codes, w.scales, ctx.tensors[op.out], np.int32(w.rows))
        given, shared = (ctx.step, ctx.tensors[op.x], halves, units), _x_bytes(w.cols, tokens, staged)
        return [
            Launch(split, (bucket.rows, 1, 1), (SPLIT_GROUP, 1, 1), given, overlaps=True),
            Launch(product, grid, (32 * warps, 1, 1), args, shared=shared, overlaps=True),
        ]


def _x_bytes(cols: int, tokens: int, staged: bool) -> int:
    """Bytes of shared memory of a block of table_mma: halves of x, all or two stages of them, and for each unit a
    float."""
    halves = 2 * (4 * CHUNK + 128) if staged else 4 * cols + 128
    return tokens * (halves + cols // min(STAGED_TOKENS) * 4)


def _warps(tiles: int, multiprocessors: int) -> int:
    """Warps per block, so that the last of the rounds in which blocks process tiles has as many as possible."""
    few = max(1, min(MOST_WARPS, ceil_div(tiles, multiprocessors)))

    def idle(warps: int) -> int:
        return -tiles % (warps * multiprocessors)

    return min(range(min(LEAST_WARPS, few), few + 1), key=lambda warps: (idle(warps), -warps))
