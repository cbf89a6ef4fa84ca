"""Lowers operations to WebGPU dispatches: grids and tuning.

A step of one token takes five kernels per layer: norm and quantisation are fused into the next product, the gate's
activation into the previous product, and rotation and KV cache update into attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, Dispatch, Launch, Lowering, launch, variants
from bitnet.core.gpu.drivers.windows import in_two, row_windows
from bitnet.core.gpu.fusions import NormHead, RopeAttention, RopeAttentionProduct
from bitnet.core.gpu.ops import RowOps, attention_inputs, ceil_div, kv_defines, positions, power_of_two, rope_defines
from bitnet.core.gpu.ops.group_products import in_parts
from bitnet.core.gpu.ops.products import NORM, fused_products, normed
from bitnet.core.gpu.ops.scaled import head_norms
from bitnet.core.gpu.ops.variants import (
    GroupScaledMatmul,
    NormedRope,
    WindowedAttention,
    embedder_variants,
    expert_variants,
    recurrent_variants,
)
from bitnet.core.hal import Attention, DeltaRule, DenseMatmul, Embed, NormRows, RopeAppend, Sample, TernaryMatmul
from bitnet.webgpu.products import Products

ALIGNMENT = 256
"""Alignment of a binding's offset in bytes, on every device."""
GROUP = 256
"""Invocations of a workgroup, unless a kernel has its own number: what every WebGPU device allows."""
EMULATED_GROUP = 32
"""Invocations of a workgroup of attention on an emulated device, which switches between them at each barrier."""
DENSE_ROWS = 8
"""Steps with more rows that need logits than this use the tiled head."""
TILE_SIDE = 16
"""Invocations along each side of a tile of the tiled head and attention."""
DENSE_LANES = 32
"""Invocations that share rows of a dense product."""
DENSE_EACH = 4
"""Rows that these invocations share, as in the kernel's source."""
DENSE_TILE = 8
"""Weight rows of an invocation of the tiled dense product."""
SAMPLE_GROUP = 1024
"""Maximum invocations that sample a token: a power of two, as they are reduced by halves."""
SPLIT_CONTEXT = 64
"""Minimum positions per workgroup of split attention."""
MERGED_SPLITS = 8
"""Maximum parts of attention if every workgroup of the product after it reads all of them."""
MAX_SPLITS = 32
ATTENTION_GROUPS = 256
"""Target number of workgroups of attention: positions are split until there are this many."""
MERGE_GROUP = 32
"""Invocations that merge the parts of a head."""
ATTENTION_TEAM = 4
"""Maximum query heads of a workgroup."""
ATTENTION_EACH = 4
"""Rows of an invocation of the tiled attention."""
ATTENTION_KEYS = 64
"""Positions that the tiled attention processes at a time, as in its source."""
ATTENTION_DEPTHS = (8, 4)
"""Choices for the quads of dimensions in workgroup memory at a time, the fastest first; the first that fits is used."""
PREFILL_TOKENS = 16
PREFILL_PER_ROW = 4
"""Minimum tokens of a step, and per row that needs logits, for the tiled attention to be faster."""
ATTENTION_SHARED = 5 * 1024
"""Bytes of workgroup memory that attention uses besides those of its heads."""
DENSE_SHARED = 6 * 1024
"""Bytes of workgroup memory that dense_matmul uses besides those of its row."""


