"""The output head fused with sampling, if nobody reads the logits (decision 0060).

All rows of the head are scored with a 4-bit copy of it, and rows that could still win are scored again with the full
weights. With filters, some other rows are also scored in full, to decide whether the winner passes (decision 0026).
"""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, KernelSpec, Launch
from bitnet.core.gpu.fusions import Choice, NormChoice
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.ops.adjusting import adjustment
from bitnet.core.gpu.ops.head import choice, compact_shape, unnormed
from bitnet.cuda.products import DECODE_TOKENS, WGMMA, shared_bytes
from bitnet.cuda.tiles import ALIGNMENT

WIDTH = 256
"""Columns come in multiples of this."""
COLUMN_GROUP = 1024
"""Threads of a block of head_columns."""
ROW_GROUP = 256
"""Threads of a block of head_rows, head_floor and head_pack."""
CHOOSE_GROUP = 256
"""Threads of a block of head_choose."""
MAX_EACH = 16
"""Maximum rows of the head per thread of head_choose, whose list is in shared memory."""
SCORE_WARPS = 16
"""Warps of head_score on a multiprocessor."""
WGMMA_WARPS = 12
"""The same where it uses wgmma."""
FEW_ROWS = 32
"""Maximum rows of x for which it uses mma, where there is wgmma; with those the latter was slower."""
MANY_ROWS = 64
"""Maximum rows of x on devices of :data:`LARGE_SHARED`. Other devices are limited to the rows of a decode step."""
LARGE_SHARED = ((9, 0), (10, 0))
"""Compute capabilities whose blocks can have 227 KiB of shared memory."""
SAMPLES = 4096
"""Average number of sampled rows of the head to estimate probability masses for filters: more leave fewer steps
undecided."""
CAPACITY = SAMPLES + 16 * 64
"""Capacity for sampled rows: 16 standard deviations above the average. A row of x with more is undecided."""
BINS = 256
"""Bins of the histogram in which head_floor counts rows, as in filter.cuh."""
RATE_BLOCKS = 64
"""Blocks of head_floor that count rows, for each row of x."""
DECIDE_GROUP = 512
"""Threads of a block of head_decide."""
STAGE = 1280
"""Maximum columns that head_choose keeps in shared memory at a time on other devices; this fits every GPU."""


