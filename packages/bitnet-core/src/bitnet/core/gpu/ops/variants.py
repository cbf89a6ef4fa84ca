"""Operations that need other kernels than most of their type: their keys in a launch table, and their launches."""

from __future__ import annotations

from dataclasses import replace

from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Launch
from bitnet.core.gpu.drivers.windows import Windows
from bitnet.core.gpu.ops.adjusting import count_chosen
from bitnet.core.gpu.ops.embedders import EmbedderOps, Product
from bitnet.core.gpu.ops.experts import BoundExpertOps, ExpertOps
from bitnet.core.gpu.ops.logprobs import logprobs
from bitnet.core.gpu.ops.recurrent import Absmax, RecurrentOps
from bitnet.core.gpu.ops.rows import RowOps
from bitnet.core.gpu.ops.scaled import group_product, head_norms, in_groups, norms_heads
from bitnet.core.gpu.ops.tables import table_launches
from bitnet.core.hal import (
    Adjustment,
    Attention,
    Embed,
    ExpertMatmul,
    GluNormQuant,
    Logprobs,
    NormRows,
    NormTokens,
    Op,
    Program,
    RopeAppend,
    Route,
    TernaryMatmul,
)
from bitnet.core.hal.check import ternary_table


class GroupScaledMatmul:
    """Key of a :class:`~bitnet.core.hal.TernaryMatmul` whose weights have a scale for each group of columns."""


class ColumnMatmul:
    """Key of a :class:`~bitnet.core.hal.TernaryMatmul` whose results are some columns of its tensor."""


class NormedRope:
    """Key of a :class:`~bitnet.core.hal.RopeAppend` that first normalises the heads of q and k."""


class RotatedNorms:
    """Key of a :class:`~bitnet.core.hal.RopeAppend` that normalises the heads of q and k after their rotation."""


class PartialRope:
    """Key of a :class:`~bitnet.core.hal.RopeAppend` that rotates only a part of each head."""


class WindowedAttention:
    """Key of an :class:`~bitnet.core.hal.Attention` to a window of positions."""


class ExpertGlu:
    """Key of a :class:`~bitnet.core.hal.GluNormQuant` of several rows side by side, or with limits."""


class Gelu:
    """Key of a :class:`~bitnet.core.hal.GluNormQuant` whose activation is GELU."""


class Transformed:
    """Key of an operation with a :class:`~bitnet.core.hal.Transform`."""


class TernaryTable:
    """Key of an :class:`~bitnet.core.hal.Embed` or :class:`~bitnet.core.hal.DenseMatmul` with a ternary weight."""


def key(program: Program, op: Op) -> type:
    """The key of an operation in a launch table: its type, or one of the classes above."""
    if getattr(op, "transform", None) is not None:
        return Transformed
    if isinstance(op, Attention) and op.window is not None:
        return WindowedAttention
    if isinstance(op, GluNormQuant) and (op.parts > 1 or op.clamp is not None):
        return ExpertGlu
    if isinstance(op, GluNormQuant) and op.activation == "gelu_tanh":
        return Gelu
    if isinstance(op, RopeAppend) and op.norms_last:
        return RotatedNorms
    if isinstance(op, RopeAppend) and 2 * program.weights[op.cos].shape[1] < op.head_dim:
        return PartialRope
    if isinstance(op, TernaryMatmul) and op.column is not None:
        return ColumnMatmul
    if in_groups(program, op):
        return GroupScaledMatmul
    if norms_heads(op):
        return NormedRope
    return TernaryTable if ternary_table(program, op) else type(op)


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


def expert_variants(rows: RowOps, local_bytes: int, windows: Windows | None = None) -> Dispatch:
    """Further entries, of a backend that has the kernels of mixtures of experts, too, and binds matrices by
    ``windows`` if its API has them bound in parts."""
    ops = BoundExpertOps(rows.group, local_bytes, windows) if windows else ExpertOps(rows.group, local_bytes)
    return {Route: ops.route, ExpertMatmul: ops.expert_matmul, ExpertGlu: ops.glu}


def embedder_variants(rows: RowOps, table: Dispatch, product: Product) -> Dispatch:
    """Further entries, of a backend that has the kernels of embedders, and of norms of heads after their rotation, too.
    GELU and such rotations are variants of kernels. Their entries are their own: so no group of operations has them.

    Args:
        table: The entries of operations without them.
        product: A ternary product into a buffer.
    """

    def gelu(ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        return table[GluNormQuant](ctx, op, bucket) or []

    def rotation(ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        return table[RopeAppend](ctx, op, bucket) or []

    ops = EmbedderOps(rows, product)
    return {
        NormTokens: ops.norm_tokens,
        ColumnMatmul: ops.columns,
        Gelu: gelu,
        RotatedNorms: rotation,
    }


def recurrent_variants(rows: RowOps, table: Dispatch, absmax: Absmax | None = None) -> Dispatch:
    """Further entries, of a backend that has the kernels of recurrent layers and transforms, too.

    Args:
        table: The entries of operations without transforms.
        absmax: Quantises rows in place of :meth:`RowOps.absmax`.
    """

    def plain(ctx: Context, op: Embed | NormRows, bucket: Bucket) -> list[Launch]:
        return table[key(ctx.program, replace(op, transform=None))](ctx, op, bucket) or []

    def rotation(ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        return table[NormedRope if norms_heads(op) else RopeAppend](ctx, op, bucket) or []

    ops = RecurrentOps(rows, absmax or rows.absmax, plain)
    return {**ops.table(), PartialRope: rotation, Transformed: ops.transformed}
