"""Launches of rotary embedding and attention in CUDA: split over positions for few tokens, tiled for many."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Context, KernelSpec, Launch
from bitnet.core.gpu.ops import (
    attention_inputs,
    ceil_div,
    head_norm_inputs,
    kv_defines,
    part_defines,
    positions,
    rope_defines,
)
from bitnet.core.gpu.ops.scaled import norms_heads
from bitnet.core.hal import Attention, RopeAppend, Sample
from bitnet.cuda.products import CLUSTERS, MAX_CLUSTER, TENSOR_CORES, WGMMA, largest, shared_bytes
from bitnet.cuda.tiles import ALIGNMENT, MANY_TOKENS, PANEL, TiledMatrix

QUERY_TILE = 64
"""Tokens of a block of attention_prefill."""
QUERY_ROWS, KEY_TILE, KEY_STAGES = 128, 128, 2
"""Sizes of attention_wgmma, as in its source: tokens times query heads of a block, positions of a tile, stages."""
KEY_HEAD = 128
"""Largest head dimension of attention_wgmma."""
CODE_SLOTS = 4
"""Tiles of keys or values whose int8 codes are also in shared memory or in flight."""
KEY_BLOCKS = (8, 16, 32, 64, 128)
"""Supported positions per cache block: they divide the tile of attention_wgmma and are whole swizzles."""
SPLIT = 64
"""Minimum positions per block of split attention."""
MAX_SPLITS = 64
SPLIT_TOKENS = 16
"""Maximum tokens of a step for which the positions of each sequence are split over blocks. Longer steps use tiles of
tokens, which read a sequence's cache once for all of them."""
LARGE_CLUSTER = 16
"""Blocks of a cluster on devices of :data:`LARGE_CLUSTERS`."""
LARGE_CLUSTERS = ((9, 0), (10, 0))
CLUSTERED = 10 / 11
"""Share of the multiprocessors that clusters of more than two blocks can occupy at once. A cluster is within one of the
device's processing clusters, whose sizes differ. On an H200 with 132 multiprocessors, 15 clusters of 8 fit and 16 do
not."""
CLUSTER_SUMS = 1792
"""Maximum sums of a token and key/value head that the blocks of a cluster merge: more do not fit the 48 KiB of shared
memory that a kernel may declare."""
TILE = 16
"""Positions that a warp of attention_decode processes at a time."""
LONG_WARPS, LONG_DEPTH = 8, 2
"""Warps per block, and tiles in flight per warp, when few blocks share a long context; as many tiles in blocks of 4
warps that have a ring, or all positions of heads that two warps share."""
LONG_SUMS = 1024
"""Maximum sums of a token and key/value head in a block of :data:`LONG_WARPS`; more do not fit shared memory."""
WARP_HEAD = 128
"""Dimensions of a head that a warp of attention_decode takes at most: wider heads are shared by two warps."""
WIDE_SUMS = {"f16": 1536, "i8": 1280}
"""As :data:`LONG_SUMS`, for heads that two warps share, by the type of the cache."""
CODES_DEPTH, SPREAD_CODES_DEPTH = 4, 2
"""Tiles in flight per warp for an int8 cache, whose tiles have half the bytes of f16; the second where blocks on nearly
all multiprocessors read it."""
LARGE_FROM = MAX_CLUSTER * LONG_WARPS * LONG_DEPTH * TILE
"""Context length beyond which clusters may be large, and tiles of int8 are in a ring."""
FAR = 8192
"""Context length beyond which several clusters read a head's positions: a single cluster would leave multiprocessors
idle, which costs more than merging clusters through memory."""
FAR_HEADS = 16
"""Maximum key/value heads, of all sequences together, for which several clusters read the positions of each."""
FAR_SHARE = 0.7
"""Minimum share of the multiprocessors that such clusters must occupy."""
RING_HEAD = 128
"""Head dimension for which tiles may be kept in a shared-memory ring instead of registers."""
ROPE_WARPS = 8
ATTENTION_BLOCKS = 3
"""Maximum blocks of attention_decode per multiprocessor for which a sequence is split."""
PLAIN_GROUP = 256
"""Threads of a block of the plain kernel."""


