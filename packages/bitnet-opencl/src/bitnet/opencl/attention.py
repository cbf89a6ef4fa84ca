"""Attention as OpenCL launches: split over positions for few tokens, by tiles for many, plain where neither fits."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Bucket, Context, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div, kv_defines, positions
from bitnet.core.hal import Attention, RopeAppend
from bitnet.opencl.products import WARP, power_of_two

DECODE_TOKENS = 8
"""Tokens up to which the positions are split over work-groups; more, where each is a sequence of its own."""
QUERIES, KEYS, TILE_GROUP = 32, 32, 256
"""Of attention_prefill, as its source has them."""
SPLIT = 32
"""Positions that are worth a work-group of attention of their own."""
MAX_SPLITS = 64
GROUPS = 3
"""Of attention_decode on each compute unit, at most, for which a sequence is split."""
DECODE_GROUP, REDUCERS = 128, 8
"""Work-items of attention_decode, and how many of them share a head's softmax, as its source has it."""
ATTENTION_PART = 4
"""Floats of a head that a part of its positions yields beside its dimensions: a maximum, a total, and room."""
MMA_TILE, MMA_WARPS, MMA_GROUPS = 64, 4, 3
"""Of the kernels for matrix units: positions or tokens of a work-group, its warps, and how many groups of
attention_decode_mma on each compute unit, at most, a sequence is split for."""


class AttentionOps:
    """The launches for a device of so many compute units, work-items of a group and bytes of local memory."""

    def __init__(self, compute_units: int, group: int, local_bytes: int, *, mma: bool) -> None:
        self._units, self._group, self._local, self._mma = compute_units, group, local_bytes, mma

    def lower(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        """The operation alone."""
        if self.splits(ctx, op, bucket):
            return self.decode(ctx, op, bucket, rope=None)
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        sizes = np.int32(op.heads), np.int32(op.kv_heads)
        args = (*positions(ctx), ctx.tensors[op.qkv], *cache, ctx.tensors[op.out], *sizes)
        defines = kv_defines(ctx, op) | {"HEAD_GROUP": op.heads // op.kv_heads}
        if self._mma and takes_matrix_units(ctx, op) and op.head_dim <= 128:
            spec = KernelSpec("attention_prefill_mma", "attention_prefill_mma", tuple(defines.items()))
            tiles = bucket.tokens // MMA_TILE + min(bucket.tokens, ctx.program.limits.max_seqs)
            return [Launch(spec, (op.heads, tiles, 1), (WARP * MMA_WARPS, 1, 1), args)]
        if self._tiles(op):
            tokens = QUERIES // (op.heads // op.kv_heads)
            spec = KernelSpec("attention_prefill", "attention_prefill", tuple(defines.items()))
            return [Launch(spec, (op.kv_heads, ceil_div(bucket.tokens, tokens), 1), (TILE_GROUP, 1, 1), args)]
        spec = KernelSpec("attention", "attention", (("WG", self._group), *defines.items()))
        return [Launch(spec, (bucket.tokens, op.heads, 1), (self._group, 1, 1), args)]

    def splits(self, ctx: Context, op: Attention, bucket: Bucket) -> bool:
        """Whether :meth:`decode` is for a step of this size, and a work-group can hold what it needs."""
        if self._mma and takes_matrix_units(ctx, op):
            return bucket.tokens <= DECODE_TOKENS or bucket.tokens == bucket.rows
        share, group = op.heads // op.kv_heads, min(self._group, DECODE_GROUP)
        floats = share * (op.head_dim + 4 * group + 2 * group + REDUCERS + 1) + 2 * group
        decoding = bucket.tokens <= DECODE_TOKENS or bucket.tokens == bucket.rows
        return decoding and op.head_dim <= 4 * group and share * REDUCERS <= group and 4 * floats <= self._local

    def decode(self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None) -> list[Launch]:
        """Attention split over the positions; with the rotation and the cache's new entry, for a step of one token."""
        tables = (ctx.dense(rope.cos).data, ctx.dense(rope.sin).data) if rope else (ctx.step, ctx.step)
        cache, out = (ctx.kv("k", op.layer), ctx.kv("v", op.layer)), ctx.tensors[op.out]
        args = (*positions(ctx), ctx.tensors[op.qkv], *cache, *tables)
        sizes = np.int32(op.heads), np.int32(op.kv_heads)
        most = max(ctx.program.limits.max_rows, min(ctx.program.limits.max_tokens, DECODE_TOKENS))
        room = most * op.heads * MAX_SPLITS * (op.head_dim + ATTENTION_PART) * 4
        defines = kv_defines(ctx, op) | {"HEAD_GROUP": op.heads // op.kv_heads}
        defines |= {"ROPE": int(rope is not None), "NEOX": int(rope is not None and rope.style == "neox")}
        heads = bucket.tokens * op.kv_heads
        if self._mma and takes_matrix_units(ctx, op):
            wanted = min(ceil_div(bucket.context, MMA_TILE), MMA_GROUPS * self._units // heads, MAX_SPLITS)
            splits = power_of_two(max(1, wanted))
            parts = out if splits == 1 else ctx.scratch("attention parts", room)
            arrivals = ctx.zeroed("attention arrivals", most * op.kv_heads * 4)
            defines |= {"SPLITS": splits, "WARPS": MMA_WARPS}
            spec = KernelSpec("attention_decode_mma", "attention_decode_mma", tuple(defines.items()))
            grid, block = (op.kv_heads, bucket.tokens, splits), (WARP * MMA_WARPS, 1, 1)
            return [Launch(spec, grid, block, (*args, out, parts, arrivals, *sizes))]
        splits = max(1, min(ceil_div(bucket.context, SPLIT), GROUPS * self._units // heads, MAX_SPLITS))
        group = min(self._group, DECODE_GROUP)
        defines = {"WG": group} | defines
        parts = out if splits == 1 else ctx.scratch("attention parts", room)
        args = (*args, parts, *sizes)
        split, merge = (
            KernelSpec("attention_decode", entry, tuple(defines.items()))
            for entry in ("attention_decode", "attention_merge")
        )
        launches = [Launch(split, (op.kv_heads, bucket.tokens, splits), (group, 1, 1), args)]
        if splits > 1:
            launches.append(
                Launch(merge, (op.heads, bucket.tokens, 1), (group, 1, 1), (ctx.step, parts, out, np.int32(splits)))
            )
        return launches

    def _tiles(self, op: Attention) -> bool:
        """Whether a work-group can hold attention_prefill's tiles, and each work-item has a part in loading them.

        Of narrower heads some would have none, and PoCL 3.1 lets those load too, beyond the tile.
        """
        floats = (QUERIES + KEYS) * (op.head_dim + 4) + QUERIES * (KEYS + 1 + 9)
        wide = QUERIES * op.head_dim // 4 >= TILE_GROUP
        return wide and op.heads // op.kv_heads <= QUERIES and self._group >= TILE_GROUP and 4 * floats <= self._local


def takes_matrix_units(ctx: Context, op: Attention) -> bool:
    """Whether the kernels for those can take the cache and the heads."""
    kv = ctx.program.kv
    assert kv is not None  # check_program has seen to it
    return kv.dtype == "f16" and op.head_dim in (64, 128, 256) and op.heads // op.kv_heads <= 8
