"""Shared code to launch ternary products: where a product reads its input, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Arg, Buffer, Launch
from bitnet.core.gpu.fusions import FeedForward, NormProduct
from bitnet.core.gpu.ops.rows import activation_defines
from bitnet.core.hal import GatedQuant, GluNormQuant, NormQuant, Op, TernaryMatmul

NO_NORM, NORM = 1, 2
"""Kinds of :class:`ProductInput`, with the kernels' numbers; 0 is int8."""


@dataclass(frozen=True, slots=True)
class ProductInput:
    """Where a product reads its activations.

    Attributes:
        kind: 0: int8, with scales and the sums of the rows. ``NO_NORM``, ``NORM``: f32 of one token, quantised in the
            kernel, without and with RMSNorm before it.
    """

    x: Buffer
    kind: int = 0
    scale: Buffer | None = None
    norm: str | None = None
    eps: float = 0.0

    def gain(self, ctx: Context) -> Buffer:
        """The norm's weight, or any buffer if there is none."""
        return ctx.dense(self.norm).data if self.norm else self.x


class Decode(Protocol):
    """A backend's product of few tokens; ``activation`` names the one applied between gates and ups if W holds both."""

    def __call__(
        self,
        ctx: Context,
        op: TernaryMatmul,
        bucket: Bucket,
        source: ProductInput,
        out: Buffer,
        *,
        activation: str = "",
    ) -> Launch: ...


def normed(ctx: Context, op: NormQuant) -> ProductInput:
    """The input of a quantisation, for a product that quantises by itself."""
    return ProductInput(ctx.tensors[op.x], NORM if op.weight else NO_NORM, norm=op.weight, eps=op.eps)


def feed_forward(
    decode: Decode,
    ctx: Context,
    group: FeedForward,
    bucket: Bucket,
) -> list[Launch]:
    """The two products of a feed-forward block: the first also norms and activates, the second norms."""
    glu, down = group.glu, group.down
    product = glu_products(ctx, glu)
    source = ProductInput(product, NORM if glu.weight else NO_NORM, norm=glu.weight, eps=glu.eps)
    return [
        decode(ctx, group.up, bucket, normed(ctx, group.norm), product, activation=glu.activation),
        decode(ctx, down, bucket, source, ctx.tensors[down.out]),
    ]


def fused_products(decode: Decode, quantises: Callable[[Context, TernaryMatmul, Bucket], bool]) -> Dispatch:
    """The entries for products that norm and quantise their own input.

    Args:
        quantises: Whether ``decode`` can do this for a product in a step.
    """

    def block(ctx: Context, group: FeedForward, bucket: Bucket) -> list[Launch] | None:
        able = quantises(ctx, group.up, bucket) and quantises(ctx, group.down, bucket)
        return feed_forward(decode, ctx, group, bucket) if able else None

    def product(ctx: Context, group: NormProduct, bucket: Bucket) -> list[Launch] | None:
        op = group.product
        if not quantises(ctx, op, bucket):
            return None
        return [decode(ctx, op, bucket, normed(ctx, group.norm), ctx.tensors[op.out])]

    return {FeedForward: block, NormProduct: product}


def product_defines(op: TernaryMatmul, activation: str) -> dict[str, int]:
    """Preprocessor constants of a product on any API: the activation, if any, and whether it adds to ``out``."""
    return {"GLU": int(bool(activation)), **activation_defines(activation), "ADD": int(op.add)}


def product_args(ctx: Context, op: TernaryMatmul, source: ProductInput, out: Buffer) -> tuple[Arg, ...]:
    """The arguments of a product of few tokens that reads its activations from ``source``."""
    w = ctx.ternary(op.weights)
    sums = source.x if source.kind else row_sums(ctx, op.x)
    x = (ctx.step, source.x, source.scale or source.x, sums, source.gain(ctx), np.float32(source.eps))
    return (*x, w.codes, w.scales, out, np.int32(w.rows))


def tiled_args(ctx: Context, op: TernaryMatmul, out: Buffer) -> tuple[Arg, ...]:
    """The arguments of a product whose activations are int8."""
    w = ctx.ternary(op.weights)
    x = ctx.tensors[op.x], ctx.tensors[op.scale], row_sums(ctx, op.x)
    return (ctx.step, *x, w.codes, w.scales, out, np.int32(w.rows))


def glu_products(ctx: Context, op: GluNormQuant) -> Buffer:
    """Working memory for ``act(gate) · up`` of every token."""
    return ctx.scratch("glu products", ctx.program.limits.max_tokens * (ctx.shape(op.gate_up)[1] // 2) * 4)


def row_sums(ctx: Context, name: str) -> Buffer:
    """The sums of an int8 tensor's rows, which products with codes ``w + 1`` must subtract."""
    return ctx.scratch(f"sums of {name}", ctx.program.limits.max_tokens * 4)


def quantised(name: str, ops: Sequence[Op]) -> bool:
    """Whether an operation produces the int8 tensor, so that its kernel can also compute the row sums."""
    return any(isinstance(op, NormQuant | GluNormQuant | GatedQuant) and op.out == name for op in ops)
