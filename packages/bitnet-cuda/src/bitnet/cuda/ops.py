"""Lowers operations to CUDA launches, fused if neighbours allow it; other operations are lowered as on every GPU.

A step of one token, or of up to 8 with thread block clusters, takes five kernels per layer: norm and quantisation are
fused into the next product, the gate's activation into the previous product, and rotation and KV cache update into
attention.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Bucket, Buffer, Context, Dispatch, KernelSources, Launch, Lowering
from bitnet.core.gpu.fusions import Choice, GatedProduct, GatedTransform, NormChoice, NormHead, RopeAttention
from bitnet.core.gpu.ops import RowOps, activation_defines, ceil_div
from bitnet.core.gpu.ops.logprobs import history, logprobs
from bitnet.core.gpu.ops.products import ProductInput, fused_products, glu_products, row_sums
from bitnet.core.gpu.ops.scaled import norms_heads
from bitnet.core.gpu.ops.variants import (
    Gelu,
    GroupScaledMatmul,
    NormedRope,
    PartialRope,
    TernaryTable,
    WindowedAttention,
    embedder_variants,
    variants,
)
from bitnet.core.hal import (
    Attention,
    DenseMatmul,
    GluNormQuant,
    Logprobs,
    NormQuant,
    NormRows,
    RopeAppend,
    Sample,
    TernaryMatmul,
)
from bitnet.cuda.attention import AttentionOps
from bitnet.cuda.experts import ExpertLaunches
from bitnet.cuda.head import HeadOps
from bitnet.cuda.planes import transforms
from bitnet.cuda.products import CLUSTERS, DECODE_TOKENS, FEW_TOKENS, MAX_CLUSTER, TENSOR_CORES, Products
from bitnet.cuda.recurrent import RecurrentLaunches
from bitnet.cuda.tables import TableOps
from bitnet.cuda.weights import ternary

ENTRY = r"^extern \"C\" __global__ void (?:IN_CLUSTER )?(?:__launch_bounds__\([^\n]*\)\s*)?(\w+)\("
SOURCES = KernelSources("bitnet.cuda", "cuda", ending=".cu", common="common.cuh", entry=ENTRY)
SAMPLE_GROUP = 1024
"""Threads of a block of sample."""
FEW_NORM_GROUP = 512
"""Threads of a block of norm_quant in steps of :data:`FEW_TOKENS`."""
MAX_HELD = 5
"""Maximum vectors of four logits that a thread of sample keeps in registers."""


class CudaOps:
    """The lowering for a device with ``multiprocessors`` and a compute capability such as ``(9, 0)``."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int]) -> None:
        self._tensor_cores = capability >= TENSOR_CORES
        self._products = Products(multiprocessors, capability)
        self._attention = AttentionOps(multiprocessors, capability)
        self._head = HeadOps(multiprocessors, capability)
        self._rows, self._few_rows = RowOps(group=256), RowOps(group=FEW_NORM_GROUP)
        self._sample_cluster = MAX_CLUSTER if capability >= CLUSTERS else 1
        groups: Dispatch = {
            NormChoice: self._choice,
            Choice: self._choice,
            NormHead: self._products.norm_head,
            RopeAttention: self._rope_attention,
            GatedProduct: self._gated_product,
            GatedTransform: self._gated_transform,
            **fused_products(self._products.decode, self._products.quantises),
        }
        self._table: Dispatch = {
            **self._rows.table(),
            **variants(self._rows),
            NormQuant: self.norm_quant,
            GluNormQuant: self.glu_norm_quant,
            TernaryMatmul: self._products.ternary_matmul,
            GroupScaledMatmul: self._products.ternary_matmul,
            DenseMatmul: self._products.dense_matmul,
            RopeAppend: self._attention.rope_append,
            NormedRope: self._attention.rope_append,
            Attention: self._attention.attention,
            WindowedAttention: self._attention.attention,
            NormRows: lambda *given: _overlapping(self._rows.norm_rows(*given)),
            Sample: self.sample,
            Logprobs: self._logprobs,
            TernaryTable: TableOps(multiprocessors, capability).lower,
            PartialRope: self._attention.rope_append,
            **ExpertLaunches(capability).table(),
            **(groups if self._tensor_cores else {}),
        }
        self._table = {
            **self._table,
            **embedder_variants(self._rows, self._table, self._products.ternary_matmul),
            Gelu: self.glu_norm_quant,  # which is fused, too
        }
        self._recurrent = RecurrentLaunches(multiprocessors, capability, self._products, self._rows, self._table)
        self._table = {**self._table, **self._recurrent.table()}

    def lowering(self) -> Lowering:
        """The lowering for :class:`bitnet.core.gpu.GpuDevice`."""
        return Lowering(
            self._table,
            lambda ctx: self._tensor_cores and self._head.fits(ctx),
            lambda _, bucket: bucket.rows <= DECODE_TOKENS,
        )

    def sample(self, ctx: Context, op: Sample, bucket: Bucket, *gate: Buffer) -> list[Launch]:
        """One cluster per row if the GPU has clusters, else one block. With a gate, only for undecided rows."""
        *before, last = RowOps(group=SAMPLE_GROUP).sample(ctx, op, bucket)
        tells = op is ctx.program.ops[-1] and bucket.logprobs and self._tells(ctx, bucket)
        variant = {
            "CLUSTER": self._sample_cluster,
            "HELD": self._held(ctx, op),
            "GATED": len(gate),
            "TELLS": int(tells),
        }
        spec = replace(last.kernel, defines=(*last.kernel.defines, *variant.items()))
        more = (*gate, *((history(ctx),) if tells else ()))
        args, grid = (*last.args[:-1], *more, last.args[-1]), (bucket.rows * self._sample_cluster, 1, 1)
        return [*before, replace(last, kernel=spec, grid=grid, args=args, overlaps=True)]

    def _held(self, ctx: Context, op: Sample) -> int:
        """Vectors of four logits that each thread of ``sample`` keeps; 0 where it cannot have all of its own."""
        vocabulary = ctx.shape(op.logits)[1]
        held = ceil_div(vocabulary, 4 * SAMPLE_GROUP * self._sample_cluster)
        return held if vocabulary % 4 == 0 and held <= MAX_HELD else 0

    def _tells(self, ctx: Context, bucket: Bucket) -> bool:
        """Whether ``sample`` tells log-probabilities, too: not of adjusted logits, nor where some steps have those."""
        last = ctx.program.ops[-1]
        able = self._sample_cluster > 1 and not (bucket.adjusted or ctx.program.deterministic)
        return able and isinstance(last, Sample) and self._held(ctx, last) > 0

    def _logprobs(self, ctx: Context, op: Sample, bucket: Bucket) -> list[Launch]:
        return [] if self._tells(ctx, bucket) else logprobs(ctx, bucket, self._rows.group)

    def norm_quant(self, ctx: Context, op: NormQuant, bucket: Bucket) -> list[Launch]:
        return [self._norm_quant(ctx, op, ctx.tensors[op.x], ctx.shape(op.x)[1], bucket)]

    def glu_norm_quant(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        gate_up = ctx.tensors[op.gate_up]
        weight = ctx.dense(op.weight).data if op.weight else gate_up
        outs = ctx.tensors[op.out], ctx.tensors[op.scale], row_sums(ctx, op.out)
        defines = {"DIM": ctx.shape(op.gate_up)[1] // 2, "NORM": int(op.weight is not None)}
        defines |= activation_defines(op.activation) | {"BOUND": int(self._products.bounded(ctx, op.out))}
        args = (ctx.step, gate_up, weight, np.float32(op.eps), *outs)
        return [replace(self._rows.launch("glu_norm_quant", bucket.tokens, args, defines=defines), overlaps=True)]

    def _rope_attention(self, ctx: Context, group: RopeAttention, bucket: Bucket) -> list[Launch] | None:
        most = DECODE_TOKENS if norms_heads(group.rope) else FEW_TOKENS[-1]
        able = bucket.tokens <= most and self._attention.splits(ctx, group.attention, bucket)
        return [self._attention.decode(ctx, group.attention, bucket, group.rope)] if able else None

    def _choice(self, ctx: Context, group: Choice | NormChoice, bucket: Bucket) -> list[Launch] | None:
        """The compact head. If filters leave rows undecided, all logits are then computed and sampled from (decision
        0026)."""
        made = self._head.launches(ctx, group, bucket)
        if made is None or not bucket.filtered:
            return made
        gate, halves, scales = self._head.undecided(ctx, group.dense.weight)
        product = self._products.dense_halves(ctx, group.dense, bucket, halves, scales, gate)
        return [*made, product, *self.sample(ctx, group.sample, bucket, gate)]

    def _gated_product(self, ctx: Context, group: GatedProduct, bucket: Bucket) -> list[Launch] | None:
        if bucket.tokens == 1 or (made := self._activated(ctx, group, bucket)) is None:
            return None
        glu, width = group.glu, ctx.shape(group.glu.gate_up)[1] // 2
        return [*made, self._norm_quant(ctx, glu, glu_products(ctx, glu), width, bucket)]

    def _gated_transform(self, ctx: Context, group: GatedTransform, bucket: Bucket) -> list[Launch] | None:
        glu = group.glu
        if not transforms(ctx, glu) or (made := self._activated(ctx, group, bucket)) is None:
            return None
        return [*made, self._recurrent.transform(ctx, glu, bucket, glu_products(ctx, glu))]

    def _activated(self, ctx: Context, group: GatedProduct, bucket: Bucket) -> list[Launch] | None:
        """The product of gates and ups, activated: its result is in ``glu_products``."""
        up, glu = group.up, group.glu
        w, product = ternary(ctx, up.weights), glu_products(ctx, glu)
        if self._products.decodes(w, bucket):
            x = ProductInput(ctx.tensors[up.x], scale=ctx.tensors[up.scale])
            launch = self._products.decode(ctx, up, bucket, x, product, activation=glu.activation)
        elif self._products.tiles(w):
            launch = self._products.tiled(ctx, up, bucket, product, activation=glu.activation)
        else:
            return None
        return [*self._products.row_sums(ctx, up, bucket), launch]

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
        bound = int(self._products.bounded(ctx, op.out))
        defines = {"DIM": width, "NORM": int(op.weight is not None), "BOUND": bound}
        rows = self._few_rows if bucket.tokens in FEW_TOKENS else self._rows
        return replace(rows.launch("norm_quant", bucket.tokens, args, defines=defines), overlaps=True)


def _overlapping(launches: list[Launch]) -> list[Launch]:
    return [replace(launch, overlaps=True) for launch in launches]
