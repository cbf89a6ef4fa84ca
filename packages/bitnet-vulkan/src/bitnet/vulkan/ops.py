"""Lowers operations to Vulkan dispatches (grids and tuning), fused if the step and neighbouring operations allow it.

A step of one token takes five dispatches per layer: norm and quantisation are fused into the next product, the gate's
activation into the previous product, and rotation and KV cache update into attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, Dispatch, Launch, Lowering, launch, variants
from bitnet.core.gpu.drivers.windows import MAX_GROUPS
from bitnet.core.gpu.fusions import Choice, Layer, NormChoice, RopeAttention
from bitnet.core.gpu.ops import (
    RowOps,
    attention_inputs,
    ceil_div,
    kv_defines,
    part_defines,
    positions,
    power_of_two,
    rope_defines,
)
from bitnet.core.gpu.ops.group_products import GroupProducts, group_defines, in_parts
from bitnet.core.gpu.ops.products import ProductInput, fused_products, product_defines
from bitnet.core.gpu.ops.rows import head_norm_inputs
from bitnet.core.gpu.ops.scaled import head_norms, norms_heads
from bitnet.core.gpu.ops.variants import (
    GroupScaledMatmul,
    NormedRope,
    PartialRope,
    TernaryTable,
    WindowedAttention,
    embedder_variants,
    expert_variants,
)
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Attention, CausalConv, DenseMatmul, Embed, RopeAppend, Sample, TernaryMatmul
from bitnet.vulkan import matrices
from bitnet.vulkan.hardware import Hardware
from bitnet.vulkan.head import HeadOps
from bitnet.vulkan.layers import one_launch, pitch, wide
from bitnet.vulkan.pairs import PairProducts
from bitnet.vulkan.recurrent import RecurrentLaunches

GROUP = 256
"""Invocations of the work-group of a row, if the device allows that many."""
SAMPLE_GROUP = 1024
"""Maximum invocations that sample a token."""
SAMPLE_EACH = 8
"""Minimum logits per invocation of sample."""
GEMV_GROUP = 128
FEW_TOKENS = 8
"""Steps with more tokens than this use the tiled product."""
TILE_M, TILE_N, TILE_GROUP = 32, 64, 128
"""Sizes of the tiled product, as in its source."""
MATRIX_TILE = 64
"""Tokens of a work-group of attention_mma."""
DECODE_GROUPS = (64, 128, 256)
"""Columns of a group of ternary_groups_decode."""
LONG_ROW = 64
"""Minimum quads of codes of a row that 16 invocations share; shorter rows are shared by 8."""
CHUNKS = {"f16": 64, "f32": 32, "i8": 64}
"""Positions that attention_decode processes at a time, by the cache's type."""
MAX_PARTS = 24
"""Maximum work-groups of attention_decode that share the positions of a token."""
ENOUGH_PARTS = 512
"""Target number of work-groups of attention_decode."""
NORMED_BUFFERS = 11
"""Storage buffers that attention_decode binds where it normalises heads."""
QUERY_TILE, QUERY_GROUP = 32, 128
"""Sizes of attention_prefill: tokens of a work-group, which are also its positions at a time, and its invocations."""


