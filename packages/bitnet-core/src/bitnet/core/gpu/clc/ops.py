"""Lowers operations to launches of OpenCL C kernels, for every driver; other operations are lowered as on every GPU.

A step of one token takes six launches per layer: norm and quantisation are fused into the next product, the gate's
activation into the previous product, and rotation and KV cache update into attention, whose partial results are merged.
With NVIDIA's matrix units it takes one launch per layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.attention import DECODE_TOKENS
from bitnet.core.gpu.clc.products import MAX_GROUP
from bitnet.core.gpu.clc.recurrent import RecurrentLaunches
from bitnet.core.gpu.clc.vendors import VENDORS, Vendor
from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Buffer, Launch
from bitnet.core.gpu.fusions import FeedForward, GatedProduct, NormGatedProduct, NormProduct, RopeAttention
from bitnet.core.gpu.lowering import Lowering
from bitnet.core.gpu.ops import RowOps, power_of_two
from bitnet.core.gpu.ops.products import feed_forward, glu_products, normed, row_sums
from bitnet.core.gpu.ops.scaled import head_norms
from bitnet.core.gpu.ops.variants import (
    GroupScaledMatmul,
    NormedRope,
    TernaryTable,
    WindowedAttention,
    embedder_variants,
    expert_variants,
    recurrent_variants,
    variants,
)
from bitnet.core.gpu.sources import KernelSources
from bitnet.core.hal import (
    Attention,
    DenseMatmul,
    GatedQuant,
    GluNormQuant,
    NormQuant,
    RopeAppend,
    Sample,
    TernaryMatmul,
)

ENTRY = r"^kernel (?:__attribute__\(\(.*\)\) )?(?:OF_WA\w+ )?void (\w+)\("
SUMS = 6
"""Position of the sums of rows among the arguments of ``norm_quant`` and ``glu_norm_quant``."""
MAX_SAMPLERS = 1024
"""Maximum work-items for sampling a token on a GPU."""


def sources(
    package: str, backend: str, *, common: str = "common.clh", vendors: Collection[str] | None = None
) -> KernelSources:
    """The OpenCL C kernel sources in a backend's wheel.

    Args:
        common: The file prepended to each source: ``common.clh``, or one that includes it and adds missing built-ins.
        vendors: Folders of the vendors whose hardware the backend reaches; None for all.
    """
    return KernelSources(package, backend, ending=".cl", common=common, entry=ENTRY, vendors=vendors)


class SummingRows(RowOps):
    """Operations on rows whose quantisations also store the sum of each row of codes."""

    def norm_quant(self, ctx: Context, op: NormQuant, bucket: Bucket) -> list[Launch]:
        (launch,) = super().norm_quant(ctx, op, bucket)
        return [_summing(ctx, launch, op.out)]

    def glu_norm_quant(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        (launch,) = super().glu_norm_quant(ctx, op, bucket)
        return [_summing(ctx, launch, op.out)]

    def absmax(self, ctx: Context, op: NormQuant | GluNormQuant | GatedQuant, x: Buffer, bucket: Bucket) -> Launch:
        return _summing(ctx, super().absmax(ctx, op, x, bucket), op.out)


class ClcOps:
    """The lowering for a device.

    Args:
        vendor: The vendor's kernels, if the abilities do not determine them, as for a port to another language.
    """

    def __init__(self, abilities: Abilities, vendor: Vendor | None = None) -> None:
        vendor = vendor or VENDORS[abilities.matrix]
        self._rows = SummingRows(group=power_of_two(min(abilities.group, MAX_GROUP)))
        self._products, self._attention = vendor.products(abilities), vendor.attention(abilities)
        self._leaves_out = vendor.leaves_out
        samples = RowOps(group=power_of_two(min(abilities.group, MAX_SAMPLERS))) if abilities.gpu else self._rows
        self._table: Dispatch = {
            **self._rows.table(),
            **variants(self._rows),
            RopeAppend: self.rope_append,
            NormedRope: self.rope_append,
            TernaryMatmul: self._products.ternary_matmul,
            GroupScaledMatmul: self._products.ternary_matmul,
            DenseMatmul: self._products.dense_matmul,
            TernaryTable: self._products.table,
            Attention: self._attention.lower,
            WindowedAttention: vendor.windows(abilities).lower,
            Sample: samples.sample,
            RopeAttention: self._rope_attention,
            FeedForward: self._feed_forward,
            NormGatedProduct: self._gated_product,
            NormProduct: self._norm_product,
            GatedProduct: self._gated_product,
            **vendor.groups(abilities),
            **expert_variants(self._rows, abilities.local_bytes),
        }
        if passes := vendor.transform_passes:
            recurrent = RecurrentLaunches(abilities, self._products, self._rows, self._table, passes).table()
        else:
            recurrent = recurrent_variants(self._rows, self._table)
        self._table = {**self._table, **embedder_variants(self._rows, self._table, self._product), **recurrent}

    def lowering(self) -> Lowering:
        """The lowering for :class:`bitnet.core.gpu.GpuDevice`."""
        return Lowering(self._table, self._leaves_out)

    def rope_append(self, ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        (launch,) = self._rows.rope_append(ctx, op, bucket)
        pairs = {"PAIRS": ctx.program.weights[op.cos].shape[1]}  # always: modules made beforehand need it
        defines = dict(launch.kernel.defines) | pairs
        rotation = replace(launch, kernel=replace(launch.kernel, defines=tuple(defines.items())))
        return [*head_norms(ctx, op, bucket), rotation]

    def _product(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer) -> list[Launch]:
        return self._products.ternary_matmul(ctx, op, bucket, out=out)

    def _rope_attention(self, ctx: Context, group: RopeAttention, bucket: Bucket) -> list[Launch] | None:
        if bucket.tokens > DECODE_TOKENS or not self._attention.splits(ctx, group.attention, bucket):
            return None
        norms = [] if self._attention.norms_heads(ctx, group.attention) else head_norms(ctx, group.rope, bucket)
        return [*norms, *self._attention.decode(ctx, group.attention, bucket, group.rope)]

    def _feed_forward(self, ctx: Context, group: FeedForward, bucket: Bucket) -> list[Launch] | None:
        products, up, down = self._products, ctx.ternary(group.up.weights), ctx.ternary(group.down.weights)
        if bucket.tokens > 1 or not (products.quantises(up, 1, times=2) and products.quantises(down, 1)):
            return None
        return feed_forward(products.decode, ctx, group, bucket)

    def _norm_product(self, ctx: Context, group: NormProduct, bucket: Bucket) -> list[Launch] | None:
        op = group.product
        if not self._products.quantises(ctx.ternary(op.weights), bucket.tokens):
            return None
        return [self._products.decode(ctx, op, bucket, normed(ctx, group.norm), ctx.tensors[op.out])]

    def _gated_product(
        self, ctx: Context, group: GatedProduct | NormGatedProduct, bucket: Bucket
    ) -> list[Launch] | None:
        """The product of gates and ups, which also quantises its input if the group includes that, and the norm after
        it."""
        up, glu, norm = group.up, group.glu, group.norm
        w = ctx.ternary(up.weights)
        if bucket.tokens == 1 or not self._products.gates(w):
            return None
        product, width = glu_products(ctx, glu), ctx.shape(glu.gate_up)[1] // 2
        if norm is None:
            made = self._products.ternary_matmul(ctx, up, bucket, out=product, activation=glu.activation)
        elif self._products.quantises(w, bucket.tokens):
            x = normed(ctx, norm)
            made = [self._products.decode(ctx, up, bucket, x, product, activation=glu.activation)]
        else:
            return None
        weight = ctx.dense(glu.weight).data if glu.weight else product
        outs = ctx.tensors[glu.out], ctx.tensors[glu.scale], row_sums(ctx, glu.out)
        args = (ctx.step, product, weight, np.float32(glu.eps), *outs, np.int32(width))
        defines = {"NORM": int(glu.weight is not None)}
        return [*made, self._rows.launch("norm_quant", bucket.tokens, args, defines=defines)]


def _summing(ctx: Context, launch: Launch, codes: str) -> Launch:
    """A launch that also stores the sums of a tensor's rows."""
    return replace(launch, args=(*launch.args[:SUMS], row_sums(ctx, codes), *launch.args[SUMS:]))
