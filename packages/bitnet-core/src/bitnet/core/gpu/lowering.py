"""The launch table of a backend: what each operation, and each group of operations, launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitnet.core.gpu.adjusting import count_chosen
from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.logprobs import logprobs
from bitnet.core.gpu.ops import RowOps
from bitnet.core.gpu.scaled import group_product, head_norms, in_groups, norms_heads
from bitnet.core.gpu.tables import table_launches
from bitnet.core.hal import Adjustment, Logprobs, Op, Program
from bitnet.core.hal.check import ternary_table


class GroupScaledMatmul:
    """Key of a :class:`~bitnet.core.hal.TernaryMatmul` whose weights have a scale for each group of columns."""


class NormedRope:
    """Key of a :class:`~bitnet.core.hal.RopeAppend` that first normalises the heads of q and k."""


class TernaryTable:
    """Key of an :class:`~bitnet.core.hal.Embed` or :class:`~bitnet.core.hal.DenseMatmul` with a ternary weight."""


def key(program: Program, op: Op) -> type:
    """The key of an operation in a launch table: its type, or one of the classes above."""
    if in_groups(program, op):
        return GroupScaledMatmul
    if norms_heads(op):
        return NormedRope
    return TernaryTable if ternary_table(program, op) else type(op)


@dataclass(frozen=True, slots=True)
class Lowering:
    """The lowering that a backend's ``ops.py`` provides.

    Attributes:
        table: Launches by :func:`key` of an operation and by type of a group, and, for the last ``Sample`` of a
            program, those under ``Logprobs`` (it reports log-probabilities) and ``Adjustment`` (it counts tokens in
            slots). What is not in the table is refused. An operation with a key other than its type takes part in
            groups only if the table has the same entry for both.
        leaves_out: Whether steps whose logits nobody reads are lowered differently.
        filters: Whether logits may also be left out if rows have top-k, top-p or min-p. Only used with `leaves_out`.
    """

    table: Dispatch
    leaves_out: Callable[[Context], bool] = lambda _: False
    filters: Callable[[Context, Bucket], bool] = lambda _, bucket: False

    def supports(self, program: Program, op: Op) -> bool:
        """Whether the backend has kernels for an operation of a program."""
        return key(program, op) in self.table


def variants(rows: RowOps) -> Dispatch:
    """Table entries for all keys that are no operation's type. A backend needs their kernels, as they are named here
    on every GPU."""
    return {
        GroupScaledMatmul: group_product,
        NormedRope: lambda ctx, op, bucket: [*head_norms(ctx, op, bucket), *rows.rope_append(ctx, op, bucket)],
        TernaryTable: table_launches,
        Logprobs: lambda ctx, op, bucket: logprobs(ctx, bucket, rows.group),
        Adjustment: lambda ctx, op, bucket: [count_chosen(ctx)],
    }
