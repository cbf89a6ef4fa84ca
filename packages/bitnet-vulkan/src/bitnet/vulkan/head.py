"""Dispatches for the output head in Vulkan: all logits, or only tokens if nobody reads the logits (decision 0060).

For the latter, all rows of the head are scored with a 4-bit copy, and rows that could still win are scored again with
the full weights, with exactly the sums of the logits. With filters, other rows decide if the winner passes (0026).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, DenseBuffer, Launch, launch
from bitnet.core.gpu.drivers.windows import MAX_GROUPS
from bitnet.core.gpu.fusions import Choice, NormChoice
from bitnet.core.gpu.ops import ceil_div, next_power_of_two
from bitnet.core.gpu.ops.head import COMPACT_ROWS, choice, compact_shape, unnormed
from bitnet.core.hal import DenseMatmul
from bitnet.vulkan import matrices
from bitnet.vulkan.hardware import Hardware

LANES = 32
"""Maximum invocations that share a row of the weight."""
TURNS = 16
"""Weight rows of a subgroup of dense_decode."""
MATRIX_ROWS = 128
"""Weight rows of a work-group of dense_mma."""
FEW_ROWS = 8
"""Rows of x that dense_matmul multiplies in one pass."""
KEPT = 16 * 8
"""Maximum columns of x that an invocation of dense_decode keeps in registers."""
CHUNK = 32
"""Columns in 16 bytes of the compact copy; its number of columns is a multiple of this."""
SCORE_LANES, SCORE_ROWS, SCORE_TURNS = 16, 4, 2
"""Sizes of head_score: maximum invocations that share rows of the head, rows at a time, and turns."""
CHOOSE_GROUPS = 256
"""Target number of work-groups of head_choose."""
CHOOSE_EACH = 8
"""Maximum rows of an invocation of head_choose."""
FOUND, UNDECIDED, CAPACITY = 272, 9, 4096 + 16 * 64
"""Words of a step's state before what head_choose found, its flag, and rows it lists: head_layout.glsl, filter.glsl."""