class VulkanOps:
    """The lowering for a device."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._group = min(GROUP, power_of_two(hardware.group))
        self._gemv_group = min(GEMV_GROUP, self._group)
        self._rows = RowOps(group=self._group)
        self._head = HeadOps(hardware, self._group)
        self._pairs = PairProducts(hardware)
        self._table: Dispatch = {
            **self._rows.table(),
            **variants(self._rows),
            Embed: self.embed,
            **in_parts(hardware.windows),
            TernaryTable: self._pairs.table,
            TernaryMatmul: self.ternary_matmul,
            GroupScaledMatmul: self.ternary_matmul,
            DenseMatmul: self._head.dense_matmul,
            Attention: self.attention,
            WindowedAttention: self.attention,
            Sample: self.sample,
            Layer: partial(one_launch, hardware),
            NormChoice: self._choice,
            Choice: self._choice,
            RopeAppend: self.rope_append,
            NormedRope: self.rope_append,
            RopeAttention: self._rope_attention,
            **fused_products(self._decode, self._quantises),
        }
        self._table = {**self._table, **expert_variants(self._rows, hardware.shared, hardware.windows)}
        self._table = {
            **self._table,
            **embedder_variants(self._rows, self._table, self.ternary_matmul),
            **RecurrentLaunches(hardware, self._rows, self._table, self._decode, self._quantises).table(),
            PartialRope: self.rope_append,
        }

    def lowering(self) -> Lowering:
        """The lowering for :class:`bitnet.core.gpu.GpuDevice`."""
        return Lowering(self._table, self._head.fits, lambda _, bucket: bucket.rows == 1)

    def embed(self, ctx: Context, op: Embed, bucket: Bucket) -> list[Launch]:
        table = ctx.dense(op.table)
        offset, dim, defines = ctx.offset("tokens"), np.int32(table.shape[1]), {"WEIGHT_F16": int(table.dtype == "f16")}
        made = []
        for part, first, count in self._hardware.windows(table.data, table.shape[0]):
            args = (ctx.step, part, ctx.tensors[op.out], offset, dim, np.int32(first), np.int32(count))
            made.append(self._rows.launch("embed", bucket.tokens, args, defines=defines))
        return made

    def ternary_matmul(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer | None = None
    ) -> list[Launch]:
        """Launches of the operation, into ``out`` if given."""
        x, scale, out = ctx.tensors[op.x], ctx.tensors[op.scale], out or ctx.tensors[op.out]
        w = ctx.ternary(op.weights)
        if w.group is not None:
            return self._group_matmul(ctx, op, bucket, out)
        if self._quantises(ctx, op, bucket):
            return [self._decode(ctx, op, bucket, ProductInput(x, scale=scale), out)]
        args = (ctx.step, x, scale, w.codes, w.scales, out, np.int32(w.rows))
        defines: dict[str, int] = {"COLS": w.cols, "ADD": int(op.add)}
        wide = {"WIDE": int(w.cols % 16 == 0)}
        if bucket.tokens > 1 and w.cols % 16 == 0 and matrices.shapes(self._hardware):
            shape = matrices.shape(matrices.shapes(self._hardware), w.rows, bucket.tokens)
            grid = shape.grid(w.rows, bucket.tokens)
            return [launch("ternary_mma", grid, shape.group, args, {**defines, **shape.defines})]
        if bucket.tokens <= FEW_TOKENS:
            lanes = self._lanes(w)
            grid = (ceil_div(w.rows, self._gemv_group // lanes), 1, 1)
            defines |= {"LANES": lanes, "TOKENS": bucket.tokens, **wide}
            return [launch("ternary_matmul", grid, self._gemv_group, args, defines, entry="ternary_gemv")]
        grid = (ceil_div(w.rows, TILE_N), ceil_div(bucket.tokens, TILE_M), 1)
        return [launch("ternary_matmul", grid, TILE_GROUP, args, defines | wide, entry="ternary_gemm")]

    def _group_matmul(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer) -> list[Launch]:
        """A product of weights with scales of groups: by pairs of invocations for 2 to 8 tokens, else on matrices."""
        w, products = ctx.ternary(op.weights), GroupProducts(self._hardware.windows)
        if self._quantises(ctx, op, bucket):
            x = ProductInput(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
            return [self._decode(ctx, op, bucket, x, out)]
        if few := self._pairs.few(ctx, op, bucket, out):
            return few
        sizes = group_defines(w)
        fitting = matrices.group_shapes(self._hardware, sizes["GROUP"], sizes["EACH"]) if w.cols % 16 == 0 else []
        if bucket.tokens == 1 or not fitting:
            return products.lower(ctx, op, bucket, out)
        shape = matrices.shape(fitting, w.rows, bucket.tokens)
        defines = {**sizes, "ADD": int(op.add), **shape.defines}
        return [
            launch("ternary_groups_mma", shape.grid(rows, bucket.tokens), shape.group, args, defines)
            for args, rows in products.parts(ctx, op, out)
        ]

    def attention(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        if one := self._attention_decode(ctx, op, bucket, rope=None):
            return one
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        step, *place = positions(ctx, op.table)
        args = (step, ctx.tensors[op.qkv], *cache, ctx.tensors[op.out], *place, *map(np.int32, (op.heads, op.kv_heads)))
        seqs = min(bucket.tokens, ctx.program.limits.max_seqs)  # each of which begins with a tile of its own
        window = {"WINDOW": op.window or 0}
        narrow, f16 = ctx.cache.dtype != "f32" and op.head_dim <= 128, ctx.cache.dtype == "f16"
        if narrow and f16 and op.window is None and op.head_dim % 16 == 0 and matrices.has_f16(self._hardware):
            grid = (op.heads, bucket.tokens // MATRIX_TILE + seqs, 1)
            defines = {"DIM": op.head_dim, "BLOCK": kv_defines(ctx, op)["BLOCK"]}
            return [launch("attention_mma", grid, matrices.MATRIX_GROUP, args, defines)]
        if narrow and self._tiles_attention(op):
            grid = (op.heads, bucket.tokens // QUERY_TILE + seqs, 1)
            return [launch("attention_prefill", grid, QUERY_GROUP, args, kv_defines(ctx, op) | window)]
        grid = (bucket.tokens, op.heads, 1)
        return [launch("attention", grid, self._gemv_group, args, kv_defines(ctx, op) | window)]

    def rope_append(self, ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        return [*head_norms(ctx, op, bucket), *self._rows.rope_append(ctx, op, bucket)]

    def sample(self, ctx: Context, op: Sample, bucket: Bucket) -> list[Launch]:
        each = max(ctx.shape(op.logits)[1] // SAMPLE_EACH, 64)
        group = power_of_two(min(each, SAMPLE_GROUP, self._hardware.group))
        *before, last = RowOps(group=group).sample(ctx, op, bucket)
        return [*before, replace(last, args=(*last.args, ctx.step))]

    def _choice(self, ctx: Context, head: Choice | NormChoice, bucket: Bucket) -> list[Launch] | None:
        """The compact head. If filters leave the row undecided, all logits follow, and a draw from them (0026)."""
        made = self._head.tokens(ctx, head, bucket)
        if made is None or not bucket.filtered:
            return made
        later = [*self._head.dense_matmul(ctx, head.dense, bucket), *self.sample(ctx, head.sample, bucket)]
        return [*made, *(self._head.gated(ctx, launch) for launch in later)]

    def _rope_attention(self, ctx: Context, group: RopeAttention, bucket: Bucket) -> list[Launch] | None:
        normed = self._norms_heads(group.rope)
        if bucket.tokens > 1 and not normed:
            return None
        made = self._attention_decode(ctx, group.attention, bucket, group.rope)
        before = head_norms(ctx, group.rope, bucket) if made and not normed else []
        return [*before, *made] if made else made

    def _norms_heads(self, rope: RopeAppend | None) -> bool:
        """Whether attention that rotates can also normalise the heads, if they are."""
        return rope is not None and norms_heads(rope) and self._hardware.buffers >= NORMED_BUFFERS

    def _quantises(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> bool:
        """Whether ternary_decode or ternary_groups_decode takes a product: of one token that fits shared memory, beside
        what reductions take."""
        w = ctx.ternary(op.weights)
        space = pitch(w.row_bytes // 16) * 64 + 16 * self._group + 64
        if w.group is not None:
            if not self._shares_groups(w):
                return False
            space += 2 * self._group // self._lanes(w) * (w.cols // w.group | 1) * 4
        return bucket.tokens == 1 and space <= self._hardware.shared

    def _shares_groups(self, w: TernaryBuffer) -> bool:
        """Whether ternary_groups_decode supports the groups: a row's invocations are in one subgroup, and all rows are
        bound at once."""
        parts = sum(1 for _ in self._hardware.windows(w.codes, w.rows))
        sized = w.group in DECODE_GROUPS and w.cols % w.group == 0
        return sized and bool(self._hardware.subgroup) and self._lanes(w) >= 4 and parts == 1

    def _decode(
        self,
        ctx: Context,
        op: TernaryMatmul,
        bucket: Bucket,
        source: ProductInput,
        out: Buffer,
        *,
        activation: str = "",
        conv: CausalConv | None = None,
    ) -> Launch:
        w = ctx.ternary(op.weights)
        chunks = w.row_bytes // 16
        defines = {"COLS": w.cols, "LANES": self._lanes(w), "INPUT": source.kind, **product_defines(op, activation)}
        defines |= {"CHUNKS": chunks, "PITCH": pitch(chunks)}
        args: tuple[Arg, ...] = (source.x, source.scale or source.x, source.gain(ctx), w.codes, w.scales, out)
        args = (*args, np.float32(source.eps), np.int32(w.rows))
        rows = w.rows // 2 if activation else w.rows
        grid = (ceil_div(rows, self._group // defines["LANES"]), 1, 1)
        if w.group is not None:
            sizes = group_defines(w)
            defines |= {"GROUP": sizes["GROUP"], "EACH": sizes["EACH"], "TERM_PITCH": w.cols // w.group | 1}
            if conv is not None:
                defines |= {"CONV": 1, "TAPS": ctx.program.weights[conv.weight].shape[1]}
                where = (ctx.offset(name) for name in ("token_seq", "state_from", "state_to"))
                args = (*args, ctx.step, ctx.dense(conv.weight).data, ctx.state(conv.state), *where)
            return launch("ternary_groups_decode", grid, self._group, args, defines)
        return launch("ternary_decode", grid, self._group, args, defines)

    def _lanes(self, w: TernaryBuffer) -> int:
        """Invocations that share a row of a product of few tokens: fewer where the grid would not reach all rows."""
        lanes = 8 if w.row_bytes // 16 < LONG_ROW else 16
        lanes = min(lanes, self._hardware.subgroup or lanes)  # they add their sums up within one
        while lanes > 1 and ceil_div(w.rows, self._gemv_group // lanes) > MAX_GROUPS:
            lanes //= 2
        return lanes

    def _attention_size(self, ctx: Context, op: Attention) -> dict[str, int] | None:
        """Constants of attention_decode, without the number of parts; None if it does not support the shape."""
        group, dim, lanes = op.heads // op.kv_heads, op.head_dim, self._hardware.subgroup
        chunk, loads = CHUNKS[ctx.cache.dtype], dim // wide(ctx)
        runs = min(power_of_two(max(self._group // max(loads, 1), 1)), chunk)
        if dim % wide(ctx) or group > 8 or runs < 2 or chunk > 8 * runs or group * chunk > 8 * self._group:
            return None
        defines = {**kv_defines(ctx, op), "GROUP": group, "RUNS": runs, "CHUNK": chunk}
        space = self._hardware.shared // 4 - (group * (dim + MAX_PARTS + 2) + 3 * dim + 64)
        shuffles = lanes and lanes % loads == 0 and runs * loads == self._group
        if shuffles and self._group // lanes * group * (dim + 2) <= space:
            return {**defines, "SUBGROUPS": 1}
        pool = max(chunk * (loads + 1), runs // 2 * group * dim // 4)
        return {**defines, "POOL": pool, "SUBGROUPS": 0} if 4 * pool + 2 * group * chunk <= space else None

    def _tiles_attention(self, op: Attention) -> bool:
        """Whether attention_prefill takes heads of this size; tokens of any sequences may be in the step."""
        quads, hardware = op.head_dim // 4, self._hardware
        shared = QUERY_TILE * ((quads + 1) * 24 + (QUERY_TILE + 1) * 4) + (QUERY_GROUP + 3 * QUERY_TILE) * 4
        return op.head_dim % 8 == 0 and shared <= hardware.shared and hardware.group >= QUERY_GROUP

    def _attention_decode(
        self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None
    ) -> list[Launch] | None:
        """Attention whose work-groups share positions; None where the step or the shape is not for it."""
        defines, limits = self._attention_size(ctx, op), ctx.program.limits
        if defines is None or (bucket.tokens > FEW_TOKENS and bucket.tokens != bucket.rows):
            return None
        chunk, wanted = defines["CHUNK"], ceil_div(ENOUGH_PARTS, bucket.tokens * op.kv_heads)
        seen = min(bucket.context, op.window or bucket.context)
        part = chunk * ceil_div(seen, chunk * min(wanted, MAX_PARTS))
        most = ceil_div(seen, part)
        defines |= {"PART": part, "MAX_PARTS": most, "WINDOW": op.window or 0, **rope_defines(rope)}
        tokens = max(limits.max_rows, min(limits.max_tokens, FEW_TOKENS))
        parts = ctx.scratch("attention parts", bucket.tokens * op.heads * most * (op.head_dim + 2) * 4)
        arrivals = ctx.zeroed("attention arrivals", tokens * op.kv_heads * 4)
        step, *place = positions(ctx, op.table)
        inputs = attention_inputs(ctx, op, rope, ctx.tensors[op.qkv])
        args: tuple[Arg, ...] = (step, *inputs, ctx.tensors[op.out], parts, arrivals, *place, np.int32(op.kv_heads))
        if rope is not None and (part_of := part_defines(ctx, rope)):
            defines |= {"PARTIAL": 1, "TURNED": part_of["PAIRS"]}
        if self._norms_heads(rope):
            args, defines = (*args, *head_norm_inputs(ctx, rope, step)), defines | {"NORMS_HEADS": 1}
        grid = (op.kv_heads, bucket.tokens, most)
        return [launch("attention_decode", grid, self._group, args, defines)]
