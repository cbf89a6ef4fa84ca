"""Grids and tuning: the operations as Vulkan dispatches, fused where a step and the neighbouring operations allow it.

A step of one token is lowered to five dispatches a layer: norm and quantisation go into the product after them, the
gate's activation into the product before it, the rotation and the cache's new entry into attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, Dispatch, KernelSources, Launch, Lowering, launch
from bitnet.core.gpu.groups import Choice, Layer, NormChoice, RopeAttention
from bitnet.core.gpu.ops import RowOps, attention_inputs, ceil_div, kv_defines, positions, power_of_two, rope_defines
from bitnet.core.gpu.products import Source, fused_products
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Attention, DenseMatmul, Embed, RopeAppend, Sample, TernaryMatmul
from bitnet.vulkan import matrices
from bitnet.vulkan.hardware import MOST_GROUPS, Hardware
from bitnet.vulkan.head import HeadOps
from bitnet.vulkan.layers import one_launch, pitch, wide
from bitnet.vulkan.matrices import MATRIX_GROUP
from bitnet.vulkan.modules import COMMON, ENDING, ENTRY

SOURCES = KernelSources("bitnet.vulkan", "vulkan", ending=ENDING, common=COMMON, entry=ENTRY)
GROUP = 256
"""Invocations of a row's work-group, where the device has as many."""
SAMPLE_GROUP, SAMPLE_EACH = 1024, 8
"""Invocations that choose a token, at most, and logits that are worth one of them."""
GEMV_GROUP = 128
FEW_TOKENS = 8
"""More tokens than this take the tiled product."""
TILE_M, TILE_N, TILE_GROUP = 32, 64, 128
"""Sizes of the tiled product, as in its source."""
MATRIX_TILE = 64
"""Tokens of a work-group of attention_mma."""
LONG_ROW = 64
"""Quads of codes of a row from which 16 invocations share it, not 8."""
CHUNKS = {"f16": 64, "f32": 32}
"""Positions that attention_decode looks at together, by the cache's type."""
MOST_PARTS, ENOUGH_PARTS = 24, 512
"""Work-groups of attention_decode: most that share the positions of a token, and how many are enough in all."""
QUERY_TILE, QUERY_GROUP = 32, 128
"""Sizes of attention_prefill: tokens of a work-group, and as many positions at a time; its invocations."""


