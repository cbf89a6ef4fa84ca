"""Attention in OpenCL C: split over positions for few tokens, tiled for many, or plain if neither fits."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.products import MAX_GROUP
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops import attention_inputs, ceil_div, kv_defines, positions, power_of_two, rope_defines
from bitnet.core.hal import Attention, RopeAppend

DECODE_TOKENS = 8
"""Maximum tokens for which positions are split over work-groups, unless each token is a sequence of its own."""
QUERIES, KEYS, TILE_GROUP = 32, 32, 256
"""Query rows and positions of a tile of attention_prefill, and its work-items; the source has the same numbers."""
SPLIT = 32
"""Minimum positions per work-group of split attention."""
MAX_SPLITS = 64
"""Maximum parts that a sequence's positions are split into."""
GROUPS = 3
"""Maximum work-groups of attention_decode per compute unit for one sequence."""
DECODE_GROUP, REDUCERS = 128, 8
"""Work-items of attention_decode, and work-items that share a head's softmax; the source has the same numbers."""
ATTENTION_PART = 4
"""Floats per head and part of the positions besides the head's dimensions: a maximum, a sum, and padding."""


class AttentionOps:
    """Launches for any device. Classes for matrix units derive from this one."""

    def __init__(self, abilities: Abilities) -> None:
        self._units, self._local = abilities.compute_units, abilities.local_bytes
        self._group = power_of_two(min(abilities.group, MAX_GROUP))

    def lower(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        """Launches of the unfused operation."""
        if self.splits(ctx, op, bucket):
            return self.decode(ctx, op, bucket, rope=None)
        args, defines = prefill_args(ctx, op), defines_of(ctx, op) | _window(op)
        if self._tiles(op):
            tokens = QUERIES // (op.heads // op.kv_heads)
            spec = KernelSpec("attention_prefill", "attention_prefill", tuple(defines.items()))
            return [Launch(spec, (op.kv_heads, ceil_div(bucket.tokens, tokens), 1), (TILE_GROUP, 1, 1), args)]
        spec = KernelSpec("attention", "attention", (("WG", self._group), *defines.items()))
        return [Launch(spec, (bucket.tokens, op.heads, 1), (self._group, 1, 1), args)]

    def splits(self, ctx: Context, op: Attention, bucket: Bucket) -> bool:
        """Whether :meth:`decode` suits a step of this size, and its data fits a work-group."""
        share, group = op.heads // op.kv_heads, min(self._group, DECODE_GROUP)
        floats = share * (op.head_dim + 4 * group + 2 * group + REDUCERS + 1) + 2 * group
        floats += group if ctx.cache.dtype == "i8" else 0
        fits = op.head_dim <= 4 * group and share * REDUCERS <= group and 4 * floats <= self._local
        return decoding(bucket) and fits

    def norms_heads(self, ctx: Context, op: Attention) -> bool:
        """Whether :meth:`decode` norms heads before it rotates them."""
        return False

    def decode(self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None) -> list[Launch]:
        """Attention split over the positions; with ``rope``, fused with the rotation and the KV cache update."""
        heads, out = bucket.tokens * op.kv_heads, ctx.tensors[op.out]
        splits = max(1, min(ceil_div(bucket.context, SPLIT), GROUPS * self._units // heads, MAX_SPLITS))
        group = min(self._group, DECODE_GROUP)
        defines = {"WG": group, **defines_of(ctx, op), **_window(op), **rope_defines(rope)}
        parts = out if splits == 1 else parts_of(ctx, op)
        args = (*decode_args(ctx, op, rope), parts, np.int32(op.heads), np.int32(op.kv_heads))
        split, merge = (
            KernelSpec("attention_decode", entry, tuple(defines.items()))
            for entry in ("attention_decode", "attention_merge")
        )
        launches = [Launch(split, (op.kv_heads, bucket.tokens, splits), (group, 1, 1), args)]
        if splits > 1:
            merged = (ctx.step, parts, out, np.int32(splits))
            launches.append(Launch(merge, (op.heads, bucket.tokens, 1), (group, 1, 1), merged))
        return launches

    def _tiles(self, op: Attention) -> bool:
        """Whether attention_prefill's tiles fit a work-group, and each work-item loads a part of them.

        With narrower heads, some work-items would have nothing to load, and PoCL 3.1 makes them load beyond the tile.
        """
        floats = (QUERIES + KEYS) * (op.head_dim + 4) + QUERIES * (KEYS + 1 + 9)
        wide = QUERIES * op.head_dim // 4 >= TILE_GROUP
        return wide and op.heads // op.kv_heads <= QUERIES and self._group >= TILE_GROUP and 4 * floats <= self._local


def decoding(bucket: Bucket) -> bool:
    """Whether a step has few tokens, or each is a sequence of its own."""
    return bucket.tokens <= DECODE_TOKENS or bucket.tokens == bucket.rows


def defines_of(ctx: Context, op: Attention) -> dict[str, int]:
    """Preprocessor constants of every attention kernel."""
    return kv_defines(ctx, op) | {"HEAD_GROUP": op.heads // op.kv_heads}


def _window(op: Attention) -> dict[str, int]:
    """The preprocessor constant of the kernels that may attend to a window."""
    return {"WINDOW": op.window or 0}


def tiles_of(ctx: Context, bucket: Bucket, side: int) -> int:
    """Maximum number of tiles of ``side`` tokens if each sequence begins with a new tile."""
    return bucket.tokens // side + min(bucket.tokens, ctx.program.limits.max_seqs)


def prefill_args(ctx: Context, op: Attention) -> tuple[Arg, ...]:
    """The arguments of attention for many tokens."""
    cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
    sizes = np.int32(op.heads), np.int32(op.kv_heads)
    return (*positions(ctx, op.table), ctx.tensors[op.qkv], *cache, ctx.tensors[op.out], *sizes)


def decode_args(ctx: Context, op: Attention, rope: RopeAppend | None) -> tuple[Arg, ...]:
    """The first arguments of attention for few tokens."""
    return (*positions(ctx, op.table), *attention_inputs(ctx, op, rope, ctx.step))


def most_tokens(ctx: Context) -> int:
    """Maximum tokens of a step with split attention."""
    return max(ctx.program.limits.max_rows, min(ctx.program.limits.max_tokens, DECODE_TOKENS))


def parts_of(ctx: Context, op: Attention) -> Buffer:
    """The buffer for the partial results of split attention."""
    size = most_tokens(ctx) * op.heads * MAX_SPLITS * (op.head_dim + ATTENTION_PART) * 4
    return ctx.scratch("attention parts", size)
