"""The head and the choice of tokens in one, where nobody reads the logits (decision 0060 of bitnet-core).

All rows of the head are scored from a copy of it in 4 bits, and those that could still win from the weights themselves.
"""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.hal import DenseMatmul, DenseWeight, NormRows, Sample
from bitnet.cuda.products import DECODE_TOKENS, choice

WIDTH = 256
"""Columns come in multiples of this."""
MAX_COLS = 4096
"""Sums of more columns do not fit 32 bits."""
COLUMN_GROUP, ROW_GROUP, CHOOSE_GROUP = 1024, 256, 256
"""Threads of a block of head_columns, of head_rows and head_pack, and of head_choose."""
CHOOSE_BLOCKS = 2
"""Of head_choose, on a multiprocessor."""
SCORE_WARPS, SCORE_BLOCKS = 8, 2
"""Warps of a block of head_score, and its blocks on a multiprocessor."""
STAGE = 1280
"""Columns that head_choose has in shared memory at a time, at most: then it fits every GPU."""


class HeadOps:
    """The launches for a device of ``multiprocessors`` with tensor cores."""

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors

    def fits(self, ctx: Context) -> bool:
        """Whether the program ends in a head that these kernels know."""
        match ctx.program.ops[-2:]:
            case [DenseMatmul() as dense, Sample() as sample] if not ctx.program.keep:
                weight = ctx.program.weights[dense.weight]
                assert isinstance(weight, DenseWeight)
                known = weight.dtype == "f16" and weight.shape[1] % WIDTH == 0 and weight.shape[1] <= MAX_COLS
                return known and dense.out == sample.logits
        return False

    def launches(
        self, ctx: Context, norm: NormRows | None, dense: DenseMatmul, sample: Sample, bucket: Bucket
    ) -> list[Launch]:
        """Of the head, and of the norm before it where that is given."""
        weight = ctx.dense(dense.weight)
        rows, cols = weight.shape
        n, head = np.int32(rows), self._packed(ctx, dense.weight)
        planes = ctx.scratch("head planes", 2 * DECODE_TOKENS * cols)
        params, scales = ctx.scratch("head params", DECODE_TOKENS * 16), ctx.scratch("row scales", DECODE_TOKENS * 4)
        split = ctx.scratch("row halves", DECODE_TOKENS * cols * 4)
        least, best = ctx.scratch("head least", DECODE_TOKENS * 4), ctx.scratch("head best", DECODE_TOKENS * 8)
        scores, arrivals = ctx.tensors[dense.out], ctx.zeroed("head arrivals", 4)
        each = ceil_div(rows, CHOOSE_GROUP * CHOOSE_BLOCKS * self._multiprocessors)

        def launch(entry: str, grid: int, block: int, args: tuple[Arg, ...], shared: int = 0, **sizes: int) -> Launch:
            spec = KernelSpec(entry, entry, (("COLS", cols), *sizes.items()))
            return Launch(spec, (grid, 1, 1), (block, 1, 1), args, shared=shared, overlaps=True)

        tiles = ceil_div(2 * bucket.rows, 8)
        stage = min(cols, STAGE)
        source = ctx.tensors[norm.x if norm else dense.x]
        gain = ctx.dense(norm.weight).data if norm else source
        eps = np.float32(norm.eps if norm else 0)
        x = (ctx.step, ctx.offset("rows"), source, gain, eps, head, n, planes, params, split, scales, least, best)
        score = (*choice(ctx), head, planes, params, scores, least, n)
        choose = (*choice(ctx), head, params, scores, least, split, scales, weight.data, best, arrivals)
        return [
            launch("head_rows", bucket.rows, ROW_GROUP, x, NORM=int(norm is not None)),
            launch(
                "head_score",
                SCORE_BLOCKS * self._multiprocessors,
                32 * SCORE_WARPS,
                score,
                shared=tiles * 8 * (cols + 16),
                TOKENS=bucket.rows,
                WARPS=SCORE_WARPS,
                ITERS=4 if cols % 512 == 0 else 2,
            ),
            launch(
                "head_choose",
                ceil_div(rows, each * CHOOSE_GROUP),
                CHOOSE_GROUP,
                (*choose, ctx.tensors[sample.out], n),
                shared=32 * (stage + 32) * 2,
                STAGE=stage,
                EACH=each,
            ),
        ]

    def _packed(self, ctx: Context, name: str) -> Buffer:
        """The compact copy of a head, made on the device when first asked for."""
        weight = ctx.dense(name)
        rows, cols = weight.shape

        def fill(head: Buffer) -> list[Launch]:
            def launch(entry: str, grid: int, block: int) -> Launch:
                spec = KernelSpec("head_pack", entry, (("COLS", cols),))
                return Launch(spec, (grid, 1, 1), (block, 1, 1), (weight.data, head, np.int32(rows)))

            packers = ceil_div(rows, ROW_GROUP // 32)
            return [launch("head_columns", cols // 64, COLUMN_GROUP), launch("head_pack", packers, ROW_GROUP)]

        return ctx.copy(name, rows * (cols // 2 + 8) + cols * 4, fill)
