"""Differences from the OpenCL C lowering, from which Metal's kernels are ported: simdgroups of 32, and memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitnet.core.gpu.clc.attention import QUERIES, TILE_GROUP, AttentionOps, defines_of, prefill_args
from bitnet.core.gpu.clc.products import DECODE_TOKENS, Products, tiled_defines
from bitnet.core.gpu.clc.vendors import Vendor
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.ops.products import ProductInput, tiled_args
from bitnet.core.gpu.ops.scaled import group_product
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Attention, DenseMatmul, TernaryMatmul
from bitnet.metal.head import WIDTH, HeadOps, fits

MATRIX_HEAD = 128
"""Maximum head dimension for attention on matrices, whose sums stay in registers and whose tiles fit 32 KiB."""
TILED_HEAD = 92
"""Maximum head dimension for which attention's tiles fit 32 KiB with any cache type."""
TILE_M, TILE_N, TILE_THREADS = 32, 64, 128
"""Rows of x and of W of a tile of matrices, and its threadgroup's threads; their source has the same numbers."""
TERNARY_COLS = (1 << 16) - 1
"""Maximum columns: sums of int8 times codes of at most 2 then stay below 2²⁴, where floats add exactly."""


class MetalProducts(Products):
    """The products, whose rows simdgroups share."""

    def quantises(self, w: TernaryBuffer, tokens: int, *, times: int = 1) -> bool:
        fits = w.group is None and 8 * w.row_bytes + self._group // 4 <= self._local
        return fits and super().quantises(w, tokens, times=times)

    def _groups(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, source: ProductInput, out: Buffer, *, activation: str
    ) -> Launch:
        (launch,) = group_product(ctx, op, bucket, out)
        return launch

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        return min(super()._lanes(w, times), WIDTH)


class MatrixProducts(MetalProducts):
    """Products of many tokens, or with many rows, on simdgroup matrices."""

    def tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, *, activation: str = "") -> Launch:
        w = ctx.ternary(op.weights)
        if w.cols > TERNARY_COLS or w.group is not None:
            return super().tiled(ctx, op, bucket, out, activation=activation)
        args = tiled_args(ctx, op, out)
        return _tiles("ternary_gemm_matrix", bucket.tokens, w.rows, args, **tiled_defines(w, op))

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        """The plain kernel reads a head once for up to ``DECODE_TOKENS`` rows too, with the compact head's sums."""
        if bucket.rows <= DECODE_TOKENS:
            return super().dense_matmul(ctx, op, bucket)
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        args = (ctx.step, ctx.tensors[op.x], weight.data, ctx.tensors[op.out], np.int32(cols), np.int32(rows))
        return [_tiles("dense_matmul_matrix", bucket.rows, rows, args, WEIGHT_F16=int(weight.dtype == "f16"))]


def _tiles(kernel: str, m: int, n: int, args: tuple[Arg, ...], **defines: int) -> Launch:
    """The launch of a kernel on matrices, for ``m`` rows of x and ``n`` of W."""
    spec = KernelSpec(kernel, kernel, tuple(defines.items()))
    return Launch(spec, (ceil_div(n, TILE_N), ceil_div(m, TILE_M), 1), (TILE_THREADS, 1, 1), args)


class MetalAttention(AttentionOps):
    """Attention, whose tiles take the memory that Metal's kernel has them take."""

    def _tiles(self, op: Attention) -> bool:
        return op.head_dim <= TILED_HEAD and self._group >= TILE_GROUP and super()._tiles(op)


class MatrixAttention(MetalAttention):
    """Attention for many tokens on simdgroup matrices."""

    def lower(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        share = op.heads // op.kv_heads
        fits = ctx.cache.dtype != "i8" and op.head_dim <= MATRIX_HEAD and op.head_dim % 8 == 0 and share <= QUERIES
        if not fits or self.splits(ctx, op, bucket):
            return super().lower(ctx, op, bucket)
        defines = defines_of(ctx, op) | ({"WINDOW": op.window} if op.window else {})
        spec = KernelSpec("attention_matrix", "attention_matrix", tuple(defines.items()))
        grid = (op.kv_heads, ceil_div(bucket.tokens, QUERIES // share), 1)
        return [Launch(spec, grid, (TILE_THREADS, 1, 1), prefill_args(ctx, op))]


PLAIN = Vendor(
    products=MetalProducts,
    attention=MetalAttention,
    windows=MetalAttention,
    groups=lambda abilities: HeadOps(abilities).table(),
    leaves_out=fits,
    transform_passes=0,
)
"""The kernels that every device runs, as the family's lowering takes them."""
MATRICES = replace(
    PLAIN,
    trial=KernelSpec("dense_matmul_matrix", "dense_matmul_matrix", (("WEIGHT_F16", 1),)),
    products=MatrixProducts,
    attention=MatrixAttention,
    windows=MatrixAttention,
)
"""The same with simdgroup matrices: of halves, which the self-check tries, and of floats, which the trial has."""
