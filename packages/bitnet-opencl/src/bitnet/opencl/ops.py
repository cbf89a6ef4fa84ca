"""Grids and tuning: the matrix products and attention as OpenCL launches; the rest is as on every GPU."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Bucket, Context, KernelSources, KernelSpec, Launch, Size3
from bitnet.core.gpu.ops import RowOps, ceil_div, kv_defines, lowering, positions
from bitnet.core.hal import Attention, DenseMatmul, TernaryMatmul

SOURCES = KernelSources("bitnet.opencl", "opencl", ending=".cl", common="common.clh", entry=r"^kernel void (\w+)\(")
ROWS = RowOps(group=128)
GEMV_ROWS = 4
GEMV_TOKENS = 8
"""More tokens than this take the tiled product."""
LANES, TILE_M, TILE_N, TILE_GROUP = 32, 32, 64, 256
"""As the kernel sources have them."""


def ternary_matmul(ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
    """A product of few tokens reads each weight once; one of many goes by tiles."""
    w, out = ctx.ternary(op.weights), ctx.tensors[op.out]
    args = (ctx.step, ctx.tensors[op.x], ctx.tensors[op.scale], w.codes, w.scales, out, np.int32(w.rows))
    shape = (("COLS", w.cols), ("ROW_BYTES", w.row_bytes), ("ADD", int(op.add)))
    defines = (*shape, ("ROWS", GEMV_ROWS), ("TOKENS", min(bucket.tokens, GEMV_TOKENS)))
    if bucket.tokens <= GEMV_TOKENS:
        grid: Size3 = (ceil_div(w.rows, GEMV_ROWS), 1, 1)
        return [Launch(KernelSpec("ternary_matmul", "ternary_gemv", defines), grid, (LANES, GEMV_ROWS, 1), args)]
    grid = (ceil_div(w.rows, TILE_N), ceil_div(bucket.tokens, TILE_M), 1)
    return [Launch(KernelSpec("ternary_matmul", "ternary_gemm", defines), grid, (TILE_GROUP, 1, 1), args)]


def dense_matmul(ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
    """Each weight row is read once for up to ``GEMV_TOKENS`` rows of x."""
    weight = ctx.dense(op.weight)
    rows, cols = weight.shape
    tokens = min(bucket.rows, GEMV_TOKENS)
    defines = (("WEIGHT_F16", int(weight.dtype == "f16")), ("ROWS", GEMV_ROWS), ("TOKENS", tokens))
    args = (ctx.step, ctx.tensors[op.x], weight.data, ctx.tensors[op.out], np.int32(cols), np.int32(rows))
    grid = (ceil_div(rows, GEMV_ROWS), ceil_div(bucket.rows, tokens), 1)
    return [Launch(KernelSpec("dense_matmul", "dense_matmul", defines), grid, (LANES, GEMV_ROWS, 1), args)]


def attention(ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
    """A work-group for each token and head."""
    cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
    sizes = np.int32(op.heads), np.int32(op.kv_heads)
    args = (*positions(ctx), ctx.tensors[op.qkv], *cache, ctx.tensors[op.out], *sizes)
    spec = KernelSpec("attention", "attention", (("WG", ROWS.group), *kv_defines(ctx, op).items()))
    return [Launch(spec, (bucket.tokens, op.heads, 1), (ROWS.group, 1, 1), args)]


LOWERING = lowering({**ROWS.table(), TernaryMatmul: ternary_matmul, DenseMatmul: dense_matmul, Attention: attention})
