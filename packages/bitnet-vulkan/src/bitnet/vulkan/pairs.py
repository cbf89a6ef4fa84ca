"""Products of weights with scales of groups for few tokens, and heads of ternary tables, by integer dot products.

Two neighbouring invocations of a subgroup share rows of the weights: each has half of every block of 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu import Bucket, Buffer, Context, Launch, launch
from bitnet.core.gpu.drivers.windows import in_two
from bitnet.core.gpu.ops import ceil_div, power_of_two
from bitnet.core.gpu.ops.group_products import GroupProducts, group_defines
from bitnet.core.gpu.ops.tables import WindowedTables, row_digits, table_of
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import DenseMatmul, Embed, TernaryMatmul
from bitnet.vulkan.hardware import Hardware

COLUMNS = (64, 128, 256)
"""Columns of a group."""
HELD = 2
"""Rows of W that two invocations share, as in the sources."""
SUBGROUPS = 16
"""Maximum subgroups of a work-group of ternary_groups_few, which share the columns of its rows."""
SPAN = 2
"""Maximum units of columns of a subgroup whose terms are in shared memory at a time."""
FEW_TOKENS = 8
"""Maximum tokens of a step for ternary_groups_few."""
MAX_SUMS = 4
"""Maximum sums of a row and token that an invocation of ternary_groups_few adds up."""
TABLE_GROUP = 128
"""Invocations of a work-group of digits_matmul."""
DEPTH = 4
"""Blocks of 128 columns that these have on their way at a time."""


@dataclass(frozen=True, slots=True)
class PairProducts:
    """Launches for a device."""

    hardware: Hardware

    def few(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer) -> list[Launch] | None:
        """A product of few tokens into ``out``; None if there are more, or the kernel does not support it."""
        w, hardware = ctx.ternary(op.weights), self.hardware
        if not 1 < bucket.tokens <= FEW_TOKENS or not self._able(w):
            return None
        subgroups = min(SUBGROUPS, power_of_two(hardware.group // hardware.subgroup))
        rows, sizes = hardware.subgroup // 2 * HELD, group_defines(w)
        assert w.group is not None
        each, units = bucket.tokens, w.cols // max(w.group, 128)
        span = min(SPAN, ceil_div(units, subgroups))
        while (
            span and ceil_div(each, 2) * 2 * (rows * (span * subgroups * sizes["EACH"] | 1) + 4) * 4 > hardware.shared
        ):
            span -= 1
        if not span or each > MAX_SUMS * subgroups:
            return None
        defines = {**sizes, "ADD": int(op.add), "TOKENS": each, "SPAN": span}
        group = subgroups * hardware.subgroup
        return [
            launch("ternary_groups_few", (*in_two(ceil_div(count, rows)), 1), group, args, defines)
            for args, count in GroupProducts(hardware.windows).parts(ctx, op, out)
        ]

    def table(self, ctx: Context, op: Embed | DenseMatmul, bucket: Bucket) -> list[Launch]:
        """``embed`` or ``dense_matmul`` of a ternary table: the latter, of one row, with three int8 digits of each
        activation, as exact sums for each group. For more rows, table_matmul is faster."""
        w, hardware = table_of(ctx, op), self.hardware
        if isinstance(op, Embed) or bucket.rows > 1 or not self._able(w):
            return WindowedTables(hardware.windows).lower(ctx, op, bucket)
        assert w.group is not None
        digits, units = row_digits(ctx, w)
        group = max(min(TABLE_GROUP, power_of_two(hardware.group)), hardware.subgroup)
        sizes = {"COLS": w.cols, "GROUP": w.group}
        split = (ctx.step, ctx.tensors[op.x], digits, units)
        made = [launch("table_digits", (1, 1, 1), group, split, sizes)]
        defines = {**sizes, "DEPTH": min(DEPTH, w.cols // 128)}
        for codes, first, rows in hardware.windows(w.codes, w.rows):
            grid = (*in_two(ceil_div(rows, group // 2 * HELD)), 1)
            args = (ctx.step, digits, units, codes, w.scales, ctx.tensors[op.out], np.uint32(rows), np.uint32(first))
            made.append(launch("digits_matmul", grid, group, args, defines))
        return made

    def _able(self, w: TernaryBuffer) -> bool:
        """Whether the device has the instructions, and rows are whole blocks of whole groups."""
        hardware = self.hardware
        dots = hardware.macros["DOT"] and hardware.subgroup >= 2
        return bool(dots) and w.group in COLUMNS and w.cols % max(w.group, 128) == 0