class HeadOps:
    """The launches for a device of ``multiprocessors`` with tensor cores."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int]) -> None:
        self._multiprocessors = multiprocessors
        self._wgmma = capability == WGMMA
        self._large, self._shared = capability in LARGE_SHARED, shared_bytes(capability)

    def fits(self, ctx: Context) -> bool:
        """Whether the program ends in a head that these kernels support."""
        return compact_shape(ctx, WIDTH) is not None

    def launches(self, ctx: Context, group: Choice | NormChoice, bucket: Bucket) -> list[Launch] | None:
        """Sample a step's tokens without computing all logits; None if there are too many rows."""
        norm, dense, sample = group.norm, group.dense, group.sample
        if bucket.rows > min(MANY_ROWS, self._most_rows(ctx.dense(dense.weight).shape[1])):
            return None
        weight = ctx.dense(dense.weight)
        rows, cols = weight.shape
        n, head = np.int32(rows), self._packed(ctx, dense.weight)
        most, few = self._most_rows(cols), bucket.rows <= DECODE_TOKENS
        planes, params = ctx.scratch("head planes", 2 * most * cols), ctx.scratch("head params", most * 16)
        undecided, split, scales = self.undecided(ctx, dense.weight)
        likeliest, best = ctx.scratch("head likeliest", most * 8), ctx.scratch("head best", most * 8)
        floors = ctx.scratch("head floors", most * 4)
        scores, arrivals = ctx.tensors[dense.out], ctx.zeroed("head arrivals", 4)

        def launch(
            entry: str, grid: tuple[int, int], block: int, args: tuple[Arg, ...], shared: int = 0, **sizes: int
        ) -> Launch:
            spec = KernelSpec(entry, entry, (("COLS", cols), *sizes.items()))
            return Launch(spec, (*grid, 1), (block, 1, 1), args, shared=shared, overlaps=True)

        x = (
            ctx.step,
            ctx.offset("rows"),
            *unnormed(ctx, group),
            head,
            n,
            planes,
            params,
            split,
            scales,
            likeliest,
            best,
        )
        chosen_by, variant = choice(ctx), {"ADJUST": 1} if bucket.adjusted else {}
        if bucket.filtered:
            variant |= {"FILTERED": 1, "SAMPLES": SAMPLES, "CAPACITY": CAPACITY}
            chosen_by = (*chosen_by, *(ctx.offset(f) for f in ("top_k", "top_p", "min_p")))
        if bucket.adjusted:
            chosen_by = (*chosen_by, *adjustment(ctx))
        peaks, rate, lists, all_taken = self._taken(ctx, bucket)
        score = (*chosen_by, head, planes, params, scores, likeliest, *peaks, n)
        floor = (
            *chosen_by,
            likeliest,
            split,
            scales,
            weight.data,
            floors,
            *((head, params, scores, *rate) if rate else ()),
            n,
        )
        choose = (*chosen_by, head, params, scores, floors, split, scales, weight.data, best, arrivals, *lists)
        decide = (*chosen_by, scores, best, *all_taken, undecided, n)
        bits = {"PLANES": 2 if few else 1}
        score_blocks, choose_blocks = (2, 1) if few else (1, 2)  # on a multiprocessor
        warps, columns = SCORE_WARPS // score_blocks, ceil_div(bits["PLANES"] * bucket.rows, 8) * 8
        score_shared = columns * (cols + 16)
        if wgmma := self._wgmma and bucket.rows > FEW_ROWS:
            warps, columns = WGMMA_WARPS, MANY_ROWS
            score_shared = columns * cols + ALIGNMENT
        form = {"WGMMA": int(wgmma)} | bits
        eights = ceil_div(bucket.rows, 8)
        each = min(ceil_div(rows * eights, CHOOSE_GROUP * choose_blocks * self._multiprocessors), MAX_EACH)
        stage = cols if self._large else min(cols, STAGE)
        return [
            launch("head_rows", (bucket.rows, 1), ROW_GROUP, x, NORM=int(norm is not None), **form),
            launch(
                "head_score",
                (score_blocks * self._multiprocessors, 1),
                32 * warps,
                score,
                shared=score_shared,
                TOKENS=bucket.rows,
                TILES=columns // 8,
                WARPS=warps,
                BLOCKS=score_blocks,
                ITERS=4 if few and cols % 512 == 0 else 2,
                **form,
                **variant,
            ),
            launch("head_floor", (bucket.rows, 1 + RATE_BLOCKS * len(peaks)), ROW_GROUP, floor, **variant, **bits),
            launch(
                "head_choose",
                (ceil_div(rows, each * CHOOSE_GROUP), eights),
                CHOOSE_GROUP,
                (*choose, ctx.tensors[sample.out], n),
                shared=32 * (stage + 16),
                TOKENS=bucket.rows,
                BLOCKS=choose_blocks,
                STAGE=stage,
                EACH=each,
                **bits,
                **variant,
            ),
            *(
                [launch("head_decide", (bucket.rows, 1), DECIDE_GROUP, decide, WG=DECIDE_GROUP, **variant)]
                if rate
                else []
            ),
        ]

    def undecided(self, ctx: Context, name: str) -> tuple[Buffer, Buffer, Buffer]:
        """Whether filters leave each row of x undecided; the rows of x as halves; and their scales."""
        cols = ctx.program.weights[name].shape[1]
        most = self._most_rows(cols)
        halves, scales = ctx.scratch("row halves", most * cols * 4), ctx.scratch("row scales", most * 4)
        return ctx.scratch("head undecided", most * 4), halves, scales

    def _taken(self, ctx: Context, bucket: Bucket) -> tuple[list[Buffer], ...]:
        """What head_score, head_floor, head_choose and head_decide share about the rows of the head that are taken."""
        if not bucket.filtered:
            return [], [], [], []
        each = DECODE_TOKENS * 4
        names = {"peaks": each, "bins": each * BINS, "bars": each, "counts": each, "arrivals of bins": each}
        peaks, bins, bars, counts, arrivals = (ctx.zeroed(f"head {name}", size) for name, size in names.items())
        rates, lists = ctx.scratch("head rates", each), ctx.scratch("head lists", 2 * each * CAPACITY)
        all_taken = [rates, peaks, bins, bars, counts, lists]
        return [peaks], [peaks, bins, arrivals, rates], [rates, bars, counts, lists], all_taken

    def _most_rows(self, cols: int) -> int:
        return MANY_ROWS if self._large and MANY_ROWS * (cols + 16) <= self._shared else DECODE_TOKENS

    def _packed(self, ctx: Context, name: str) -> Buffer:
        """The compact copy of a head, made on the device on first use."""
        weight = ctx.dense(name)
        rows, cols = weight.shape

        def fill(head: Buffer) -> list[Launch]:
            def launch(entry: str, grid: int, block: int) -> Launch:
                spec = KernelSpec("head_pack", entry, (("COLS", cols),))
                return Launch(spec, (grid, 1, 1), (block, 1, 1), (weight.data, head, np.int32(rows)))

            packers = ceil_div(rows, ROW_GROUP // 32)
            return [launch("head_columns", cols // 64, COLUMN_GROUP), launch("head_pack", packers, ROW_GROUP)]

        return ctx.copy(name, rows * (cols // 2 + 8) + cols * 4, fill)
