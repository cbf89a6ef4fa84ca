"""Which neighbouring operations a backend may do in one kernel without a later operation missing what was left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.driver import Arg, Buffer, Launch
from bitnet.core.gpu.ops import ROW_OPS
from bitnet.core.hal import Attention, GluNormQuant, NormQuant, Op, RopeAppend, TernaryMatmul

NO_NORM, NORM = 1, 2
"""Kinds of :class:`Source`, as the kernels of fused products take them; 0 is int8."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a product takes its activations.

    Attributes:
        kind: 0: int8, with scales and the sums of the rows. ``NO_NORM``, ``NORM``: f32 of one token, quantised in the
            kernel, without and with RMSNorm before it.
    """

    x: Buffer
    kind: int = 0
    scale: Buffer | None = None
    norm: str | None = None
    eps: float = 0.0


class Decode(Protocol):
    """A backend's product of few tokens; ``activation`` names the one between gates and ups, where W holds both."""

    def __call__(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, source: Source, out: Buffer, *, activation: str = ""
    ) -> Launch: ...


def lower(ctx: Context, bucket: Bucket, fused: Callable[[Sequence[Op], int], tuple[list[Launch], int]]) -> list[Launch]:
    """The program's launches; ``fused`` gives those for the operations from a place on, and how many they do."""
    ops = [op for op in ctx.program.ops if bucket.rows or not isinstance(op, ROW_OPS)]
    launches: list[Launch] = []
    at = 0
    while at < len(ops):
        made, taken = fused(ops, at)
        launches += made
        at += taken
    return launches


def normed(ctx: Context, op: NormQuant) -> Source:
    """The input of a quantisation, for a product that does it itself."""
    return Source(ctx.tensors[op.x], NORM if op.weight else NO_NORM, norm=op.weight, eps=op.eps)


def feed_forward(
    decode: Decode,
    ctx: Context,
    ops: tuple[NormQuant, TernaryMatmul, GluNormQuant, TernaryMatmul],
    bucket: Bucket,
) -> list[Launch]:
    """A feed-forward block of one token as two products: the first also norms and activates, the second norms."""
    n, up, glu, down = ops
    product = glu_products(ctx, glu)
    source = Source(product, NORM if glu.weight else NO_NORM, norm=glu.weight, eps=glu.eps)
    return [
        decode(ctx, up, bucket, normed(ctx, n), product, activation=glu.activation),
        decode(ctx, down, bucket, source, ctx.tensors[down.out]),
    ]


def product_args(ctx: Context, op: TernaryMatmul, source: Source, out: Buffer) -> tuple[Arg, ...]:
    """The arguments of a product of few tokens that takes its activations from ``source``."""
    w = ctx.ternary(op.weights)
    norm = ctx.dense(source.norm).data if source.norm else source.x
    sums = source.x if source.kind else row_sums(ctx, op.x)
    x = (ctx.step, source.x, source.scale or source.x, sums, norm, np.float32(source.eps))
    return (*x, w.codes, w.scales, out, np.int32(w.rows))


def glu_products(ctx: Context, op: GluNormQuant) -> Buffer:
    """Working memory for ``act(gate) · up`` of every token."""
    return ctx.scratch("glu products", ctx.program.limits.max_tokens * (ctx.shape(op.gate_up)[1] // 2) * 4)


def row_sums(ctx: Context, name: str) -> Buffer:
    """The sums of the rows of an int8 tensor, which products with codes ``w + 1`` take off."""
    return ctx.scratch(f"sums of {name}", ctx.program.limits.max_tokens * 4)


def read_again(name: str, later: Sequence[Op]) -> bool:
    """Whether a later operation reads a product's tensor before one makes it anew."""
    for op in later:
        if isinstance(op, GluNormQuant) and op.gate_up == name:
            return True
        if isinstance(op, TernaryMatmul) and op.out == name:
            return op.add
    return False


def rotates_for(rope: RopeAppend, attention: Attention, later: Sequence[Op]) -> bool:
    """Whether ``attention`` takes what ``rope`` makes, and nothing later reads that tensor before it is made anew.

    One kernel for both leaves q in the tensor as it was.
    """
    if (rope.qkv, rope.layer) != (attention.qkv, attention.layer):
        return False
    for op in later:
        if isinstance(op, TernaryMatmul) and op.out == rope.qkv:
            return not op.add
        if rope.qkv in astuple(op):
            return False
    return True


def feeds(quant: NormQuant | GluNormQuant, op: TernaryMatmul, later: Sequence[Op]) -> bool:
    """Whether ``op`` takes what ``quant`` makes, and nothing later does before it is made anew.

    Nor may ``op`` write what ``quant`` reads: in one kernel, some work-groups write while others still read.
    """
    source = quant.x if isinstance(quant, NormQuant) else quant.gate_up
    if (quant.out, quant.scale) != (op.x, op.scale) or source == op.out:
        return False
    for other in later:
        if isinstance(other, TernaryMatmul) and quant.out == other.x:
            return False
        if isinstance(other, NormQuant | GluNormQuant) and quant.out == other.out:
            return True
    return True


def quantised(name: str, ops: Sequence[Op]) -> bool:
    """Whether an operation makes the int8 tensor, so that its kernel can make the sums of its rows beside it."""
    return any(isinstance(op, NormQuant | GluNormQuant) and op.out == name for op in ops)