class VulkanOps:
    """The lowering for a device."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._group = min(GROUP, power_of_two(hardware.group))
        self._gemv_group = min(GEMV_GROUP, self._group)
        self._rows = RowOps(group=self._group)
        self._head = HeadOps(hardware, self._group)
        self._table: Dispatch = {
            **self._rows.table(),
            Embed: self.embed,
            TernaryMatmul: self.ternary_matmul,
            DenseMatmul: self._head.dense_matmul,
            Attention: self.attention,
            Sample: self.sample,
            Layer: partial(one_launch, hardware),
            NormChoice: self._head.tokens,
            Choice: self._head.tokens,
            RopeAttention: self._rope_attention,
            **fused_products(self._decode, self._quantises),
        }

    def lowering(self) -> Lowering:
        """What :class:`bitnet.core.gpu.GpuDevice` takes."""
        return Lowering(self._table, self._head.fits)

    def embed(self, ctx: Context, op: Embed, bucket: Bucket) -> list[Launch]:
        table = ctx.dense(op.table)
        offset, dim = ctx.offset("tokens"), np.int32(table.shape[1])
        defines = {"WEIGHT_F16": int(table.dtype == "f16")}
        made = []
        for part, first, count in self._hardware.windows(table):
            args = (ctx.step, part, ctx.tensors[op.out], offset, dim, np.int32(first), np.int32(count))
            made.append(self._rows.launch("embed", bucket.tokens, args, defines=defines))
        return made

    def ternary_matmul(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        x, scale, out = ctx.tensors[op.x], ctx.tensors[op.scale], ctx.tensors[op.out]
        w = ctx.ternary(op.weights)
        if bucket.tokens == 1 and self._decodes(w):
            return [self._decode(ctx, op, bucket, Source(x, scale=scale), out)]
        args = (ctx.step, x, scale, w.codes, w.scales, out, np.int32(w.rows))
        defines: dict[str, int] = {"COLS": w.cols, "ADD": int(op.add)}
        wide = {"WIDE": int(w.cols % 16 == 0)}
        if bucket.tokens > 1 and w.cols % 16 == 0 and matrices.shapes(self._hardware):
            shape = matrices.shape(self._hardware, w.rows, bucket.tokens)
            grid = shape.grid(w.rows, bucket.tokens)
            return [launch("ternary_mma", grid, shape.group, args, {**defines, **shape.defines})]
        if bucket.tokens <= FEW_TOKENS:
            lanes = self._lanes(w)
            grid = (ceil_div(w.rows, self._gemv_group // lanes), 1, 1)
            defines |= {"LANES": lanes, "TOKENS": bucket.tokens, **wide}
            return [launch("ternary_matmul", grid, self._gemv_group, args, defines, entry="ternary_gemv")]
        grid = (ceil_div(w.rows, TILE_N), ceil_div(bucket.tokens, TILE_M), 1)
        return [launch("ternary_matmul", grid, TILE_GROUP, args, defines | wide, entry="ternary_gemm")]

    def attention(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        if self._splits_attention(ctx, op, bucket):
            return [self._attention_decode(ctx, op, bucket, rope=None)]
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        args = (ctx.step, ctx.tensors[op.qkv], *cache, ctx.tensors[op.out])
        _, *place = positions(ctx)
        sizes = (*place, np.int32(op.heads), np.int32(op.kv_heads))
        seqs = min(bucket.tokens, ctx.program.limits.max_seqs)  # each of which begins with a tile of its own
        if self._multiplies_attention(ctx, op):
            grid = (op.heads, bucket.tokens // MATRIX_TILE + seqs, 1)
            defines = {"DIM": op.head_dim, "BLOCK": kv_defines(ctx, op)["BLOCK"]}
            return [launch("attention_mma", grid, MATRIX_GROUP, (*args, *sizes), defines)]
        if self._tiles_attention(ctx, op):
            grid = (op.heads, bucket.tokens // QUERY_TILE + seqs, 1)
            return [launch("attention_prefill", grid, QUERY_GROUP, (*args, *sizes), kv_defines(ctx, op))]
        grid = (bucket.tokens, op.heads, 1)
        return [launch("attention", grid, self._gemv_group, (*args, *sizes), kv_defines(ctx, op))]

    def sample(self, ctx: Context, op: Sample, bucket: Bucket) -> list[Launch]:
        each = max(ctx.shape(op.logits)[1] // SAMPLE_EACH, 64)
        return RowOps(group=power_of_two(min(each, SAMPLE_GROUP, self._hardware.group))).sample(ctx, op, bucket)

    def _rope_attention(self, ctx: Context, group: RopeAttention, bucket: Bucket) -> list[Launch] | None:
        if bucket.tokens > 1 or not self._splits_attention(ctx, group.attention, bucket):
            return None
        return [self._attention_decode(ctx, group.attention, bucket, group.rope)]

    def _quantises(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> bool:
        return bucket.tokens == 1 and self._decodes(ctx.ternary(op.weights))

    def _decode(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, source: Source, out: Buffer, *, activation: str = ""
    ) -> Launch:
        w = ctx.ternary(op.weights)
        norm = ctx.dense(source.norm).data if source.norm else source.x
        chunks = w.row_bytes // 16
        defines = {
            "COLS": w.cols,
            "LANES": self._lanes(w),
            "INPUT": source.kind,
            "GLU": int(bool(activation)),
            "RELU2": int(activation == "relu2"),
            "ADD": int(op.add),
            "CHUNKS": chunks,
            "PITCH": pitch(chunks),
        }
        args: tuple[Arg, ...] = (source.x, source.scale or source.x, norm, w.codes, w.scales, out)
        args = (*args, np.float32(source.eps), np.int32(w.rows))
        rows = w.rows // 2 if activation else w.rows
        grid = (ceil_div(rows, self._group // defines["LANES"]), 1, 1)
        return launch("ternary_decode", grid, self._group, args, defines)

    def _decodes(self, w: TernaryBuffer) -> bool:
        """Whether a token's activations fit the shared memory of ternary_decode, beside what its reductions take."""
        return pitch(w.row_bytes // 16) * 64 + 16 * self._group + 64 <= self._hardware.shared

    def _lanes(self, w: TernaryBuffer) -> int:
        """Invocations that share a row of a product of few tokens: fewer where the grid would not reach all rows."""
        lanes = 8 if w.row_bytes // 16 < LONG_ROW else 16
        lanes = min(lanes, self._hardware.subgroup or lanes)  # they add their sums up within one
        while lanes > 1 and ceil_div(w.rows, self._gemv_group // lanes) > MOST_GROUPS:
            lanes //= 2
        return lanes

    def _splits_attention(self, ctx: Context, op: Attention, bucket: Bucket) -> bool:
        """Whether attention_decode takes this shape, and the step is one of its kind."""
        if bucket.tokens > FEW_TOKENS and bucket.tokens != bucket.rows:
            return False
        if op.head_dim % wide(ctx) or op.heads // op.kv_heads > 8:
            return False
        size = self._attention_size(ctx, op)
        if size["RUNS"] < 2 or size["CHUNK"] > 8 * size["RUNS"]:
            return False
        words = _attention_words(size, self._hardware.subgroup)
        return size["GROUP"] * size["CHUNK"] <= 8 * self._group and words * 4 <= self._hardware.shared

    def _attention_size(self, ctx: Context, op: Attention) -> dict[str, int]:
        """What attention_decode is compiled for, less the parts."""
        group, lanes = op.heads // op.kv_heads, self._hardware.subgroup
        chunk, loads = CHUNKS[ctx.cache.dtype], op.head_dim // wide(ctx)
        runs = min(power_of_two(max(self._group // loads, 1)), chunk)
        defines = {**kv_defines(ctx, op), "GROUP": group, "RUNS": runs, "CHUNK": chunk, "WG": self._group}
        if lanes and lanes % loads == 0 and runs * loads == self._group:
            by_shuffles = {**defines, "SUBGROUPS": 1}
            if _attention_words(by_shuffles, lanes) * 4 <= self._hardware.shared:
                return by_shuffles
        pool = max(chunk * (loads + 1), runs // 2 * group * op.head_dim // 4)
        return {**defines, "POOL": pool, "SUBGROUPS": 0}

    def _tiles_attention(self, ctx: Context, op: Attention) -> bool:
        """Whether attention_prefill takes this shape; tokens of any sequences may be in the step."""
        quads = op.head_dim // 4
        shared = QUERY_TILE * ((quads + 1) * 24 + (QUERY_TILE + 1) * 4) + (QUERY_GROUP + QUERY_TILE) * 4
        fits = op.head_dim % 8 == 0 and op.head_dim <= 128 and shared <= self._hardware.shared
        return ctx.cache.dtype == "f16" and fits and self._hardware.group >= QUERY_GROUP

    def _multiplies_attention(self, ctx: Context, op: Attention) -> bool:
        """Whether attention_mma takes this shape."""
        fits = op.head_dim % 16 == 0 and op.head_dim <= 128
        return fits and ctx.cache.dtype == "f16" and matrices.has_f16(self._hardware)

    def _attention_decode(self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None) -> Launch:
        defines, limits = self._attention_size(ctx, op), ctx.program.limits
        chunk, wanted = defines["CHUNK"], ceil_div(ENOUGH_PARTS, bucket.tokens * op.kv_heads)
        part = chunk * ceil_div(bucket.context, chunk * min(wanted, MOST_PARTS))
        most = ceil_div(bucket.context, part)
        defines |= {"PART": part, "MOST": most, **rope_defines(rope)}
        tokens = max(limits.max_rows, min(limits.max_tokens, FEW_TOKENS))
        parts = ctx.scratch("attention parts", bucket.tokens * op.heads * most * (op.head_dim + 2) * 4)
        arrivals = ctx.zeroed("attention arrivals", tokens * op.kv_heads * 4)
        step, *place = positions(ctx)
        inputs = attention_inputs(ctx, op, rope, ctx.tensors[op.qkv])
        args = (step, *inputs, ctx.tensors[op.out], parts, arrivals, *place, np.int32(op.kv_heads))
        grid = (op.kv_heads, bucket.tokens, most)
        return launch("attention_decode", grid, self._group, args, defines)


def _attention_words(size: Mapping[str, int], subgroup: int) -> int:
    """Shared memory of attention_decode."""
    group, dim = size["GROUP"], size["DIM"]
    if size["SUBGROUPS"]:
        found = size["WG"] // subgroup * group * (dim + 2)
    else:
        found = 4 * size["POOL"] + 2 * group * size["CHUNK"]
    return found + group * (dim + MOST_PARTS + 2) + 2 * dim + 64
