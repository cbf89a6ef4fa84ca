"""Products on Intel's GPUs: tiled by sub-groups for many tokens, with XMX if available."""

from __future__ import annotations

from collections.abc import Mapping

from bitnet.core.gpu.clc.abilities import Abilities, Matrix
from bitnet.core.gpu.clc.products import CHUNK_BYTES, DECODE_TOKENS, Products, tiled_defines
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div, power_of_two
from bitnet.core.gpu.ops.products import tiled_args
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import TernaryMatmul

FILE = "intel/ternary_gemm_sg"
WIDTHS: Mapping[Matrix, int] = {"intel": 8, "xmx8": 8, "xmx16": 16}
"""Work-items of a sub-group of ternary_gemm_sg, by the device's matrix products."""
SUB_GROUPS, BLOCKS, BLOCK_TOKENS, TILE_ITEMS = 4, 2, 8, 64
"""Sub-groups of a work-group of ternary_gemm_sg, and blocks of rows of each; tokens of a block, and the work-items of
activation_tiles; the source has the same numbers."""
GATE_LANES = 16
"""Minimum work-items that share rows of gate and up. Fewer would need more registers than processors have that multiply
byte by byte."""

GROUP_CHUNKS = 8
"""Maximum chunks of codes that a work-item of a fused product with scales of groups holds; half as many where bytes are
multiplied one by one."""


def by_sub_groups(matrix: Matrix) -> dict[str, int]:
    """Preprocessor constants of the kernels in ``intel/``, by the device's kind of matrix products."""
    return {"XMX": int(matrix != "intel"), "SG": WIDTHS[matrix]}


def trial(matrix: Matrix) -> KernelSpec:
    """A kernel that needs every compiler feature that the others need."""
    return KernelSpec("intel/sub_groups", "sub_groups", tuple(by_sub_groups(matrix).items()))


class IntelProducts(Products):
    """Launches for devices whose driver builds ``intel/ternary_gemm_sg``."""

    def __init__(self, abilities: Abilities) -> None:
        super().__init__(abilities)
        self._units = max(
            1, self._units // 2
        )  # a vector engine has as many work-items as half a compute unit of other vendors
        self._matrix = abilities.matrix
        self._group_chunks = GROUP_CHUNKS if abilities.dot4 != "none" else GROUP_CHUNKS // 2

    def ternary_matmul(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, *, out: Buffer | None = None, activation: str = ""
    ) -> list[Launch]:
        w = ctx.ternary(op.weights)
        if bucket.tokens <= DECODE_TOKENS or w.group is not None:
            return super().ternary_matmul(ctx, op, bucket, out=out, activation=activation)
        tile = BLOCK_TOKENS * (2 if self._matrix == "intel" else 4)
        blocks = ceil_div(bucket.tokens, tile) * tile // BLOCK_TOKENS
        row = 4 * w.row_bytes
        most = ceil_div(ctx.program.limits.max_tokens, tile) * tile
        tiles = ctx.scratch("activation tiles", most * row)
        defines = tuple((by_sub_groups(self._matrix) | tiled_defines(w, op)).items())
        tiling, product = (KernelSpec(FILE, entry, defines) for entry in ("activation_tiles", "ternary_gemm_sg"))
        width = WIDTHS[self._matrix]
        grid = (ceil_div(w.rows, SUB_GROUPS * BLOCKS * width), ceil_div(bucket.tokens, tile), 1)
        step, _, *args = tiled_args(ctx, op, out or ctx.tensors[op.out])
        return [
            *self._row_sums(ctx, op, bucket),
            Launch(tiling, (row // 32, blocks, 1), (TILE_ITEMS, 1, 1), (step, ctx.tensors[op.x], tiles)),
            Launch(product, grid, (SUB_GROUPS * width, 1, 1), (step, tiles, *args)),
        ]

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        lanes = super()._lanes(w, times)
        if times == 1:
            return lanes
        return max(lanes, min(GATE_LANES, self._group, power_of_two(w.row_bytes // CHUNK_BYTES)))
