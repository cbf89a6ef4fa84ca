"""Attention on NVIDIA's matrix units."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.clc.attention import (
    MAX_SPLITS,
    AttentionOps,
    decode_args,
    decoding,
    defines_of,
    most_tokens,
    parts_of,
    prefill_args,
    tiles_of,
)
from bitnet.core.gpu.clc.nvidia_products import WARP
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div, head_norm_inputs, power_of_two, rope_defines
from bitnet.core.gpu.ops.scaled import norms_heads
from bitnet.core.hal import Attention, RopeAppend

TILE = 64
"""Positions of a work-group of attention_decode_mma; tokens of one of attention_prefill_mma."""
WARPS = 4
"""Warps of a work-group."""
GROUPS = 3
"""Maximum work-groups of attention_decode_mma per compute unit for which a sequence is split."""
WIDEST = 128
"""Maximum head dimension of attention_prefill_mma."""


class NvidiaAttention(AttentionOps):
    """Launches for devices whose driver builds ``nvidia/warps``."""

    def lower(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        if self.splits(ctx, op, bucket) or not takes_matrix_units(ctx, op) or op.head_dim > WIDEST:
            return super().lower(ctx, op, bucket)
        defines = tuple(defines_of(ctx, op).items())
        spec = KernelSpec("nvidia/attention_prefill_mma", "attention_prefill_mma", defines)
        grid = (op.heads, tiles_of(ctx, bucket, TILE), 1)
        return [Launch(spec, grid, (WARP * WARPS, 1, 1), prefill_args(ctx, op))]

    def splits(self, ctx: Context, op: Attention, bucket: Bucket) -> bool:
        return decoding(bucket) if takes_matrix_units(ctx, op) else super().splits(ctx, op, bucket)

    def norms_heads(self, ctx: Context, op: Attention) -> bool:
        return takes_matrix_units(ctx, op)

    def decode(self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None) -> list[Launch]:
        if not takes_matrix_units(ctx, op):
            return super().decode(ctx, op, bucket, rope)
        heads, out = bucket.tokens * op.kv_heads, ctx.tensors[op.out]
        wanted = min(ceil_div(bucket.context, TILE), GROUPS * self._units // heads, MAX_SPLITS)
        splits = power_of_two(max(1, wanted))
        parts = out if splits == 1 else parts_of(ctx, op)
        arrivals = ctx.zeroed("attention arrivals", most_tokens(ctx) * op.kv_heads * 4)
        defines = {**defines_of(ctx, op), **rope_defines(rope), "SPLITS": splits, "WARPS": WARPS}
        defines["HEAD_NORMS"] = int(rope is not None and norms_heads(rope))
        spec = KernelSpec("nvidia/attention_decode_mma", "attention_decode_mma", tuple(defines.items()))
        grid, block = (op.kv_heads, bucket.tokens, splits), (WARP * WARPS, 1, 1)
        norms = head_norm_inputs(ctx, rope, ctx.step)
        args = (*decode_args(ctx, op, rope), *norms, out, parts, arrivals, np.int32(op.heads), np.int32(op.kv_heads))
        return [Launch(spec, grid, block, args)]


def takes_matrix_units(ctx: Context, op: Attention) -> bool:
    """Whether the kernels for matrix units support the cache and the heads."""
    kv = ctx.program.kv
    assert kv is not None  # ensured by check_program
    return kv.dtype == "f16" and op.head_dim in (64, 128, 256) and op.heads // op.kv_heads <= 8
