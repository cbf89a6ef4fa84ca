"""The output head fused with sampling, if nobody reads the logits (decision 0060).

All rows of the head are scored with a 4-bit copy of it, and rows that could still win are scored again with the full
weights, with exactly the sums of the logits.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, Dispatch, KernelSpec, Launch
from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.products import MAX_GROUP
from bitnet.core.gpu.drivers.windows import Window
from bitnet.core.gpu.fusions import Choice, NormChoice
from bitnet.core.gpu.ops import ceil_div, power_of_two
from bitnet.core.gpu.ops.head import COMPACT_ROWS, choice, compact_shape, unnormed

WIDTH = 32
"""Threads of a simdgroup, which share a row of the head, and columns of a thread of head_pack."""
SCORE_EACH = 4
"""Rows of the head that a simdgroup of head_score keeps in registers."""
CHOOSE_GROUPS = 256
"""Target number of threadgroups of head_choose."""
CHOOSE_EACH = 8
"""Maximum rows of a thread of head_choose."""
ALIGNMENT = 256
"""Alignment of the parts of the compact copy, in bytes."""


def fits(ctx: Context) -> bool:
    """Whether the program ends in a head that can have a compact copy."""
    return compact_shape(ctx, WIDTH) is not None


class HeadOps:
    """The launches for a device whose threadgroups have ``group`` threads."""

    def __init__(self, abilities: Abilities) -> None:
        self._group = power_of_two(min(abilities.group, MAX_GROUP))

    def table(self) -> Dispatch:
        """The groups this class knows."""
        return {Choice: self.tokens, NormChoice: self.tokens}

    def tokens(self, ctx: Context, head: Choice | NormChoice, bucket: Bucket) -> list[Launch] | None:
        """Sample a step's tokens without computing all logits; None if there are too many rows, or rows are
        adjusted."""
        if bucket.rows > COMPACT_ROWS or bucket.adjusted:
            return None
        weight, group = ctx.dense(head.dense.weight), self._group
        rows, cols = weight.shape
        n = np.int32(rows)
        codes, sizes, columns = self._packed(ctx, head.dense.weight)
        each = min(ceil_div(rows, group * CHOOSE_GROUPS), CHOOSE_EACH)
        choosers = ceil_div(rows, group * each)
        y, planes = ctx.tensors[head.dense.x], ctx.scratch("head planes", COMPACT_ROWS * cols * 4)
        params, state = ctx.scratch("head params", COMPACT_ROWS * 16), ctx.scratch("head state", COMPACT_ROWS * 4)
        found = ctx.scratch("head found", choosers * COMPACT_ROWS * 8)
        scores = ctx.tensors[head.dense.out]
        source, gain, eps = unnormed(ctx, head)
        step, *chosen_by = choice(ctx)
        rows_args = (step, source, gain, columns, y, planes, params, state, ctx.offset("rows"), eps)
        score_args = (step, codes, sizes, planes, params, scores, state, *chosen_by, n)
        choose_args = (step, sizes, params, scores, state, weight.data, y, found, *chosen_by, n)
        pick_args = (step, found, ctx.tensors[head.sample.out], np.int32(choosers))
        scorers = ceil_div(rows, group // WIDTH * SCORE_EACH)
        return [
            self._launch("head_rows", bucket.rows, rows_args, COLS=cols, NORM=int(head.norm is not None)),
            self._launch("head_score", scorers, score_args, COLS=cols, TOKENS=bucket.rows, EACH=SCORE_EACH),
            self._launch("head_choose", choosers, choose_args, COLS=cols, EACH=each),
            self._launch("head_choose", 1, pick_args, entry="head_pick", COLS=cols, EACH=each),
        ]

    def _packed(self, ctx: Context, name: str) -> list[Window]:
        """The compact copy of a head (codes, sizes and columns), made on the device on first use."""
        weight = ctx.dense(name)
        rows, cols = weight.shape
        nbytes = rows * cols // 2, rows * 8, cols * 4
        *places, total = accumulate((ceil_div(size, ALIGNMENT) * ALIGNMENT for size in nbytes), initial=0)

        def windows(buffer: Buffer) -> list[Window]:
            return [Window(buffer, first, size) for first, size in zip(places, nbytes, strict=True)]

        def fill(buffer: Buffer) -> list[Launch]:
            codes, sizes, columns = windows(buffer)
            n = np.int32(rows)
            columns_args, pack_args = (weight.data, columns, n), (weight.data, columns, codes, sizes, n)
            return [
                self._launch("head_pack", cols // WIDTH, columns_args, entry="head_columns", COLS=cols),
                self._launch("head_pack", rows, pack_args, COLS=cols),
            ]

        return windows(ctx.copy(name, total, fill))

    def _launch(self, file: str, groups: int, args: tuple[Arg, ...], entry: str | None = None, **sizes: int) -> Launch:
        spec = KernelSpec(file, entry or file, (("WG", self._group), *sizes.items()))
        return Launch(spec, (groups, 1, 1), (self._group, 1, 1), args)
