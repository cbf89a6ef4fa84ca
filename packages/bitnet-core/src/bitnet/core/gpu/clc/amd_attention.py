"""Attention for many tokens on AMD's matrix units."""

from __future__ import annotations

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.amd_products import SIDE, wave_of
from bitnet.core.gpu.clc.attention import AttentionOps, defines_of, prefill_args, tiles_of
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import KernelSpec, Launch
from bitnet.core.hal import Attention

WAVES, KEYS, WIDEST = 4, 32, 128
"""Waves of a work-group, positions of its tile, and dimensions of a head at most; the source has the first two too."""


class AmdAttention(AttentionOps):
    """Launches for devices whose driver builds ``amd/waves``."""

    def __init__(self, abilities: Abilities) -> None:
        super().__init__(abilities)
        self._items = wave_of(abilities) * WAVES
        self._able = self._items <= abilities.group

    def lower(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        if self.splits(ctx, op, bucket) or not self._takes(ctx, op):
            return super().lower(ctx, op, bucket)
        defines = tuple(defines_of(ctx, op).items())
        spec = KernelSpec("amd/attention_prefill_matrix", "attention_prefill_matrix", defines)
        grid = (op.heads, tiles_of(ctx, bucket, SIDE * WAVES), 1)
        return [Launch(spec, grid, (self._items, 1, 1), prefill_args(ctx, op))]

    def _takes(self, ctx: Context, op: Attention) -> bool:
        """Whether the kernel for many tokens supports the cache and the heads, and its tiles fit a work-group."""
        kv = ctx.program.kv
        assert kv is not None  # ensured by check_program
        shaped = kv.dtype == "f16" and op.head_dim % SIDE == 0 and op.head_dim <= WIDEST
        halves = KEYS * (op.head_dim + 8) + op.head_dim * (KEYS + 8)
        return self._able and shaped and 2 * halves <= self._local
