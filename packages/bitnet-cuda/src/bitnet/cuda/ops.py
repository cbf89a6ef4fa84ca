"""Grids and tuning: the matrix products and attention as CUDA launches; the rest is as on every GPU.

A step of one token is lowered to five kernels a layer: norm and quantisation go into the product after them, the gate's
activation into the product before it, the rotation and the cache's new entry into attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, KernelSources, KernelSpec, Launch, Lowering, TernaryBuffer
from bitnet.core.gpu.fusion import feeds, read_again
from bitnet.core.gpu.ops import ROW_OPS, Dispatch, RowOps, advance, ceil_div, kv_defines, positions
from bitnet.core.hal import (
    Attention,
    DenseMatmul,
    GluNormQuant,
    NormQuant,
    NormRows,
    Op,
    RopeAppend,
    Sample,
    TernaryMatmul,
)

ENTRY = r"^extern \"C\" __global__ void (?:IN_CLUSTER )?(?:__launch_bounds__\([^\n]*\)\s*)?(\w+)\("
SOURCES = KernelSources("bitnet.cuda", "cuda", ending=".cu", common="common.cuh", entry=ENTRY)
DECODE_TOKENS = 8
"""More tokens than this take a tiled product."""
GEMV_ROWS = 4
LANES, TILE_M, TILE_N, TILE_GROUP = 32, 32, 64, 256
"""Of the tiled product, as its source has them."""
SHARED = 200 * 1024
"""Bytes of shared memory that a block of ternary_decode may take."""
EARLY_BYTES = 3 << 20
"""Codes of a product of one token, up to which the next kernel's do not get in its way."""
MAX_STEPS = 96
"""Longest K of ternary_decode, in steps of 256: 16 warps with 6 each."""
STAGES, X_PITCH, W_PITCH, TOKEN_TILES = 4, 160, 32, (64, 128)
"""Of ternary_mma, as its source has them."""
WGMMA_STAGES = 5
"""Of ternary_wgmma, as its source has them."""
MIN_TILES = 4
"""Of 128 of K: the least a block of ternary_wgmma should have."""
HEAD_ROWS, HEAD_PITCH = 256, 192
"""Weight rows of a block of dense_mma, and bytes of a half row of x in its shared memory."""
QUERY_TILE = 64
"""Tokens of a block of attention_prefill."""
SAMPLE_GROUP = 1024
WARPS = 8
"""Wanted on each multiprocessor by a product of few tokens, so that its weights are all in flight at once."""
TILE_ROWS = 16
SPLIT = 64
"""Positions that are worth a block of attention of their own."""
MAX_SPLITS = 64
MAX_CLUSTER = 8
"""Blocks of a cluster on every device that has clusters."""
CLUSTERS = (9, 0)
"""Compute capability from which there are clusters."""
WGMMA = (9, 0)
"""The one compute capability that has wgmma."""
ROPE_WARPS = 8
ATTENTION_BLOCKS = 3
"""Blocks of attention_decode on each multiprocessor, at most, for which a sequence is split."""
NO_NORM, NORM = 1, 2
"""INPUT of ternary_decode: f32 to quantise, without and with RMSNorm before it. 0: already int8."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a product takes its activations: int8 with scales, or f32 of one token, quantised in the kernel."""

    x: Buffer
    kind: int = 0
    scale: Buffer | None = None
    norm: str | None = None
    eps: float = 0.0


