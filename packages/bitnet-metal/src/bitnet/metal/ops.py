"""What differs from the OpenCL C family, whose kernels Metal's are ports of: simdgroups of 32, and memory."""

from __future__ import annotations

from bitnet.core.gpu.clc.attention import TILE_GROUP, AttentionOps
from bitnet.core.gpu.clc.products import Products
from bitnet.core.gpu.clc.vendors import Vendor
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Attention
from bitnet.metal.head import WIDTH, HeadOps, fits

TILED_HEAD = 92
"""Dimensions of a head at most for which tiles of attention fit 32 KiB, whatever the cache's type."""


class MetalProducts(Products):
    """The products, whose rows simdgroups share."""

    def quantises(self, w: TernaryBuffer, tokens: int, *, times: int = 1) -> bool:
        fits = 8 * w.row_bytes + self._group // 4 <= self._local
        return fits and super().quantises(w, tokens, times=times)

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        return min(super()._lanes(w, times), WIDTH)


class MetalAttention(AttentionOps):
    """Attention, whose tiles take the memory that Metal's kernel has them take."""

    def _tiles(self, op: Attention) -> bool:
        return op.head_dim <= TILED_HEAD and self._group >= TILE_GROUP and super()._tiles(op)


METAL = Vendor(
    products=MetalProducts,
    attention=MetalAttention,
    groups=lambda abilities: HeadOps(abilities).table(),
    leaves_out=fits,
)
"""The kernels, as the family's lowering takes them."""