class WebGPUOps:
    """The lowering for a device.

    Args:
        limits: The device's, under WebGPU's names.
        emulated: Whether a processor emulates it. Attention to prompts is then not tiled, as that kernel compiles for
            minutes, and takes small workgroups.
    """

    def __init__(self, limits: Mapping[str, int], *, emulated: bool = False) -> None:
        self._tiles = not emulated
        self._group = EMULATED_GROUP if emulated else GROUP
        self._binding = limits["max-storage-buffer-binding-size"]
        self._shared = limits["max-compute-workgroup-storage-size"]
        most = min(limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"])
        group = power_of_two(min(SAMPLE_GROUP, most))  # a limit need be no power of two
        self._rows = RowOps(group=GROUP)
        self._products = Products(self._windows, self._shared, self._binding)
        self._table: Dispatch = {
            **self._rows.table(),
            **variants(self._rows),
            Embed: self.embed,
            **in_parts(self._windows),
            TernaryMatmul: self._products.ternary_matmul,
            GroupScaledMatmul: self._products.ternary_matmul,
            RopeAppend: self.rope_append,
            NormedRope: self.rope_append,
            DenseMatmul: self.dense_matmul,
            Attention: self.attention,
            WindowedAttention: self.attention,
            Sample: RowOps(group=group).sample,
            NormHead: self._norm_head,
            RopeAttentionProduct: self._rope_attention_product,
            RopeAttention: self._rope_attention,
            **fused_products(self._products.decode, self._quantises),
            **expert_variants(self._rows, self._shared, self._windows),
        }
        self._recurrent = recurrent_variants(self._rows, self._table)
        embedder = embedder_variants(self._rows, self._table, self._products.ternary_matmul)
        self._table = {**self._table, **embedder, **self._recurrent, DeltaRule: self.delta_rule}

    def lowering(self) -> Lowering:
        """The lowering for :class:`bitnet.core.gpu.GpuDevice`."""
        return Lowering(self._table)

    def embed(self, ctx: Context, op: Embed, bucket: Bucket) -> list[Launch]:
        table = ctx.dense(op.table)
        rows, cols = table.shape
        made, grid, defines = [], (bucket.tokens, 1, 1), {"WEIGHT_F16": int(table.dtype == "f16")}
        for part, first, count in self._windows(table.data, rows):
            sizes = (np.int32(n) for n in (cols // 4, first, count))
            args = (ctx.step, part, ctx.tensors[op.out], ctx.offset("tokens"), *sizes)
            made.append(launch("embed", grid, GROUP, args, defines))
        return made

    def rope_append(self, ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        return [*head_norms(ctx, op, bucket), *self._rows.rope_append(ctx, op, bucket)]

    def delta_rule(self, ctx: Context, op: DeltaRule, bucket: Bucket) -> list[Launch]:
        """The shared launch, whose kernel is also told how many rows of a column an invocation has."""
        (made,) = self._recurrent[DeltaRule](ctx, op, bucket) or []
        defines = dict(made.kernel.defines)
        defines["ROWS"] = ceil_div(int(defines["D_K"]), int(defines["PARTS"]))
        return [replace(made, kernel=replace(made.kernel, defines=tuple(defines.items())))]

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        """A product of few rows reads each weight once; one of many goes by tiles."""
        if bucket.rows <= DENSE_ROWS:
            return self._dense(ctx, op, bucket, None)
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        each_m = next(n for n in (1, 2, 4) if TILE_SIDE * n >= bucket.rows or n == 4)
        defines = {"WEIGHT_F16": int(weight.dtype == "f16"), "EACH_M": each_m, "EACH_N": DENSE_TILE}
        defines |= {"X_LOADS": ceil_div(4 * each_m, TILE_SIDE), "W_LOADS": ceil_div(4 * DENSE_TILE, TILE_SIDE)}
        launches = []
        for part, first, count in self._windows(weight.data, rows):
            grid = (*in_two(ceil_div(count, TILE_SIDE * DENSE_TILE)), ceil_div(bucket.rows, TILE_SIDE * each_m))
            sizes = (np.uint32(n) for n in (cols // 4, count, first, rows))
            args: tuple[Arg, ...] = (ctx.step, ctx.tensors[op.x], part, ctx.tensors[op.out], *sizes)
            launches.append(launch("dense_gemm", grid, GROUP, args, defines))
        return launches

    def attention(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        """Prompts are tiled if the tiles fit workgroup memory; otherwise tokens are processed one by one."""
        depth = self._tile_depth(op, bucket)
        if not depth:
            return self._attention(ctx, op, bucket, None)
        defines, team = kv_defines(ctx, op), self._team(op)
        rows, quads = TILE_SIDE * ATTENTION_EACH, op.head_dim // 4
        parts = TILE_SIDE // ATTENTION_EACH
        defines |= {"TEAM": team, "EACH": ATTENTION_EACH, "DEPTH": depth, "STAGE": 4 * depth}
        defines |= {"EACH_D": ceil_div(quads, TILE_SIDE), "PARTS": parts, "EACH_P": ATTENTION_KEYS // 4 // parts}
        loads = {"Q_LOADS": depth * rows, "K_LOADS": depth * ATTENTION_KEYS, "V_LOADS": 4 * depth * quads}
        defines |= {"WINDOW": op.window or 0, **{name: ceil_div(n, GROUP) for name, n in loads.items()}}
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        step, *fields = positions(ctx, op.table)
        sizes = np.int32(op.heads), np.int32(op.kv_heads)
        args = (step, ctx.tensors[op.qkv], *cache, ctx.tensors[op.out], *fields, *sizes)
        grid = (ceil_div(bucket.tokens, rows // team), op.heads // team, 1)
        return [launch("attention_prefill", grid, GROUP, args, defines)]

    def _tile_depth(self, op: Attention, bucket: Bucket) -> int:
        """Quads of dimensions in workgroup memory at a time in tiled attention; 0: the step is not for it."""
        rows, quads = TILE_SIDE * ATTENTION_EACH, op.head_dim // 4
        fixed = 16 * rows * (ATTENTION_KEYS // 4 + 1) + 4 * (ATTENTION_KEYS + GROUP + rows)

        def fits(depth: int) -> bool:
            tile = depth * max(rows + ATTENTION_KEYS + 4, 4 * quads)
            return 16 * tile + fixed <= self._shared

        many = self._tiles and bucket.tokens >= max(PREFILL_TOKENS, PREFILL_PER_ROW * bucket.rows)
        return next(filter(fits, ATTENTION_DEPTHS), 0) if many else 0

    def _windows(self, matrix: Buffer, rows: int) -> Iterator[tuple[Buffer, int, int]]:
        """A matrix as parts that can be bound: the part, its first row, its rows."""
        return row_windows(matrix, rows, matrix.nbytes // rows, largest=self._binding, alignment=ALIGNMENT)

    def _norm_head(self, ctx: Context, group: NormHead, bucket: Bucket) -> list[Launch] | None:
        able = bucket.rows == 1 and self._norms(ctx, group.dense)
        return self._dense(ctx, group.dense, bucket, group.norm) if able else None

    def _rope_attention_product(self, ctx: Context, group: RopeAttentionProduct, bucket: Bucket) -> list[Launch] | None:
        """For one token, the product merges the parts of attention; for more, the quantisation before it does."""
        op, product, splits = group.attention, group.product, self._splits(group.attention, bucket)
        if splits > MERGED_SPLITS or not bucket.apart or self._tile_depth(op, bucket):
            return None
        one = bucket.tokens == 1
        if not (self._products.decodes(ctx, product, op.heads * MERGED_SPLITS) if one else splits > 1):
            return None
        parts, out = self._parts(ctx, op, bucket, splits), ctx.tensors[product.out]
        attention = self._attention(ctx, op, bucket, group.rope, parts)
        source = replace(normed(ctx, group.norm), x=parts)
        if one:
            merged = self._products.decode(ctx, product, bucket, source, out, splits=splits, head_dim=op.head_dim)
            return [*attention, merged]
        columns = op.heads * op.head_dim
        defines = {"COLS": columns, "NORM": int(source.kind == NORM), "HELD": ceil_div(columns // 4, GROUP)}
        defines |= {"MERGE": 1, "SPLITS": splits, "HEAD_QUADS": op.head_dim // 4}
        norm = ctx.tensors[group.norm.out], ctx.tensors[group.norm.scale]
        args = (ctx.step, parts, source.gain(ctx), *norm, np.float32(source.eps))
        merged = launch("merge_quant", (bucket.tokens, 1, 1), GROUP, args, defines)
        return [*attention, merged, *self._products.ternary_matmul(ctx, product, bucket)]

    def _rope_attention(self, ctx: Context, group: RopeAttention, bucket: Bucket) -> list[Launch] | None:
        if self._tile_depth(group.attention, bucket):
            return None
        return self._attention(ctx, group.attention, bucket, group.rope)

    def _quantises(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> bool:
        return bucket.tokens == 1 and self._products.decodes(ctx, op)

    def _norms(self, ctx: Context, op: DenseMatmul) -> bool:
        """Whether dense_matmul can norm its row: in f32 it fits workgroup memory."""
        return ctx.dense(op.weight).shape[1] * 4 + DENSE_SHARED <= self._shared

    def _dense(self, ctx: Context, op: DenseMatmul, bucket: Bucket, norm: NormRows | None) -> list[Launch]:
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        tokens = min(bucket.rows, DENSE_ROWS)
        f16 = weight.dtype == "f16"
        defines = {
            "WEIGHT_F16": int(f16),
            "WIDE": int(f16 and cols % 8 == 0),
            "LANES": DENSE_LANES,
            "TOKENS": tokens,
        }
        if norm:
            defines |= {"NORM": 1, "QUADS": cols // 4}
        x = ctx.tensors[norm.x if norm else op.x]
        norm_weight = ctx.dense(norm.weight).data if norm else x
        launches = []
        for part, first, count in self._windows(weight.data, rows):
            grid = (*in_two(ceil_div(count, GROUP // DENSE_LANES * DENSE_EACH)), ceil_div(bucket.rows, tokens))
            sizes = (np.uint32(n) for n in (cols // 4, count, first, rows))
            row, eps = np.uint32(ctx.offset("rows")), np.float32(norm.eps if norm else 0)
            args: tuple[Arg, ...] = (ctx.step, x, norm_weight, part, ctx.tensors[op.out], *sizes, row, eps)
            launches.append(launch("dense_matmul", grid, GROUP, args, defines))
        return launches

    def _splits(self, op: Attention, bucket: Bucket) -> int:
        """Parts in which tokens attend to their contexts."""
        units = ceil_div(_seen(op, bucket), SPLIT_CONTEXT)
        # Up to a context that this reaches with two units a part, more parts are not worth a launch that merges them.
        most = MERGED_SPLITS if units <= 2 * MERGED_SPLITS else MAX_SPLITS
        wanted = max(ATTENTION_GROUPS // (bucket.tokens * op.kv_heads), 1)
        return ceil_div(units, ceil_div(units, min(most, wanted)))

    def _parts(self, ctx: Context, op: Attention, bucket: Bucket, splits: int) -> Buffer:
        """Where the parts of a split attention go, or what is not split."""
        if splits == 1:
            return ctx.tensors[op.out]
        return ctx.scratch("attention parts", bucket.tokens * op.heads * splits * (op.head_dim // 4 + 1) * 16)

    def _team(self, op: Attention) -> int:
        """Query heads that share a workgroup of attention: as many of a key/value head's as its memory allows."""
        for team in range(ATTENTION_TEAM, 1, -1):
            needed = 4 * (team * op.head_dim + 6 * team * self._group // 4) + 12 * op.head_dim + ATTENTION_SHARED
            if (op.heads // op.kv_heads) % team == 0 and needed <= self._shared:
                return team
        return 1

    def _attention(
        self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None, unmerged: Buffer | None = None
    ) -> list[Launch]:
        """Its launches; those of a fused program leave the merging of parts to the reader of ``unmerged``."""
        norms = head_norms(ctx, rope, bucket) if rope else []
        defines, splits, team = kv_defines(ctx, op), self._splits(op, bucket), self._team(op)
        parts = unmerged or self._parts(ctx, op, bucket, splits)
        share = ceil_div(ceil_div(_seen(op, bucket), SPLIT_CONTEXT), splits) * SPLIT_CONTEXT
        defines |= {"TEAM": team, "SPLITS": splits, "SHARE": share, "SPLIT": int(splits > 1)}
        defines["WINDOW"] = op.window or 0
        defines |= {**rope_defines(rope), "ONE": int(rope is not None and bucket.tokens == 1)}
        quads, chunk = op.head_dim // 4, self._group // 4
        columns = min(quads, self._group)
        defines |= {
            "KEYS": ceil_div(quads, 4),
            "VALUES": ceil_div(chunk, self._group // columns),
            "EACH": ceil_div(quads, columns),
        }
        sizes = np.int32(op.heads), np.int32(op.kv_heads)
        step, *fields = positions(ctx, op.table)
        args = (step, *attention_inputs(ctx, op, rope, ctx.step), parts, *fields, *sizes)
        grid = bucket.tokens, op.heads // team, splits
        launches = [*norms, launch("attention", grid, self._group, args, defines)]
        if splits > 1 and unmerged is None:
            sizes_of = {"DIM": op.head_dim, "SPLITS": splits}
            given = (ctx.step, parts, ctx.tensors[op.out], np.uint32(op.heads))
            launches.append(launch("attention_merge", (bucket.tokens, op.heads, 1), MERGE_GROUP, given, sizes_of))
        return launches


def _seen(op: Attention, bucket: Bucket) -> int:
    """Maximum positions that a token attends to."""
    return min(bucket.context, op.window or bucket.context)