class HeadOps:
    """The launches for a device whose work-groups have ``group`` invocations."""

    def __init__(self, hardware: Hardware, group: int) -> None:
        self._hardware, self._group = hardware, group
        self._lanes = min(LANES, hardware.subgroup or LANES)
        self._score_lanes = min(SCORE_LANES, hardware.subgroup)

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        """Each weight row is read once: for one row of x, by matrices for several, else for up to ``FEW_ROWS``."""
        weight, x = ctx.dense(op.weight), ctx.tensors[op.x]
        rows, cols = weight.shape
        lanes, group = self._lanes, self._group
        given: tuple[Arg, ...] = (x,)
        defines, split = {"COLS": cols}, list[Launch]()
        f16, size = int(weight.dtype == "f16"), self._hardware.subgroup
        if bucket.rows == 1 and f16 and cols % 8 == 0 and 0 < size <= LANES and cols <= KEPT * size:
            file, each, tokens = "dense_decode", TURNS * group // lanes, 1
            defines |= {"LANES": lanes, "TURNS": TURNS}
        elif bucket.rows > 1 and self._multiplies(weight):
            split, given = [self._split(ctx, x, cols, bucket)], self._halves(ctx, cols)
            tiles = min(ceil_div(bucket.rows, 16), 4)
            file, each, tokens, group = "dense_mma", MATRIX_ROWS, 16 * tiles, matrices.MATRIX_GROUP
            defines |= {"SM": tiles}
        else:
            file, each, tokens = "dense_matmul", group // lanes, min(bucket.rows, FEW_ROWS)
            defines |= {"LANES": lanes, "TOKENS": tokens, "WEIGHT_F16": f16, "WIDE": int(cols % 8 == 0)}
        made, gate = [], () if split else (ctx.step,)
        for part, first, count in self._hardware.windows(weight.data, weight.shape[0], each):
            grid = (ceil_div(count, each), ceil_div(bucket.rows, tokens), 1)
            args = (ctx.step, *given, part, ctx.tensors[op.out], *map(np.int32, (count, first, rows)), *gate)
            made.append(launch(file, grid, group, args, defines))
        return [*split, *made]

    def fits(self, ctx: Context) -> bool:
        """Whether the program ends in a head that can have a compact copy, and the device can score it."""
        shape, hardware = compact_shape(ctx, CHUNK), self._hardware
        if shape is None or hardware.subgroup < COMPACT_ROWS or self._group % self._lanes:
            return False
        rows, cols = shape
        tokens = min(ctx.program.limits.max_rows, COMPACT_ROWS)
        each = min(ceil_div(rows, self._group * CHOOSE_GROUPS), CHOOSE_EACH)
        choice_tiles = 160 * 9 * 4 if matrices.has_f16(hardware) else 0
        shared = tokens * cols * 2 + 2048, (2 * each * self._group + choice_tiles + 512) * 4
        return (
            cols <= CHUNK * self._group
            and rows * cols * 2 <= hardware.largest_binding
            and max(shared) <= hardware.shared
            and rows <= MAX_GROUPS * 4 * self._group // self._score_lanes
        )

    def tokens(self, ctx: Context, head: Choice | NormChoice, bucket: Bucket) -> list[Launch] | None:
        """Sample a step's tokens without all logits; None if there are too many rows, or rows are adjusted."""
        if bucket.rows > COMPACT_ROWS or bucket.adjusted:
            return None
        weight = ctx.dense(head.dense.weight)
        rows, cols = weight.shape
        n, group = np.int32(rows), self._group
        packed = self._packed(ctx, head.dense.weight)
        each = min(ceil_div(rows, group * CHOOSE_GROUPS), CHOOSE_EACH)
        choosers = ceil_div(rows, group * each)
        y, params = ctx.tensors[head.dense.x], ctx.scratch("head params", COMPACT_ROWS * 16)
        planes = ctx.scratch("head planes", 2 * COMPACT_ROWS * cols)
        state = ctx.scratch("head state", (FOUND + 2 * choosers * COMPACT_ROWS + 2 * CAPACITY) * 4)
        scores, chosen = ctx.tensors[head.dense.out], ctx.tensors[head.sample.out]
        chosen_by = (*choice(ctx)[1:], *(ctx.offset(f) for f in ("top_k", "top_p", "min_p")))
        rows_args = (ctx.step, *unnormed(ctx, head), packed, y, planes, params, state, ctx.offset("rows"))
        score_args = (ctx.step, packed, packed, planes, params, scores, state, *chosen_by, n)
        by_matrices = bucket.rows > 1 and self._multiplies(weight)
        exact: tuple[Arg, ...] = self._halves(ctx, cols) if by_matrices else (y,)
        choose_args = (ctx.step, packed, params, scores, state, weight.data, chosen, *exact, *chosen_by, n)
        sizes_of = {"COLS": cols, "TOKENS": bucket.rows, "FILTERED": int(bucket.filtered)}
        scorers = ceil_div(rows, group // self._score_lanes * SCORE_ROWS * SCORE_TURNS)
        score = {**sizes_of, "LANES": self._score_lanes, "TURNS": SCORE_TURNS}
        choose = {**sizes_of, "LANES": self._lanes, "EACH": each, "MATRICES": int(by_matrices)}
        norm = {"COLS": cols, "NORM": int(head.norm is not None), "ONE": int(bucket.tokens == 1)}
        return [
            launch("head_rows", (bucket.rows, 1, 1), group, rows_args, norm),
            *([self._split(ctx, y, cols, bucket)] if by_matrices else []),
            launch("head_score", (scorers, 1, 1), group, score_args, score),
            launch("head_choose", (choosers, 1, 1), group, choose_args, choose),
        ]

    def gated(self, ctx: Context, made: Launch) -> Launch:
        """A launch that ends in a gate (all logits, a draw from them), only for a row that filters leave undecided."""
        spec = replace(made.kernel, defines=(*made.kernel.defines, ("GATE", UNDECIDED)))
        return replace(made, kernel=spec, args=(*made.args[:-1], ctx.scratch("head state", 0)))

    def _packed(self, ctx: Context, name: str) -> Buffer:
        """The compact copy of a head, made on the device on first use."""
        weight = ctx.dense(name)
        rows, cols = weight.shape

        def fill(packed: Buffer) -> list[Launch]:
            n, size = np.int32(rows), {"COLS": cols}
            group = max(next_power_of_two(cols // CHUNK), self._hardware.subgroup)
            grid = min(rows, MAX_GROUPS), ceil_div(rows, MAX_GROUPS), 1
            columns = launch(
                "head_pack", (cols // CHUNK, 1, 1), self._group, (weight.data, packed, n), size, entry="head_columns"
            )
            return [columns, launch("head_pack", grid, group, (weight.data, packed, packed, packed, n), size)]

        return ctx.copy(name, cols * 4 + rows * (cols // 2 + 8), fill)

    def _multiplies(self, weight: DenseBuffer) -> bool:
        """Whether dense_mma supports a weight."""
        return matrices.has_f16(self._hardware) and weight.dtype == "f16" and weight.shape[1] % 16 == 0

    def _halves(self, ctx: Context, cols: int) -> tuple[Buffer, Buffer]:
        """Where split_rows puts its rows, and what undoes their scales."""
        most = ctx.program.limits.max_rows
        return ctx.scratch("halves of rows", most * cols * 4), ctx.scratch("scales of rows", most * 4)

    def _split(self, ctx: Context, x: Buffer, cols: int, bucket: Bucket) -> Launch:
        args = (ctx.step, x, *self._halves(ctx, cols))
        return launch("split_rows", (bucket.rows, 1, 1), self._group, args, {"COLS": cols})
