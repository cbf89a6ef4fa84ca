"""Recurrent layers and Hadamard transforms in Vulkan: as on every GPU, but one dispatch transforms and quantises, and a
product of one token convolves its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu import Bucket, Buffer, Context, Dispatch, Launch, launch
from bitnet.core.gpu.fusions import GatedTransform, RecurrentInputs
from bitnet.core.gpu.ops import RowOps, activation_defines, ceil_div
from bitnet.core.gpu.ops.products import ProductInput, glu_products
from bitnet.core.gpu.ops.recurrent import Quantising, Transforming, transform_source
from bitnet.core.gpu.ops.variants import Transformed, recurrent_variants
from bitnet.core.hal import DeltaGates, Embed, GatedQuant, GluNormQuant, NormRows, TernaryMatmul
from bitnet.vulkan.hardware import Hardware

GROUP, TURN = 256, 1024
"""Invocations of transform_quant, which has a multiple of them, and columns that so many take at a time: the largest
block, and a multiple of a normed head."""


@dataclass(frozen=True, slots=True)
class RecurrentLaunches:
    """The launches for a device.

    Attributes:
        plain: The entries of operations without transforms.
        decode: A product of one token, whose results may be activated or convolved.
        quantises: Whether ``decode`` takes a product of one token.
    """

    hardware: Hardware
    rows: RowOps
    plain: Dispatch
    decode: Callable[..., Launch]
    quantises: Callable[[Context, TernaryMatmul, Bucket], bool]

    def table(self) -> Dispatch:
        """The entries of operations of recurrent layers, of those with transforms, and of their fusions."""
        shared = recurrent_variants(self.rows, self.plain)

        def quantised(ctx: Context, op: Transforming, bucket: Bucket) -> list[Launch] | None:
            made = None if isinstance(op, NormRows | Embed) else self.transform(ctx, op, bucket)
            return [made] if made else shared[Transformed](ctx, op, bucket)

        def inputs(ctx: Context, group: RecurrentInputs, bucket: Bucket) -> list[Launch] | None:
            """The convolution within the product before it, and nothing that waits between both products and gates."""
            norm, mixed, gate = group.norm, group.mixed, group.gate
            if norm.transform is None or not all(self.quantises(ctx, op, bucket) for op in (mixed, gate)):
                return None
            if any(ctx.ternary(op.weights).group is None for op in (mixed, gate)):
                return None
            x = ProductInput(ctx.tensors[norm.out], scale=ctx.tensors[norm.scale])
            return [
                *(quantised(ctx, norm, bucket) or []),
                *(shared[DeltaGates](ctx, group.gates, bucket) or []),
                self.decode(ctx, mixed, bucket, x, ctx.tensors[group.conv.out], conv=group.conv),
                self.decode(ctx, gate, bucket, x, ctx.tensors[gate.out]),
            ]

        def activated(ctx: Context, group: GatedTransform, bucket: Bucket) -> list[Launch] | None:
            up, glu, product = group.up, group.glu, glu_products(ctx, group.glu)
            made = self.transform(ctx, glu, bucket, product) if self.quantises(ctx, up, bucket) else None
            if made is None:
                return None
            x = ProductInput(ctx.tensors[up.x], scale=ctx.tensors[up.scale])
            return [self.decode(ctx, up, bucket, x, product, activation=glu.activation), made]

        fused: Dispatch = {RecurrentInputs: inputs, GatedTransform: activated}
        return {**shared, GatedQuant: quantised, Transformed: quantised, **fused}

    def transform(self, ctx: Context, op: Quantising, bucket: Bucket, product: Buffer | None = None) -> Launch | None:
        """The launch of transform_quant; None if it does not support the shape.

        Args:
            product: ``act(gate) · up`` of a :class:`GluNormQuant`, if another kernel has computed it.
        """
        width, weight, transform, hardware = ctx.shape(op.out)[1], op.weight, op.transform, self.hardware
        kind, x, gate = transform_source(ctx, op, product)
        turns = ceil_div(width, hardware.group // GROUP * TURN) if hardware.group >= GROUP else 0
        head = width if kind != 2 or weight is None else ctx.program.weights[weight].shape[0]
        normed_heads, block = kind == 2 and weight is not None, transform.block if transform else 1
        if not turns or block > TURN or width % 128 or (normed_heads and (TURN % head or head % 16)):
            return None
        group = ceil_div(width, turns * TURN) * GROUP
        signs = transform.signs if transform else None
        defines = {"DIM": width, "KIND": kind, "NORM": int(weight is not None), "BLOCK": block}
        defines |= {"SIGNS": int(signs is not None), "HEAD": head}
        if isinstance(op, GluNormQuant):
            defines |= activation_defines(op.activation)
        elif isinstance(op, GatedQuant):
            defines |= {"SILU": int(op.activation == "silu"), "UNTILE": op.untile}
        factors = (ctx.dense(name).data if name else ctx.step for name in (weight, signs))
        kept = ctx.scratch("transformed rows", ctx.shape(op.out)[0] * width * 4)
        args = (ctx.step, x, gate, *factors, ctx.tensors[op.out], ctx.tensors[op.scale], kept, np.float32(op.eps))
        return launch("transform_quant", (bucket.tokens, 1, 1), group, args, defines)
