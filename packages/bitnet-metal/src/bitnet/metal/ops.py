"""What differs from the OpenCL C family, whose kernels Metal's are ports of: simdgroups of 32, and memory."""

from __future__ import annotations

from dataclasses import replace

from bitnet.core.gpu.clc.attention import TILE_GROUP, AttentionOps
from bitnet.core.gpu.clc.products import Products, tiled_args, tiled_defines
from bitnet.core.gpu.clc.vendors import Vendor
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.driver import Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Attention, TernaryMatmul
from bitnet.metal.head import WIDTH, HeadOps, fits

TILED_HEAD = 92
"""Dimensions of a head at most for which tiles of attention fit 32 KiB, whatever the cache's type."""
MATRIX = "ternary_gemm_matrix"
TILE_TOKENS, TILE_ROWS, TILE_THREADS = 32, 64, 128
"""Tokens and rows of W of a tile of it, and a threadgroup's threads; its source has the same numbers."""
MATRIX_COLS = (1 << 16) - 1
"""Columns at most: its sums of int8 times codes of at most 2 stay below 2²⁴, where those of floats are exact."""


class MetalProducts(Products):
    """The products, whose rows simdgroups share."""

    def quantises(self, w: TernaryBuffer, tokens: int, *, times: int = 1) -> bool:
        fits = 8 * w.row_bytes + self._group // 4 <= self._local
        return fits and super().quantises(w, tokens, times=times)

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        return min(super()._lanes(w, times), WIDTH)


class MatrixProducts(MetalProducts):
    """The products of many tokens on matrices of a simdgroup."""

    def tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, *, activation: str = "") -> Launch:
        w = ctx.ternary(op.weights)
        if w.cols > MATRIX_COLS:
            return super().tiled(ctx, op, bucket, out, activation=activation)
        spec = KernelSpec(MATRIX, MATRIX, tuple(tiled_defines(w, op).items()))
        grid = (ceil_div(w.rows, TILE_ROWS), ceil_div(bucket.tokens, TILE_TOKENS), 1)
        return Launch(spec, grid, (TILE_THREADS, 1, 1), tiled_args(ctx, op, out))


class MetalAttention(AttentionOps):
    """Attention, whose tiles take the memory that Metal's kernel has them take."""

    def _tiles(self, op: Attention) -> bool:
        return op.head_dim <= TILED_HEAD and self._group >= TILE_GROUP and super()._tiles(op)


PLAIN = Vendor(
    products=MetalProducts,
    attention=MetalAttention,
    groups=lambda abilities: HeadOps(abilities).table(),
    leaves_out=fits,
)
"""The kernels that every device runs, as the family's lowering takes them."""
MATRICES = replace(PLAIN, products=MatrixProducts)
"""The same with matrices of a simdgroup."""