class AttentionOps:
    """Launches for a device with ``multiprocessors`` and a compute capability such as ``(9, 0)``."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int]) -> None:
        self._multiprocessors = multiprocessors
        self._tensor_cores, self._clusters = capability >= TENSOR_CORES, capability >= CLUSTERS
        self._shared = shared_bytes(capability)
        self._large_clusters, self._wgmma = capability in LARGE_CLUSTERS, capability == WGMMA

    def rope_append(self, ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        tensors = ctx.tensors[op.qkv], ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        angles = ctx.dense(op.cos).data, ctx.dense(op.sin).data
        args = (*positions(ctx, op.table), *tensors, *angles, *head_norm_inputs(ctx, op, ctx.step))
        sizes = {"HEADS": op.heads, "KV_HEADS": op.kv_heads, "WARPS": ROPE_WARPS, "NEOX": int(op.style == "neox")}
        sizes |= {"NORMS": int(op.q_norm is not None), "NORMS_LAST": int(op.norms_last)}
        part = part_defines(ctx, op)
        name, defines = "rope_part" if part else "rope_append", kv_defines(ctx, op) | sizes | part
        spec = KernelSpec(name, name, tuple(defines.items()))
        grid = (bucket.tokens, ceil_div(op.heads + 2 * op.kv_heads, ROPE_WARPS), 1)
        return [Launch(spec, grid, (32 * ROPE_WARPS, 1, 1), args, overlaps=True)]

    def attention(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        tensors = ctx.tensors[op.qkv], *cache, ctx.tensors[op.out]
        if self.splits(ctx, op, bucket):
            return [self.decode(ctx, op, bucket, rope=None)]
        defines = _defines(ctx, op)
        shared = 4 * QUERY_TILE * (op.head_dim + 8) * 2
        tiled = self._tensor_cores and op.head_dim in (64, 128, 256) and shared <= self._shared
        if tiled and self._narrow(ctx):
            defines |= {"HEADS": op.heads, "KV_HEADS": op.kv_heads}
            fits = op.heads // op.kv_heads <= QUERY_ROWS and defines["BLOCK"] in KEY_BLOCKS and op.head_dim <= KEY_HEAD
            if self._wgmma and bucket.tokens > MANY_TOKENS and fits:
                return [self._wgmma_launch(ctx, op, bucket, defines)]
            spec = KernelSpec("attention_prefill", "attention_prefill", tuple(defines.items()))
            tiles = bucket.tokens // QUERY_TILE + min(bucket.tokens, ctx.program.limits.max_seqs)
            args = (*positions(ctx, op.table), *tensors)
            return [Launch(spec, (op.heads, tiles, 1), (256, 1, 1), args, shared=shared, overlaps=True)]
        args = (*positions(ctx, op.table), *tensors, np.int32(op.heads), np.int32(op.kv_heads))
        spec = KernelSpec("attention", "attention", (("WG", PLAIN_GROUP), *defines.items()))
        return [Launch(spec, (bucket.tokens, op.heads, 1), (PLAIN_GROUP, 1, 1), args)]

    def _wgmma_launch(self, ctx: Context, op: Attention, bucket: Bucket, defines: dict[str, int]) -> Launch:
        kv = ctx.cache
        rows, width = kv.num_blocks * op.kv_heads * kv.block_size, op.head_dim * 2
        cache: tuple[Arg, ...] = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        if defines["KV_F16"]:
            cache = tuple(TiledMatrix(data, rows, width, kv.block_size, PANEL) for data in cache)
        tokens = QUERY_ROWS // (op.heads // op.kv_heads)
        tiles = bucket.tokens // tokens + min(bucket.tokens, ctx.program.limits.max_seqs)
        args = (*positions(ctx, op.table), ctx.tensors[op.qkv], *cache, ctx.tensors[op.out])
        shared = ALIGNMENT + 2 * KEY_STAGES * KEY_TILE * op.head_dim * 2
        shared += 0 if defines["KV_F16"] else CODE_SLOTS * KEY_TILE * kv.row_bytes
        spec = KernelSpec("attention_wgmma", "attention_wgmma", tuple(defines.items()))
        return Launch(spec, (op.kv_heads, tiles, 1), (3 * QUERY_ROWS, 1, 1), args, shared=shared, overlaps=True)

    def splits(self, ctx: Context, op: Attention, bucket: Bucket) -> bool:
        fits = self._tensor_cores and op.head_dim in (64, 128, 256) and op.heads // op.kv_heads <= 8
        each = bucket.apart or isinstance(ctx.program.ops[-1], Sample)  # else a row for each token is no decoding
        decoding = bucket.tokens <= SPLIT_TOKENS or (bucket.tokens == bucket.rows and each)
        return fits and self._narrow(ctx) and decoding

    @staticmethod
    def _narrow(ctx: Context) -> bool:
        """Whether the cache is f16, or int8 with a head's data per block in a multiple of 16 bytes."""
        kv = ctx.cache
        return kv.dtype == "f16" or (kv.dtype == "i8" and kv.block_size % 4 == 0)

    def decode(self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None) -> Launch:
        limit = max(ctx.program.limits.max_rows, min(ctx.program.limits.max_tokens, SPLIT_TOKENS))
        seen = min(bucket.context, op.window or bucket.context)
        heads, splits = bucket.tokens * op.kv_heads, ceil_div(seen, SPLIT)
        sums, codes = op.heads // op.kv_heads * op.head_dim, ctx.cache.dtype == "i8"
        cluster, parts = 0, ctx.step  # `parts` is unused if one cluster has all splits
        if self._clusters and sums <= CLUSTER_SUMS:
            several, cluster = self._clusters_for(heads, splits, seen)
            splits = several * cluster
            if several > 1:
                parts = ctx.scratch("attention shares", limit * op.heads * several * op.head_dim * 16)
        else:
            splits = min(splits, MAX_SPLITS)
            parts = ctx.scratch("attention parts", limit * op.heads * MAX_SPLITS * (op.head_dim + 2) * 4)
        merges = splits > max(cluster, 1)
        arrivals = ctx.zeroed("attention arrivals", limit * op.kv_heads * MAX_CLUSTER * 4) if merges else ctx.step
        long, rings, wide = seen > SPLIT * splits, self._rings(ctx, op), op.head_dim > WARP_HEAD
        few = heads * splits <= self._multiprocessors and sums <= (WIDE_SUMS[ctx.cache.dtype] if wide else LONG_SUMS)
        if few and (long or wide):
            warps, depth = LONG_WARPS, LONG_DEPTH if long else 1
            if codes and long:
                depth = SPREAD_CODES_DEPTH if merges else CODES_DEPTH
            # f16 is faster in registers where one cluster reads a head, or several of two blocks.
            ring = rings and (seen > LARGE_FROM if codes else merges and cluster > 2)
        else:
            ring = codes and seen > FAR and rings
            warps, depth = 4, LONG_DEPTH if ring or (wide and long and splits == 1) else 1
        shared = warps * depth * TILE * 2 * ctx.cache.row_bytes if ring else 0
        defines = _defines(ctx, op) | {
            "HEADS": op.heads,
            "KV_HEADS": op.kv_heads,
            "SPLITS": splits,
            "CLUSTER": cluster if splits > 1 else 0,
            "WARPS": warps,
            "DEPTH": depth,
            "BLOCKS": 1 if warps == LONG_WARPS else 2 if wide and depth > 1 else 3,
            "RING": int(ring),
            **rope_defines(rope),
            "HEAD_NORMS": int(rope is not None and norms_heads(rope)),
        }
        if rope is not None and (part := part_defines(ctx, rope)):
            defines["ROTATED"] = part["PAIRS"]
        norms = head_norm_inputs(ctx, rope, ctx.step)
        inputs = attention_inputs(ctx, op, rope, ctx.step)
        args = (*positions(ctx, op.table), *inputs, ctx.tensors[op.out], parts, arrivals, *norms)
        spec = KernelSpec("attention_decode", "attention_decode", tuple(defines.items()))
        grid = op.kv_heads, bucket.tokens, splits
        return Launch(spec, grid, (32 * warps, 1, 1), args, shared=shared, overlaps=True)

    def _clusters_for(self, heads: int, splits: int, context: int) -> tuple[int, int]:
        """Number of clusters per key/value head, and of blocks per cluster, for ``heads`` of all sequences together.

        Few heads with long contexts get no more clusters than the device runs at once. Any more would wait until the
        first have ended, which doubles the time of attention.
        """

        def at_once(cluster: int) -> int:
            return int(self._multiprocessors * (CLUSTERED if cluster > 2 else 1)) // cluster

        if context > FAR and heads <= FAR_HEADS:
            for cluster in (MAX_CLUSTER, 4, 2):
                several = at_once(cluster) // heads
                if heads * several * cluster >= FAR_SHARE * self._multiprocessors:
                    return several, cluster
        most = min(splits, MAX_CLUSTER)
        if self._large_clusters and context > LARGE_FROM:
            for cluster in (LARGE_CLUSTER, MAX_CLUSTER):
                if heads <= at_once(cluster):
                    return 1, cluster
            most = min(splits, LARGE_CLUSTER)
        return 1, largest(most, lambda n: heads * n <= ATTENTION_BLOCKS * self._multiprocessors)

    def _rings(self, ctx: Context, op: Attention) -> bool:
        """Whether shared memory has room for a ring of tiles, and each tile is within one cache block."""
        return self._large_clusters and op.head_dim == RING_HEAD and ctx.cache.block_size % TILE == 0


def _defines(ctx: Context, op: Attention) -> dict[str, int]:
    """Preprocessor constants of every kernel of attention."""
    return kv_defines(ctx, op) | {"WINDOW": op.window or 0}
