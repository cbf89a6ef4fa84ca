"""Grids and tuning: the operations as OpenCL launches; what is not here is as on every GPU.

A step of one token is lowered to six launches a layer: norm and quantisation go into the product after them, the gate's
activation into the product before it, the rotation and the cache's new entry into attention, whose parts are merged.
With matrix units it is one launch a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Bucket, Context, KernelSources, Launch, Lowering
from bitnet.core.gpu.fusion import (
    Source,
    feed_forward,
    feeds,
    glu_products,
    lower,
    normed,
    read_again,
    rotates_for,
    row_sums,
)
from bitnet.core.gpu.ops import Dispatch, RowOps, advance
from bitnet.core.hal import Attention, DenseMatmul, GluNormQuant, NormQuant, Op, RopeAppend, Sample, TernaryMatmul
from bitnet.opencl.attention import AttentionOps
from bitnet.opencl.layers import LayerOps
from bitnet.opencl.products import Products, power_of_two

ENTRY = r"^kernel (?:__attribute__\(\(.*\)\) )?(?:OF_WARPS )?void (\w+)\("
SOURCES = KernelSources("bitnet.opencl", "opencl", ending=".cl", common="common.clh", entry=ENTRY)


class OpenCLOps:
    """The lowering for a device.

    Args:
        compute_units: Of the device.
        group: Work-items of a work-group at most.
        local_bytes: Local memory of a work-group at most.
        gpu: Whether it is one: a CPU gains nothing by large work-groups, and its compiler takes long for them.
        mma: Whether its driver builds the kernels that use matrix units.
        resident: Of those, the work-groups that surely run at once; 0 where nobody can tell.
    """

    def __init__(
        self, compute_units: int, group: int, local_bytes: int, *, gpu: bool, mma: bool = False, resident: int = 0
    ) -> None:
        most = power_of_two(min(group, 256))
        self._rows = RowOps(group=most)
        self._products = Products(compute_units, most, local_bytes, mma=mma)
        self._attention = AttentionOps(compute_units, most, local_bytes, mma=mma)
        self._layers = LayerOps(resident if mma else 0, local_bytes)
        samples = RowOps(group=power_of_two(min(group, 1024))) if gpu else self._rows
        self._table: Dispatch = {
            **self._rows.table(),
            NormQuant: self.norm_quant,
            GluNormQuant: self.glu_norm_quant,
            TernaryMatmul: self._products.ternary_matmul,
            DenseMatmul: self._products.dense_matmul,
            Attention: self._attention.lower,
            Sample: samples.sample,
        }

    def lowering(self) -> Lowering:
        """What :class:`bitnet.core.gpu.GpuDevice` takes."""
        return Lowering(self.step, advance)

    def step(self, ctx: Context, bucket: Bucket) -> list[Launch]:
        """The program's launches, fused where a bucket and the neighbouring operations allow it."""
        return lower(ctx, bucket, lambda ops, at: self._fused(ctx, ops, at, bucket))

    def norm_quant(self, ctx: Context, op: NormQuant, bucket: Bucket) -> list[Launch]:
        (launch,) = self._rows.norm_quant(ctx, op, bucket)
        *args, dim = launch.args
        return [replace(launch, args=(*args, row_sums(ctx, op.out), dim))]

    def glu_norm_quant(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        (launch,) = self._rows.glu_norm_quant(ctx, op, bucket)
        *args, dim, products = launch.args
        return [replace(launch, args=(*args, row_sums(ctx, op.out), dim, products))]

    def _fused(self, ctx: Context, ops: Sequence[Op], at: int, bucket: Bucket) -> tuple[list[Launch], int]:
        """Launches for the operations from ``at`` on, and how many operations they do."""
        products = self._products
        if bucket.tokens == 1 and not ctx.program.keep:
            if layer := self._layers.find(ctx, ops[at:]):
                return [self._layers.launch(ctx, layer, bucket)], 10
            match ops[at : at + 4]:
                case [RopeAppend() as rope, Attention() as op, *_] if rotates_for(rope, op, ops[at + 2 :]):
                    if self._attention.splits(ctx, op, bucket):
                        return self._attention.decode(ctx, op, bucket, rope), 2
                case [NormQuant() as n, TernaryMatmul() as up, GluNormQuant() as glu, TernaryMatmul() as down] if (
                    feeds(n, up, ops[at + 2 :])
                    and feeds(glu, down, ops[at + 4 :])
                    and (up.out, up.add) == (glu.gate_up, False)
                    and not read_again(up.out, ops[at + 3 :])
                    and products.quantises(ctx.ternary(up.weights), 1, times=2)
                    and products.quantises(ctx.ternary(down.weights), 1)
                ):
                    return feed_forward(products.decode, ctx, (n, up, glu, down), bucket), 4
        if not ctx.program.keep:
            match ops[at : at + 3]:
                case [NormQuant() as n, TernaryMatmul() as up, GluNormQuant() as glu] if (
                    bucket.tokens > 1
                    and self._gates(ctx, up, glu, ops[at + 3 :])
                    and self._takes(ctx, n, up, ops[at + 2 :], bucket)
                ):
                    return self._gated(ctx, up, glu, bucket, normed(ctx, n)), 3
                case [NormQuant() as n, TernaryMatmul() as up, *_] if self._takes(ctx, n, up, ops[at + 2 :], bucket):
                    return [products.decode(ctx, up, bucket, normed(ctx, n), ctx.tensors[up.out])], 2
                case [TernaryMatmul() as up, GluNormQuant() as glu, *_] if bucket.tokens > 1 and self._gates(
                    ctx, up, glu, ops[at + 2 :]
                ):
                    return self._gated(ctx, up, glu, bucket, None), 2
        return self._table[type(ops[at])](ctx, ops[at], bucket), 1

    def _takes(self, ctx: Context, n: NormQuant, op: TernaryMatmul, later: Sequence[Op], bucket: Bucket) -> bool:
        """Whether the product can quantise its tokens, and nothing else needs what the operation before it makes."""
        return feeds(n, op, later) and self._products.quantises(ctx.ternary(op.weights), bucket.tokens)

    def _gates(self, ctx: Context, up: TernaryMatmul, glu: GluNormQuant, later: Sequence[Op]) -> bool:
        """Whether the product can apply the activation, and nothing else needs what it would have made."""
        gates = self._products.gates(ctx.ternary(up.weights))
        return gates and (up.out, up.add) == (glu.gate_up, False) and not read_again(up.out, later)

    def _gated(
        self, ctx: Context, up: TernaryMatmul, glu: GluNormQuant, bucket: Bucket, source: Source | None
    ) -> list[Launch]:
        """The product of gates and ups, which quantises its ``source`` if any, and activates; the norm after it."""
        product, width = glu_products(ctx, glu), ctx.shape(glu.gate_up)[1] // 2
        weight = ctx.dense(glu.weight).data if glu.weight else product
        outs = ctx.tensors[glu.out], ctx.tensors[glu.scale], row_sums(ctx, glu.out)
        args = (ctx.step, product, weight, np.float32(glu.eps), *outs, np.int32(width))
        defines = {"NORM": int(glu.weight is not None)}
        if source:
            made = [self._products.decode(ctx, up, bucket, source, product, activation=glu.activation)]
        else:
            made = self._products.ternary_matmul(ctx, up, bucket, out=product, activation=glu.activation)
        return [*made, self._rows.launch("norm_quant", bucket.tokens, args, defines=defines)]