class CudaOps:
    """The lowering for a device of ``multiprocessors`` and a compute capability such as ``(9, 0)``."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int]) -> None:
        self._multiprocessors = multiprocessors
        self._tensor_cores = capability >= (8, 0)  # mma of 8-bit integers with 32 of K
        self._clusters, self._wgmma = capability >= CLUSTERS, capability == WGMMA
        self._rows = RowOps(group=256)
        self._table: Dispatch = {
            **self._rows.table(),
            NormQuant: self.norm_quant,
            GluNormQuant: self.glu_norm_quant,
            TernaryMatmul: self.ternary_matmul,
            DenseMatmul: self.dense_matmul,
            RopeAppend: self.rope_append,
            Attention: self.attention,
            NormRows: lambda *given: _overlapping(self._rows.norm_rows(*given)),
            Sample: lambda *given: _overlapping(RowOps(group=SAMPLE_GROUP).sample(*given)),
        }

    def lowering(self) -> Lowering:
        """What :class:`bitnet.core.gpu.GpuDevice` takes."""
        return Lowering(self.step, advance)

    def step(self, ctx: Context, bucket: Bucket) -> list[Launch]:
        """The program's launches, fused where a bucket and the neighbouring operations allow it."""
        ops = [op for op in ctx.program.ops if bucket.rows or not isinstance(op, ROW_OPS)]
        launches: list[Launch] = []
        at = 0
        while at < len(ops):
            made, taken = self._fused(ctx, ops, at, bucket)
            launches += made
            at += taken
        return launches

    def norm_quant(self, ctx: Context, op: NormQuant, bucket: Bucket) -> list[Launch]:
        return [self._norm_quant(ctx, op, ctx.tensors[op.x], ctx.shape(op.x)[1], bucket)]

    def glu_norm_quant(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        gate_up = ctx.tensors[op.gate_up]
        weight = ctx.dense(op.weight).data if op.weight else gate_up
        outs = ctx.tensors[op.out], ctx.tensors[op.scale], _sums(ctx, op.out)
        defines = {"DIM": ctx.shape(op.gate_up)[1] // 2, "NORM": int(op.weight is not None)}
        defines["RELU2"] = int(op.activation == "relu2")
        args = (ctx.step, gate_up, weight, np.float32(op.eps), *outs)
        return [replace(self._rows.launch("glu_norm_quant", bucket.tokens, args, defines=defines), overlaps=True)]

    def ternary_matmul(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        x, scale, out = ctx.tensors[op.x], ctx.tensors[op.scale], ctx.tensors[op.out]
        w = ctx.ternary(op.weights)
        if self._decodes(w, bucket):
            return [*self._row_sums(ctx, op, bucket), self._decode(ctx, op, bucket, Source(x, scale=scale), out)]
        if self._tensor_cores and w.cols % 16 == 0:
            return [*self._row_sums(ctx, op, bucket), self._tiled(ctx, op, bucket, out)]
        args = (ctx.step, x, scale, w.codes, w.scales, out, np.int32(w.rows))
        shape = (("COLS", w.cols), ("ROW_BYTES", w.row_bytes), ("ADD", int(op.add)))
        defines = (*shape, ("ROWS", GEMV_ROWS), ("TOKENS", min(bucket.tokens, DECODE_TOKENS)))
        if bucket.tokens <= DECODE_TOKENS:
            spec, block = KernelSpec("ternary_matmul", "ternary_gemv", defines), (LANES, GEMV_ROWS, 1)
            return [Launch(spec, (ceil_div(w.rows, GEMV_ROWS), 1, 1), block, args)]
        grid = (ceil_div(w.rows, TILE_N), ceil_div(bucket.tokens, TILE_M), 1)
        return [Launch(KernelSpec("ternary_matmul", "ternary_gemm", defines), grid, (TILE_GROUP, 1, 1), args)]

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        x, out, n = ctx.tensors[op.x], ctx.tensors[op.out], np.int32(rows)
        if weight.dtype == "f16" and cols % 256 == 0 and cols <= 4096 and bucket.rows == 1:
            spec = KernelSpec("dense_decode", "dense_decode", (("COLS", cols), ("TOKENS", 1), ("WARPS", WARPS)))
            grid, block = (2 * self._multiprocessors, 1, 1), (32 * WARPS, 1, 1)
            return [Launch(spec, grid, block, (ctx.step, x, weight.data, out, n), overlaps=True)]
        if weight.dtype == "f16" and cols % 8 == 0 and self._tensor_cores:
            tiles = min(ceil_div(bucket.rows, 8), 8)
            most = ctx.program.limits.max_rows
            halves, scales = ctx.scratch("row halves", most * cols * 4), ctx.scratch("row scales", most * 4)
            sizes = (("COLS", cols), ("NT", tiles))
            split, product = (KernelSpec("dense_mma", entry, sizes) for entry in ("split_rows", "dense_mma"))
            grid = (ceil_div(rows, HEAD_ROWS), ceil_div(bucket.rows, 8 * tiles), 1)
            args = (ctx.step, halves, scales, weight.data, out, n)
            shared = 2 * tiles * 16 * HEAD_PITCH
            return [
                Launch(split, (bucket.rows, 1, 1), (256, 1, 1), (ctx.step, x, halves, scales), overlaps=True),
                Launch(product, grid, (HEAD_ROWS, 1, 1), args, shared=shared, overlaps=True),
            ]
        tokens = min(bucket.rows, DECODE_TOKENS)
        defines = (("WEIGHT_F16", int(weight.dtype == "f16")), ("ROWS", GEMV_ROWS), ("TOKENS", tokens))
        args = (ctx.step, x, weight.data, out, np.int32(cols), n)
        grid = (ceil_div(rows, GEMV_ROWS), ceil_div(bucket.rows, tokens), 1)
        return [Launch(KernelSpec("dense_matmul", "dense_matmul", defines), grid, (LANES, GEMV_ROWS, 1), args)]

    def rope_append(self, ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        tensors = ctx.tensors[op.qkv], ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        args = (*positions(ctx), *tensors, ctx.dense(op.cos).data, ctx.dense(op.sin).data)
        sizes = {"HEADS": op.heads, "KV_HEADS": op.kv_heads, "WARPS": ROPE_WARPS, "NEOX": int(op.style == "neox")}
        spec = KernelSpec("rope_append", "rope_append", tuple((kv_defines(ctx, op) | sizes).items()))
        grid = (bucket.tokens, ceil_div(op.heads + 2 * op.kv_heads, ROPE_WARPS), 1)
        return [Launch(spec, grid, (32 * ROPE_WARPS, 1, 1), args, overlaps=True)]

    def attention(self, ctx: Context, op: Attention, bucket: Bucket) -> list[Launch]:
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        tensors = ctx.tensors[op.qkv], *cache, ctx.tensors[op.out]
        if self._splits_attention(ctx, op, bucket):
            return [self._attention_decode(ctx, op, bucket, rope=None)]
        defines = kv_defines(ctx, op)
        if self._tensor_cores and defines["KV_F16"] and op.head_dim in (64, 128):
            defines |= {"HEADS": op.heads, "KV_HEADS": op.kv_heads}
            spec = KernelSpec("attention_prefill", "attention_prefill", tuple(defines.items()))
            tiles = bucket.tokens // QUERY_TILE + min(bucket.tokens, ctx.program.limits.max_seqs)
            shared = 4 * QUERY_TILE * (op.head_dim + 8) * 2
            args = (*positions(ctx), *tensors)
            return [Launch(spec, (op.heads, tiles, 1), (256, 1, 1), args, shared=shared, overlaps=True)]
        args = (*positions(ctx), *tensors, np.int32(op.heads), np.int32(op.kv_heads))
        spec = KernelSpec("attention", "attention", (("WG", self._rows.group), *defines.items()))
        return [Launch(spec, (bucket.tokens, op.heads, 1), (self._rows.group, 1, 1), args)]

    def _fused(self, ctx: Context, ops: Sequence[Op], at: int, bucket: Bucket) -> tuple[list[Launch], int]:
        """Launches for the operations from ``at`` on, and how many operations they do."""
        alone = self._table[type(ops[at])]
        if ctx.program.keep or not self._tensor_cores:
            return alone(ctx, ops[at], bucket), 1
        if bucket.tokens > 1:
            match ops[at : at + 2]:
                case [TernaryMatmul() as up, GluNormQuant() as glu] if self._gates(ctx, up, glu, ops[at + 2 :], bucket):
                    return self._gated(ctx, up, glu, bucket), 2
            return alone(ctx, ops[at], bucket), 1
        match ops[at : at + 4]:
            case [RopeAppend() as rope, Attention() as op, *_] if (rope.qkv, rope.layer) == (op.qkv, op.layer):
                if self._splits_attention(ctx, op, bucket):
                    return [self._attention_decode(ctx, op, bucket, rope)], 2
            case [NormQuant() as n, TernaryMatmul() as up, GluNormQuant() as glu, TernaryMatmul() as down] if (
                feeds(n, up, ops[at + 2 :])
                and feeds(glu, down, ops[at + 4 :])
                and self._gates(ctx, up, glu, ops[at + 3 :], bucket)
                and self._decodes(ctx.ternary(up.weights), bucket)
                and self._decodes(ctx.ternary(down.weights), bucket)
            ):
                return self._feed_forward(ctx, n, up, glu, down, bucket), 4
            case [NormQuant() as n, TernaryMatmul() as op, *_] if feeds(n, op, ops[at + 2 :]):
                if self._decodes(ctx.ternary(op.weights), bucket):
                    return [self._decode(ctx, op, bucket, _normed(ctx, n), ctx.tensors[op.out])], 2
        return alone(ctx, ops[at], bucket), 1

    def _feed_forward(
        self, ctx: Context, n: NormQuant, up: TernaryMatmul, glu: GluNormQuant, down: TernaryMatmul, bucket: Bucket
    ) -> list[Launch]:
        width = ctx.shape(glu.gate_up)[1] // 2
        product = ctx.scratch("glu products", ctx.program.limits.max_tokens * width * 4)
        source = Source(product, NORM if glu.weight else NO_NORM, norm=glu.weight, eps=glu.eps)
        return [
            self._decode(ctx, up, bucket, _normed(ctx, n), product, activation=glu.activation),
            self._decode(ctx, down, bucket, source, ctx.tensors[down.out]),
        ]

    def _gates(self, ctx: Context, up: TernaryMatmul, glu: GluNormQuant, later: Sequence[Op], bucket: Bucket) -> bool:
        """Whether the product ``up`` can apply ``glu``'s activation: no one else reads it, and its kernel knows how."""
        w = ctx.ternary(up.weights)
        able = self._decodes(w, bucket) or w.cols % 16 == 0
        return able and up.out == glu.gate_up and not up.add and not read_again(up.out, later)

    def _gated(self, ctx: Context, up: TernaryMatmul, glu: GluNormQuant, bucket: Bucket) -> list[Launch]:
        width = ctx.shape(glu.gate_up)[1] // 2
        product = ctx.scratch("glu products", ctx.program.limits.max_tokens * width * 4)
        x = Source(ctx.tensors[up.x], scale=ctx.tensors[up.scale])
        if self._decodes(ctx.ternary(up.weights), bucket):
            launch = self._decode(ctx, up, bucket, x, product, activation=glu.activation)
        else:
            launch = self._tiled(ctx, up, bucket, product, activation=glu.activation)
        return [*self._row_sums(ctx, up, bucket), launch, self._norm_quant(ctx, glu, product, width, bucket)]

    def _norm_quant(self, ctx: Context, op: NormQuant | GluNormQuant, x: Buffer, width: int, bucket: Bucket) -> Launch:
        weight = ctx.dense(op.weight).data if op.weight else x
        args = (ctx.step, x, weight, np.float32(op.eps), ctx.tensors[op.out], ctx.tensors[op.scale], _sums(ctx, op.out))
        defines = {"DIM": width, "NORM": int(op.weight is not None)}
        return replace(self._rows.launch("norm_quant", bucket.tokens, args, defines=defines), overlaps=True)

    def _row_sums(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """What makes the sums of the operation's activations, where the program does not quantise them itself."""
        if any(isinstance(o, NormQuant | GluNormQuant) and o.out == op.x for o in ctx.program.ops):
            return []
        spec = KernelSpec("row_sums", "row_sums", (("COLS", ctx.shape(op.x)[1]),))
        args = (ctx.step, ctx.tensors[op.x], _sums(ctx, op.x))
        return [Launch(spec, (bucket.tokens, 1, 1), (32, 1, 1), args, overlaps=True)]

    def _decode(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, source: Source, out: Buffer, *, activation: str = ""
    ) -> Launch:
        w = ctx.ternary(op.weights)
        tiles, split = self._shape(w.rows, w.row_bytes, bucket.tokens)
        defines = {
            "COLS": w.cols,
            "ROW_BYTES": w.row_bytes,
            "TOKENS": bucket.tokens,
            "TILES": tiles,
            "KSPLIT": split,
            "INPUT": source.kind,
            "EARLY": int(bucket.tokens == 1 and w.codes.nbytes <= EARLY_BYTES),
            "GLU": int(bool(activation)),
            "RELU2": int(activation == "relu2"),
            "ADD": int(op.add),
        }
        norm = ctx.dense(source.norm).data if source.norm else source.x
        sums = source.x if source.kind else _sums(ctx, op.x)
        args: tuple[Arg, ...] = (ctx.step, source.x, source.scale or source.x, sums, norm, np.float32(source.eps))
        args = (*args, w.codes, w.scales, out, np.int32(w.rows))
        grid = (ceil_div(ceil_div(w.rows, TILE_ROWS), tiles), 1, 1)
        spec = KernelSpec("ternary_decode", "ternary_decode", tuple(defines.items()))
        shared = _stride(w) * (1 if source.kind else bucket.tokens)
        return Launch(spec, grid, (32 * tiles * split, 1, 1), args, shared=shared, overlaps=True)

    def _decodes(self, w: TernaryBuffer, bucket: Bucket) -> bool:
        """Whether ternary_decode can do a product of so many tokens."""
        few = self._tensor_cores and bucket.tokens <= DECODE_TOKENS
        return few and ceil_div(w.row_bytes, 64) <= MAX_STEPS and _stride(w) * bucket.tokens <= SHARED

    def _tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, *, activation: str = "") -> Launch:
        w = ctx.ternary(op.weights)
        token_tile = TOKEN_TILES[bucket.tokens > TOKEN_TILES[0]]
        token_tiles = ceil_div(bucket.tokens, token_tile)
        defines = {
            "COLS": w.cols,
            "ROW_BYTES": w.row_bytes,
            "BN": token_tile,
            "GLU": int(bool(activation)),
            "RELU2": int(activation == "relu2"),
            "ADD": int(op.add),
        }
        x = ctx.tensors[op.x], ctx.tensors[op.scale], _sums(ctx, op.x)
        args = (ctx.step, *x, w.codes, w.scales, out, np.int32(w.rows))
        if self._wgmma:
            row_tile = 256 if ceil_div(w.rows, 256) * token_tiles >= self._multiprocessors else 128
            row_tiles = ceil_div(w.rows, row_tile)
            blocks = 5 * self._multiprocessors // 2
            depth = w.row_bytes // 32

            def fits(n: int) -> bool:
                grid = row_tiles * token_tiles * n
                return grid <= blocks and depth // n >= (MIN_TILES if grid <= self._multiprocessors else 2 * MIN_TILES)

            split = _largest(4, fits)
            tiles = ("BM", row_tile), ("KSPLIT", split if row_tile == 128 else 1)
            spec = KernelSpec("ternary_wgmma", "ternary_wgmma", (*defines.items(), *tiles))
            shared = 1024 + WGMMA_STAGES * (token_tile * 128 + row_tile * W_PITCH)
            grid = (row_tiles, token_tiles, tiles[1][1])
            return Launch(spec, grid, (2 * row_tile, 1, 1), args, shared=shared, overlaps=True)
        row_tile = 128 if ceil_div(w.rows, 128) * token_tiles >= self._multiprocessors * 3 // 4 else 64
        spec = KernelSpec("ternary_gemm", "ternary_mma", (*defines.items(), ("BM", row_tile)))
        shared = STAGES * (token_tile * X_PITCH + row_tile * W_PITCH)
        grid = (ceil_div(w.rows, row_tile), token_tiles, 1)
        return Launch(spec, grid, (256, 1, 1), args, shared=shared, overlaps=True)

    def _shape(self, rows: int, row_bytes: int, tokens: int) -> tuple[int, int]:
        """Row tiles of a block, and the warps that share a tile's K: enough warps to have all weights in flight."""
        tiles, steps = ceil_div(rows, TILE_ROWS), ceil_div(row_bytes, 64)
        wanted = max(1, round(self._multiprocessors * WARPS / tiles))
        each = max(1, steps // min(wanted, steps))
        split = min(ceil_div(steps, min(each, 6)), 16)
        least = 1
        if tokens > 2:  # then every block's copy of x costs more than a warp's share of K
            least, split = 2, min(split, max(5, ceil_div(steps, 6)))
        return max(min(least, 16 // split), min(round(tiles / self._multiprocessors), 16 // split)), split

    def _splits_attention(self, ctx: Context, op: Attention, bucket: Bucket) -> bool:
        kv = ctx.program.kv
        assert kv is not None
        fits = self._tensor_cores and op.head_dim in (64, 128, 256) and op.heads // op.kv_heads <= 8
        decoding = bucket.tokens <= DECODE_TOKENS or bucket.tokens == bucket.rows
        return fits and kv.dtype == "f16" and decoding

    def _attention_decode(self, ctx: Context, op: Attention, bucket: Bucket, rope: RopeAppend | None) -> Launch:
        limit = max(ctx.program.limits.max_rows, min(ctx.program.limits.max_tokens, DECODE_TOKENS))
        heads, splits = bucket.tokens * op.kv_heads, ceil_div(bucket.context, SPLIT)
        if self._clusters:
            most = min(splits, MAX_CLUSTER)
            splits = _largest(
                MAX_CLUSTER, lambda n: n <= most and heads * n <= ATTENTION_BLOCKS * self._multiprocessors
            )
            parts = arrivals = ctx.step  # not used
        else:
            splits = min(splits, MAX_SPLITS)
            parts = ctx.scratch("attention parts", limit * op.heads * MAX_SPLITS * (op.head_dim + 2) * 4)
            arrivals = ctx.zeroed("attention arrivals", limit * op.kv_heads * 4)
        long = bucket.context > SPLIT * splits and heads * splits <= self._multiprocessors
        warps = 8 if long else 4
        defines = kv_defines(ctx, op) | {
            "HEADS": op.heads,
            "KV_HEADS": op.kv_heads,
            "SPLITS": splits,
            "CLUSTER": int(self._clusters and splits > 1),
            "WARPS": warps,
            "ROPE": int(rope is not None),
            "NEOX": int(rope is not None and rope.style == "neox"),
        }
        tables = (ctx.dense(rope.cos).data, ctx.dense(rope.sin).data) if rope else (ctx.step, ctx.step)
        cache = ctx.kv("k", op.layer), ctx.kv("v", op.layer)
        args = (*positions(ctx), ctx.tensors[op.qkv], *cache, *tables, ctx.tensors[op.out], parts, arrivals)
        spec = KernelSpec("attention_decode", "attention_decode", tuple(defines.items()))
        return Launch(spec, (op.kv_heads, bucket.tokens, splits), (32 * warps, 1, 1), args, overlaps=True)


def _overlapping(launches: list[Launch]) -> list[Launch]:
    return [replace(launch, overlaps=True) for launch in launches]


def _normed(ctx: Context, op: NormQuant) -> Source:
    return Source(ctx.tensors[op.x], NORM if op.weight else NO_NORM, norm=op.weight, eps=op.eps)


def _stride(w: TernaryBuffer) -> int:
    """Bytes of a token in the shared memory of ternary_decode."""
    return ceil_div(w.row_bytes // 16, 4) * 256 + 64


def _sums(ctx: Context, name: str) -> Buffer:
    """The sums of the rows of a quantised tensor, which norm_quant makes and ternary_mma takes."""
    return ctx.scratch(f"sums of {name}", ctx.program.limits.max_tokens * 4)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest power of two up to ``most`` that fits, or 1. Clusters of other sizes were slower."""
    n = most
    while n > 1 and not fits(n):
        n //= 2
    return n
