"""Grids and tuning: what each operation launches.

A step of one token is lowered to five kernels a layer: norm and quantisation go into the product after them, the gate's
activation into the product before it, the rotation and the cache's new entry into attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, KernelSpec, Launch, Lowering
from bitnet.core.gpu.fusion import feeds, lower, read_again
from bitnet.core.gpu.ops import Dispatch, RowOps, advance, ceil_div, kv_defines, positions
from bitnet.core.hal import (
    Attention,
    DenseMatmul,
    Embed,
    GluNormQuant,
    NormQuant,
    NormRows,
    Op,
    RopeAppend,
    Sample,
    TernaryMatmul,
)
from bitnet.webgpu.device import ALIGNMENT, WebGPUBuffer

GROUP = 256
"""Invocations of a workgroup, unless a kernel has its own number: what every WebGPU device allows."""
GEMV_TOKENS = 8
"""More tokens than this take the tiled product."""
GEMV_LANES = 16
TILE_M, TILE_N = 64, 128
"""Of the tiled product, as its source has them."""
DENSE_LANES, DENSE_EACH = 32, 4
"""Invocations that share rows of a dense product, and how many rows, as its source has it."""
MAX_GROUPS = 65535
"""Workgroups in one dimension, on every device."""
SAMPLE_GROUP = 1024
ATTENTION_GROUP, DECODE_ATTENTION_GROUP = 128, 256
SPLIT_CONTEXT = 128
"""Positions that are worth a workgroup of decode attention of their own."""
MAX_SPLITS = 8
"""Parts of attention, each of which every workgroup of the product after it reads."""
DECODE_SHARED = 5 * 1024
DENSE_SHARED = 6 * 1024
"""Bytes of workgroup memory that ternary_decode and dense_matmul take besides their row."""


def windows(buffer: Buffer, rows: int, row_bytes: int, most: int) -> Iterator[tuple[int, int, Buffer]]:
    """A matrix in parts that can be bound: first row, rows and place of each; one if it has at most ``most`` bytes."""
    assert isinstance(buffer, WebGPUBuffer)
    # As many rows as fit, but a multiple of ALIGNMENT, so that every part starts at a multiple of it.
    each = rows if rows * row_bytes <= most else max(most // row_bytes // ALIGNMENT, 1) * ALIGNMENT
    for first in range(0, rows, each):
        count = min(each, rows - first)
        yield first, count, buffer.window(first * row_bytes, count * row_bytes)


def in_two(groups: int) -> tuple[int, int]:
    """A number of workgroups as a grid of two dimensions, each as large as a device allows; some may be too many."""
    rows = ceil_div(groups, MAX_GROUPS)
    return ceil_div(groups, rows), rows


class WebGPUOps:
    """The lowering for a device with these limits, in WebGPU's names."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._binding = limits["max-storage-buffer-binding-size"]
        self._shared = limits["max-compute-workgroup-storage-size"]
        group = min(
            SAMPLE_GROUP, limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]
        )
        rows = RowOps(group=GROUP)
        self._table: Dispatch = {
            **rows.table(),
            Embed: self.embed,
            TernaryMatmul: self.ternary_matmul,
            DenseMatmul: self.dense_matmul,
            Attention: self.attention,
            Sample: RowOps(group=group).sample,
        }

    def lowering(self) -> Lowering:
        """What :class:`bitnet.core.gpu.GpuDevice` takes."""
        return Lowering(self.step, advance)

    def step(self, ctx: Context, bucket: Bucket) -> list[Launch]:
        """The program's launches, fused where the step is one token and nothing between the operations is asked for."""
        return lower(ctx, bucket, lambda ops, at: self._fused(ctx, ops, at, bucket))

    def embed(self, ctx: Context, op: Embed, bucket: Bucket) -> list[Launch]:
        table = ctx.dense(op.table)
        rows, cols = table.shape
        spec = KernelSpec("embed", "embed", (("WEIGHT_F16", int(table.dtype == "f16")),))
        quads = np.int32(cols // 4)
        return [
            Launch(
                spec,
                (bucket.tokens, 1, 1),
                (GROUP, 1, 1),
                (ctx.step, part, ctx.tensors[op.out], ctx.offset("tokens"), quads, np.int32(first), np.int32(count)),
            )
            for first, count, part in windows(table.data, rows, table.data.nbytes // rows, self._binding)
        ]

    def ternary_matmul(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """A product of few tokens reads each weight once; one of many goes by tiles."""
        w = ctx.ternary(op.weights)
        gemv = bucket.tokens <= GEMV_TOKENS
        defines = {"ALIGNED": int(w.cols % 128 == 0), "ADD": int(op.add), "GEMV": int(gemv)}
        if gemv:
            defines |= {"LANES": GEMV_LANES, "TOKENS": bucket.tokens}
        spec = KernelSpec("ternary_matmul", "ternary_gemv" if gemv else "ternary_gemm", tuple(defines.items()))
        x = ctx.tensors[op.x], ctx.tensors[op.scale]
        launches = []
        for first, rows, codes in windows(w.codes, w.rows, w.row_bytes, self._binding):
            if gemv:
                grid = (*in_two(ceil_div(rows, GROUP // GEMV_LANES)), 1)
            else:
                grid = (ceil_div(rows, TILE_N), ceil_div(bucket.tokens, TILE_M), 1)
            sizes = (np.uint32(n) for n in (w.cols, rows, first, w.rows))
            args: tuple[Arg, ...] = (ctx.step, *x, codes, w.scales, ctx.tensors[op.out], *sizes)
            launches.append(Launch(spec, grid, (GROUP, 1, 1), args))
        return launches

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        return self._dense(ctx, op, bucket, None)

    def attention(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        return self._attention(ctx, op, bucket, None)

    def _fused(self, ctx: Context, ops: Sequence[Op], at: int, bucket: Bucket) -> tuple[list[Launch], int]:
        """Launches for the operations from ``at`` on, and how many operations they do."""
        alone = self._table[type(ops[at])](ctx, ops[at], bucket), 1
        if ctx.program.keep:
            return alone
        match ops[at : at + 4]:
            case [NormRows() as n, DenseMatmul() as op, *later] if (
                bucket.rows == 1 and n.out == op.x and DenseMatmul not in map(type, later) and self._norms(ctx, op)
            ):
                return self._dense(ctx, op, bucket, n), 2
            case _ if bucket.tokens > 1:
                return alone
            case [RopeAppend() as rope, Attention() as op, NormQuant() as n, TernaryMatmul() as o] if (
                (rope.qkv, rope.layer) == (op.qkv, op.layer)
                and op.out == n.x
                and feeds(n, o, ops[at + 4 :])
                and not _attended(op.out, ops[at + 4 :])
                and self._decodes(ctx, o, op.heads * self._splits(bucket))
            ):
                splits = self._splits(bucket)
                parts = self._parts(ctx, op, splits)
                launches = self._attention(ctx, op, bucket, rope, parts)
                made = self._decode(ctx, o, n, parts, ctx.tensors[o.out], splits=splits, head_dim=op.head_dim)
                return [*launches, made], 4
            case [RopeAppend() as rope, Attention() as op, *_] if (rope.qkv, rope.layer) == (op.qkv, op.layer):
                return self._attention(ctx, op, bucket, rope), 2
            case [NormQuant() as n, TernaryMatmul() as up, GluNormQuant() as glu, TernaryMatmul() as down] if (
                feeds(n, up, ops[at + 2 :])
                and feeds(glu, down, ops[at + 4 :])
                and up.out == glu.gate_up
                and not up.add
                and not read_again(up.out, ops[at + 3 :])
                and self._decodes(ctx, up)
                and self._decodes(ctx, down)
            ):
                width = ctx.shape(glu.gate_up)[1] // 2
                product = ctx.scratch("glu products", ctx.program.limits.max_tokens * width * 4)
                x = ctx.tensors[n.x]
                return [
                    self._decode(ctx, up, n, x, product, activation=glu.activation),
                    self._decode(ctx, down, glu, product, ctx.tensors[down.out]),
                ], 4
            case [NormQuant() as n, TernaryMatmul() as op, *_] if feeds(n, op, ops[at + 2 :]) and self._decodes(
                ctx, op
            ):
                return [self._decode(ctx, op, n, ctx.tensors[n.x], ctx.tensors[op.out])], 2
        return alone

    def _decodes(self, ctx: Context, op: TernaryMatmul, factors: int = 0) -> bool:
        """Whether ternary_decode can do a product: row and factors fit workgroup memory, its weights a binding."""
        w = ctx.ternary(op.weights)
        groups = ceil_div(w.rows, GROUP // _lanes(w.row_bytes))
        fits = 4 * (w.row_bytes + factors) + DECODE_SHARED <= self._shared and w.codes.nbytes <= self._binding
        return fits and groups < MAX_GROUPS

    def _decode(
        self,
        ctx: Context,
        op: TernaryMatmul,
        norm: NormQuant | GluNormQuant,
        x: Buffer,
        out: Buffer,
        *,
        activation: str = "",
        splits: int = 1,
        head_dim: int = 4,
    ) -> Launch:
        w = ctx.ternary(op.weights)
        rows, lanes = w.rows // (2 if activation else 1), _lanes(w.row_bytes)
        defines = {
            "COLS": w.cols,
            "LANES": lanes,
            "NORM": int(norm.weight is not None),
            "GLU": int(bool(activation)),
            "RELU2": int(activation == "relu2"),
            "ADD": int(op.add),
        }
        if splits > 1:
            defines |= {"MERGE": 1, "SPLITS": splits, "HEAD_QUADS": head_dim // 4}
        weight = ctx.dense(norm.weight).data if norm.weight else x
        args = (x, weight, w.codes, w.scales, out, np.uint32(rows), np.float32(norm.eps))
        spec = KernelSpec("ternary_decode", "ternary_decode", tuple(defines.items()))
        return Launch(spec, (ceil_div(rows, GROUP // lanes), 1, 1), (GROUP, 1, 1), args)

    def _norms(self, ctx: Context, op: DenseMatmul) -> bool:
        """Whether dense_matmul can norm its row: in f32 it fits workgroup memory."""
        return ctx.dense(op.weight).shape[1] * 4 + DENSE_SHARED <= self._shared

    def _dense(self, ctx: Context, op: DenseMatmul, bucket: Bucket, norm: NormRows | None) -> list[Launch]:
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        tokens = min(bucket.rows, GEMV_TOKENS)
        f16 = weight.dtype == "f16"
        defines = {
            "WEIGHT_F16": int(f16),
            "WIDE": int(f16 and cols % 8 == 0),
            "LANES": DENSE_LANES,
            "TOKENS": tokens,
        }
        if norm:
            defines |= {"NORM": 1, "QUADS": cols // 4}
        spec = KernelSpec("dense_matmul", "dense_matmul", tuple(defines.items()))
        x = ctx.tensors[norm.x if norm else op.x]
        norm_weight = ctx.dense(norm.weight).data if norm else x
        launches = []
        for first, count, part in windows(weight.data, rows, weight.data.nbytes // rows, self._binding):
            grid = (*in_two(ceil_div(count, GROUP // DENSE_LANES * DENSE_EACH)), ceil_div(bucket.rows, tokens))
            sizes = (np.uint32(n) for n in (cols // 4, count, first, rows))
            row, eps = np.uint32(ctx.offset("rows")), np.float32(norm.eps if norm else 0)
            args: tuple[Arg, ...] = (ctx.step, x, norm_weight, part, ctx.tensors[op.out], *sizes, row, eps)
            launches.append(Launch(spec, grid, (GROUP, 1, 1), args))
        return launches

    def _splits(self, bucket: Bucket) -> int:
        """Parts in which one token attends to its context."""
        return min(ceil_div(bucket.context, SPLIT_CONTEXT), MAX_SPLITS) if bucket.tokens == 1 else 1

    def _parts(self, ctx: Context, op: Attention, splits: int) -> Buffer:
        """Where the parts of a split attention go, or what is not split."""
        if splits == 1:
            return ctx.tensors[op.out]
        return ctx.scratch("attention parts", op.heads * splits * (op.head_dim // 4 + 1) * 16)

    def _attention(
        self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None, unmerged: Buffer | None = None
    ) -> list[Launch]:
        """Its launches; those of a fused program leave the merging of parts to the reader of ``unmerged``."""
        defines, splits = kv_defines(ctx, op), self._splits(bucket)
        parts = unmerged or self._parts(ctx, op, splits)
        defines |= {"SPLITS": splits, "SPLIT": int(splits > 1), "ROPE": int(rope is not None)}
        defines |= {"NEOX": int(rope is not None and rope.style == "neox")}
        tables = (ctx.dense(rope.cos).data, ctx.dense(rope.sin).data) if rope else (ctx.step, ctx.step)
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        sizes = np.int32(op.heads), np.int32(op.kv_heads)
        step, *fields = positions(ctx)
        args = (step, ctx.tensors[op.qkv], *cache, *tables, parts, *fields, *sizes)
        spec = KernelSpec("attention", "attention", tuple(defines.items()))
        group = DECODE_ATTENTION_GROUP if bucket.tokens == 1 else ATTENTION_GROUP
        launches = [Launch(spec, (bucket.tokens, op.heads, splits), (group, 1, 1), args)]
        if splits > 1 and unmerged is None:
            merge = KernelSpec("attention_merge", "attention_merge", (("DIM", op.head_dim), ("SPLITS", splits)))
            given = (ctx.step, parts, ctx.tensors[op.out], np.uint32(op.heads))
            launches.append(Launch(merge, (bucket.tokens, op.heads, 1), (32, 1, 1), given))
        return launches


def _attended(name: str, later: Sequence[Op]) -> bool:
    """Whether a later operation reads what an attention wrote before one makes it anew."""
    for op in later:
        if isinstance(op, Attention) and op.out == name:
            return False
        if name in astuple(op):
            return True
    return False


def _lanes(row_bytes: int) -> int:
    """Invocations that share a row of ternary_decode: each has about three vec4s of it, all asked for at once."""
    lanes = 8
    while lanes < 32 and row_bytes > 64 * lanes:
        lanes *= 2
    return lanes
