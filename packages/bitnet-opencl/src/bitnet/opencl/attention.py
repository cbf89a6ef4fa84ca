"""Attention as OpenCL launches: split over positions for few tokens, by tiles for many, plain where neither fits."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Bucket, Context, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div, kv_defines, positions
from bitnet.core.hal import Attention, RopeAppend

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


class AttentionOps:
    """The launches for a device of so many compute units, work-items of a group and bytes of local memory."""

    def __init__(self, compute_units: int, group: int, local_bytes: int) -> None:
        self._units, self._group, self._local = compute_units, group, local_bytes

    def lower(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        """The operation alone."""
        if self.splits(op, bucket):
            return self.decode(ctx, op, bucket, rope=None)
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        sizes = np.int32(op.heads), np.int32(op.kv_heads)
        args = (*positions(ctx), ctx.tensors[op.qkv], *cache, ctx.tensors[op.out], *sizes)
        defines = kv_defines(ctx, op) | {"HEAD_GROUP": op.heads // op.kv_heads}
        if self._tiles(op):
            tokens = QUERIES // (op.heads // op.kv_heads)
            spec = KernelSpec("attention_prefill", "attention_prefill", tuple(defines.items()))
            return [Launch(spec, (op.kv_heads, ceil_div(bucket.tokens, tokens), 1), (TILE_GROUP, 1, 1), args)]
        spec = KernelSpec("attention", "attention", (("WG", self._group), *defines.items()))
        return [Launch(spec, (bucket.tokens, op.heads, 1), (self._group, 1, 1), args)]

    def splits(self, op: Attention, bucket: Bucket) -> bool:
        """Whether :meth:`decode` is for a step of this size, and a work-group can hold what it needs."""
        share, group = op.heads // op.kv_heads, min(self._group, DECODE_GROUP)
        floats = share * (op.head_dim + 4 * group + 2 * group + REDUCERS + 1) + 2 * group
        decoding = bucket.tokens <= DECODE_TOKENS or bucket.tokens == bucket.rows
        return decoding and op.head_dim <= 4 * group and share * REDUCERS <= group and 4 * floats <= self._local

    def decode(self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None) -> list[Launch]:
        """Attention split over the positions; with the rotation and the cache's new entry, for a step of one token."""
        heads = bucket.tokens * op.kv_heads
        splits = max(1, min(ceil_div(bucket.context, SPLIT), GROUPS * self._units // heads, MAX_SPLITS))
        group = min(self._group, DECODE_GROUP)
        defines = {"WG": group} | kv_defines(ctx, op) | {"HEAD_GROUP": op.heads // op.kv_heads}
        defines |= {"ROPE": int(rope is not None), "NEOX": int(rope is not None and rope.style == "neox")}
        tables = (ctx.dense(rope.cos).data, ctx.dense(rope.sin).data) if rope else (ctx.step, ctx.step)
        out = ctx.tensors[op.out]
        most = max(ctx.program.limits.max_rows, min(ctx.program.limits.max_tokens, DECODE_TOKENS))
        parts = (
            out if splits == 1 else ctx.scratch("attention parts", most * op.heads * MAX_SPLITS * (op.head_dim + 2) * 4)
        )
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        args = (*positions(ctx), ctx.tensors[op.qkv], *cache, *tables, parts, np.int32(op.heads), np.int32(op.kv_heads))
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
