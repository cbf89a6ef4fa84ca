"""Tiled products for many tokens on AMD's matrix units."""

from __future__ import annotations

from typing import NamedTuple

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.products import CHUNK_BYTES, MIN_LANES, Products, tiled_defines
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div, next_power_of_two
from bitnet.core.gpu.ops.products import tiled_args
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import TernaryMatmul

SIDE = 16
"""Tokens, and rows of W, of a matrix unit's tile."""
STAGE_BYTES = 2 * 144, 2 * 48
"""Bytes of local memory of a token, and of a row of W, in both buffers."""
GROUPS = (64, 128, 256)
"""Columns of a group whose scales ternary_gemm_matrix supports."""
GROUP_TILES = 4
"""Maximum tiles of a wave of 32 for scales of groups, which need a second sum in each place; with more, registers do
not suffice."""
MAX_CHUNKS = 8
"""Maximum chunks of codes that a work-item holds in registers; with more, too few waves fit a SIMD."""


class Tile(NamedTuple):
    """A work-group's shape: tiles per wave along tokens and rows of W, and waves along either."""

    TM: int
    TN: int
    WAVES_M: int
    WAVES_N: int

    @property
    def tokens(self) -> int:
        return SIDE * self.TM * self.WAVES_M

    @property
    def rows(self) -> int:
        return SIDE * self.TN * self.WAVES_N

    @property
    def local_bytes(self) -> int:
        return STAGE_BYTES[0] * self.tokens + STAGE_BYTES[1] * self.rows


TILES = {
    64: (Tile(4, 4, 2, 2), Tile(2, 4, 2, 2), Tile(2, 2, 2, 2), Tile(2, 1, 1, 4), Tile(1, 1, 1, 4)),
    32: (Tile(4, 2, 2, 4), Tile(2, 2, 2, 4), Tile(2, 1, 2, 4), Tile(2, 1, 1, 4), Tile(1, 1, 1, 4)),
}
"""Tiles by wave size, the largest first. In a wave of 32, each work-item holds twice as many sums."""


def wave_of(abilities: Abilities) -> int:
    """Work-items of a wave for the matrix unit's instructions."""
    return 64 if abilities.matrix.startswith("mfma") else 32


class AmdProducts(Products):
    """Launches for devices with MFMA or WMMA for bytes."""

    def __init__(self, abilities: Abilities) -> None:
        super().__init__(abilities)
        self._wave = wave_of(abilities)
        self._tiles = [
            tile
            for tile in TILES[self._wave]
            if tile.local_bytes <= abilities.local_bytes and self._wave * tile.WAVES_M * tile.WAVES_N <= abilities.group
        ]

    def tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, *, activation: str = "") -> Launch:
        w = ctx.ternary(op.weights)
        tile = self._tile(w, bucket.tokens)
        if tile is None:
            return super().tiled(ctx, op, bucket, out, activation=activation)
        spec = KernelSpec(
            "amd/ternary_gemm_matrix", "ternary_gemm_matrix", tuple((tiled_defines(w, op) | tile._asdict()).items())
        )
        grid = (ceil_div(w.rows, tile.rows), ceil_div(bucket.tokens, tile.tokens), 1)
        return Launch(spec, grid, (self._wave * tile.WAVES_M * tile.WAVES_N, 1, 1), tiled_args(ctx, op, out))

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        """Half as many with waves of 64: each work-group quantises the row, which would then take longer than reading
        W."""
        lanes = super()._lanes(w, times)
        half = lanes // 2
        fits = half >= MIN_LANES and ceil_div(w.row_bytes // CHUNK_BYTES, half) <= MAX_CHUNKS
        return half if self._wave == 64 and fits else lanes

    def _tile(self, w: TernaryBuffer, tokens: int) -> Tile | None:
        """The largest tile of which there are enough for all compute units, else the smallest; None if none fits, or
        the kernel does not know scales of such groups."""
        if w.group not in (None, *GROUPS):
            return None
        most = max(SIDE, next_power_of_two(tokens))
        registers = w.group is None or self._wave == 64
        fitting = [t for t in self._tiles if t.tokens <= most and (registers or t.TM * t.TN <= GROUP_TILES)]
        enough = (t for t in fitting if ceil_div(w.rows, t.rows) * ceil_div(tokens, t.tokens) >= self._units * 3 // 4)
        return next(enough, fitting[-1] if fitting else None)
