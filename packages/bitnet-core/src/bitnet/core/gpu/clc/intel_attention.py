"""Attention for many tokens on Intel's XMX."""

from __future__ import annotations

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.attention import AttentionOps, defines_of, prefill_args
from bitnet.core.gpu.clc.intel_products import WIDTHS, by_sub_groups
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.hal import Attention

BLOCKS, PART = 2, 16
"""Rows of a tile of attention_prefill_xmx for each work-item of a sub-group, and dimensions and positions of a
sub-group; its source has the same numbers."""
DIMS = 64, 128
"""Supported head dimensions: rows divide evenly among sub-groups, and tiles fit local memory."""


class IntelAttention(AttentionOps):
    """Launches for devices with XMX."""

    def __init__(self, abilities: Abilities) -> None:
        super().__init__(abilities)
        self._abilities, self._width = abilities, WIDTHS[abilities.matrix]
        self._queries = BLOCKS * self._width

    def lower(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        if self.splits(ctx, op, bucket) or not self._takes(ctx, op):
            return super().lower(ctx, op, bucket)
        defines = by_sub_groups(self._abilities.matrix) | defines_of(ctx, op)
        spec = KernelSpec("intel/attention_prefill_xmx", "attention_prefill_xmx", tuple(defines.items()))
        grid = (op.kv_heads, ceil_div(bucket.tokens, self._queries // (op.heads // op.kv_heads)), 1)
        return [Launch(spec, grid, (self._items(op), 1, 1), prefill_args(ctx, op))]

    def _items(self, op: Attention) -> int:
        """Work-items of a work-group."""
        return op.head_dim // PART * self._width

    def _takes(self, ctx: Context, op: Attention) -> bool:
        """Whether the kernel supports this cache and these heads, and its tiles fit a work-group."""
        has = self._abilities
        local = self._queries * (2 * 2 * op.head_dim + 4 * (op.head_dim + 1) + 4 + 4)
        cache = ctx.cache.dtype == "f16" and ctx.cache.block_size % PART == 0
        heads = op.head_dim in DIMS and op.heads // op.kv_heads <= self._queries
        return has.f16 and cache and heads and self._items(op) <= has.group and local <= has.local_bytes
