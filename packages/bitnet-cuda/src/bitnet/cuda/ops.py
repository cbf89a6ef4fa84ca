"""The operations as CUDA launches, fused where neighbours allow it; what is not here is as on every GPU.

A step of one token, or of up to 8 where blocks come in clusters, is lowered to five kernels a layer: norm and
quantisation go into the product after them, the gate's activation into the product before it, the rotation and the
cache's new entry into attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Bucket, Buffer, Context, KernelSources, Launch, Lowering
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
from bitnet.core.hal import (
    Attention,
    DenseMatmul,
    GluNormQuant,
    NormQuant,
    NormRows,
    Op,
    RopeAppend,
    Sample,
    TernaryMatmul,
)
from bitnet.cuda.attention import AttentionOps
from bitnet.cuda.head import HeadOps
from bitnet.cuda.products import DECODE_TOKENS, TENSOR_CORES, Products

ENTRY = r"^extern \"C\" __global__ void (?:IN_CLUSTER )?(?:__launch_bounds__\([^\n]*\)\s*)?(\w+)\("
SOURCES = KernelSources("bitnet.cuda", "cuda", ending=".cu", common="common.cuh", entry=ENTRY)
SAMPLE_GROUP = 1024


class CudaOps:
    """The lowering for a device of ``multiprocessors`` and a compute capability such as ``(9, 0)``."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int]) -> None:
        self._tensor_cores = capability >= TENSOR_CORES
        self._products = Products(multiprocessors, capability)
        self._attention = AttentionOps(multiprocessors, capability)
        self._head = HeadOps(multiprocessors, capability)
        self._rows = RowOps(group=256)
        self._table: Dispatch = {
            **self._rows.table(),
            NormQuant: self.norm_quant,
            GluNormQuant: self.glu_norm_quant,
            TernaryMatmul: self._products.ternary_matmul,
            DenseMatmul: self._products.dense_matmul,
            RopeAppend: self._attention.rope_append,
            Attention: self._attention.attention,
            NormRows: lambda *given: _overlapping(self._rows.norm_rows(*given)),
            Sample: lambda *given: _overlapping(RowOps(group=SAMPLE_GROUP).sample(*given)),
        }

    def lowering(self) -> Lowering:
        """What :class:`bitnet.core.gpu.GpuDevice` takes."""
        return Lowering(self.step, advance, lambda ctx: self._tensor_cores and self._head.fits(ctx))

    def step(self, ctx: Context, bucket: Bucket) -> list[Launch]:
        """The program's launches, fused where a bucket and the neighbouring operations allow it."""
        return lower(ctx, bucket, lambda ops, at: self._fused(ctx, ops, at, bucket))

    def norm_quant(self, ctx: Context, op: NormQuant, bucket: Bucket) -> list[Launch]:
        return [self._norm_quant(ctx, op, ctx.tensors[op.x], ctx.shape(op.x)[1], bucket)]

    def glu_norm_quant(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        gate_up = ctx.tensors[op.gate_up]
        weight = ctx.dense(op.weight).data if op.weight else gate_up
        outs = ctx.tensors[op.out], ctx.tensors[op.scale], row_sums(ctx, op.out)
        defines = {"DIM": ctx.shape(op.gate_up)[1] // 2, "NORM": int(op.weight is not None)}
        defines["RELU2"] = int(op.activation == "relu2")
        args = (ctx.step, gate_up, weight, np.float32(op.eps), *outs)
        return [replace(self._rows.launch("glu_norm_quant", bucket.tokens, args, defines=defines), overlaps=True)]

    def _fused(self, ctx: Context, ops: Sequence[Op], at: int, bucket: Bucket) -> tuple[list[Launch], int]:
        """Launches for the operations from ``at`` on, and how many operations they do."""
        alone = self._table[type(ops[at])]
        if ctx.program.keep or not self._tensor_cores:
            return alone(ctx, ops[at], bucket), 1
        head = self._head.at(ctx, ops[at:], bucket)
        if head is not None:
            return self._head.launches(ctx, head, bucket), head.ops
        match ops[at : at + 2]:
            case [RopeAppend() as rope, Attention() as one] if rotates_for(rope, one, ops[at + 2 :]):
                if bucket.apart and bucket.tokens <= DECODE_TOKENS and self._attention.splits(ctx, one, bucket):
                    return [self._attention.decode(ctx, one, bucket, rope)], 2
        decodes, decode = self._products.quantises, self._products.decode
        match ops[at : at + 4]:
            case [NormQuant() as n, TernaryMatmul() as up, GluNormQuant() as glu, TernaryMatmul() as down] if (
                feeds(n, up, ops[at + 2 :])
                and feeds(glu, down, ops[at + 4 :])
                and self._gates(ctx, up, glu, ops[at + 3 :], bucket)
                and decodes(ctx.ternary(up.weights), bucket)
                and decodes(ctx.ternary(down.weights), bucket)
            ):
                return feed_forward(decode, ctx, (n, up, glu, down), bucket), 4
            case [NormQuant() as n, TernaryMatmul() as op, *_] if feeds(n, op, ops[at + 2 :]):
                if decodes(ctx.ternary(op.weights), bucket):
                    return [decode(ctx, op, bucket, normed(ctx, n), ctx.tensors[op.out])], 2
            case [TernaryMatmul() as up, GluNormQuant() as glu, *_] if bucket.tokens > 1:
                if self._gates(ctx, up, glu, ops[at + 2 :], bucket):
                    return self._gated(ctx, up, glu, bucket), 2
        return alone(ctx, ops[at], bucket), 1

    def _gates(self, ctx: Context, up: TernaryMatmul, glu: GluNormQuant, later: Sequence[Op], bucket: Bucket) -> bool:
        """Whether the product ``up`` can apply ``glu``'s activation: no one else reads it, and its kernel knows how."""
        w = ctx.ternary(up.weights)
        able = self._products.decodes(w, bucket) or w.cols % 16 == 0
        return able and up.out == glu.gate_up and not up.add and not read_again(up.out, later)

    def _gated(self, ctx: Context, up: TernaryMatmul, glu: GluNormQuant, bucket: Bucket) -> list[Launch]:
        width = ctx.shape(glu.gate_up)[1] // 2
        product = glu_products(ctx, glu)
        x = Source(ctx.tensors[up.x], scale=ctx.tensors[up.scale])
        if self._products.decodes(ctx.ternary(up.weights), bucket):
            launch = self._products.decode(ctx, up, bucket, x, product, activation=glu.activation)
        else:
            launch = self._products.tiled(ctx, up, bucket, product, activation=glu.activation)
        return [*self._products.row_sums(ctx, up, bucket), launch, self._norm_quant(ctx, glu, product, width, bucket)]

    def _norm_quant(self, ctx: Context, op: NormQuant | GluNormQuant, x: Buffer, width: int, bucket: Bucket) -> Launch:
        weight = ctx.dense(op.weight).data if op.weight else x
        args = (
            ctx.step,
            x,
            weight,
            np.float32(op.eps),
            ctx.tensors[op.out],
            ctx.tensors[op.scale],
            row_sums(ctx, op.out),
        )
        defines = {"DIM": width, "NORM": int(op.weight is not None)}
        return replace(self._rows.launch("norm_quant", bucket.tokens, args, defines=defines), overlaps=True)


def _overlapping(launches: list[Launch]) -> list[Launch]:
    return [replace(launch, overlaps=True) for launch in launches]
