"""The matrix products as OpenCL launches: ternary ones of few and of many tokens, and the head.

Where the device has matrix units that its driver lets kernels use, they are used; else dot products of four bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Bucket, Buffer, Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import RowOps, ceil_div
from bitnet.core.gpu.products import Source, product_args, quantised, row_sums
from bitnet.core.hal import DenseMatmul, TernaryMatmul

DECODE_TOKENS = 8
"""More tokens than this take the tiled product."""
CHUNK_BYTES = 16
HELD_CHUNKS = 16
"""Of codes that a work-item of a fused product may keep in registers."""
LEAST_LANES, MOST_LANES = 8, 64
TILE_ROWS = 8
"""Rows of W of a work-item of ternary_gemm, as its source has it."""
HEAD_LANES, HEAD_ROWS = 32, 4
WARP, MMA_ROWS, MMA_STEP = 32, 16, 64
"""Work-items of a warp; rows of W that it takes at a time in ternary_decode_mma, and bytes of codes of each."""
MOST_STEPS, MOST_WARPS = 6, 16
"""Of MMA_STEP for a warp of ternary_decode_mma, whose codes are in registers, and warps of a work-group."""
WANTED_WARPS = 8
"""On each compute unit, so that the weights of a product of few tokens are all in flight at once."""
STAGE_BYTES = 128, 32
"""Of a token and of a row of W in a stage of ternary_gemm_mma."""
HEAD_WARPS, HEAD_MMA_WARPS = 8, 8
"""Of a work-group of dense_decode and of dense_mma."""
HEAD_WARP_ROWS, HEAD_COLS = 32, 4096
"""Weight rows of a warp of dense_mma; the longest row of dense_decode, which is in registers."""


class Products:
    """The launches for a device of so many compute units, work-items of a group and bytes of local memory.

    Args:
        mma: Whether the kernels whose names end in ``_mma``, and ``dense_decode``, can be used.
    """

    def __init__(self, compute_units: int, group: int, local_bytes: int, *, mma: bool) -> None:
        self._units, self._group, self._local, self.mma = compute_units, group, local_bytes, mma
        self._rows = RowOps(group=group)

    def ternary_matmul(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, *, out: Buffer | None = None, activation: str = ""
    ) -> list[Launch]:
        """The operation, into ``out`` where given, with the activation after it where :meth:`gates` says so."""
        out = out or ctx.tensors[op.out]
        sums = self._row_sums(ctx, op, bucket)
        if bucket.tokens <= DECODE_TOKENS:
            x = Source(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
            return [*sums, self.decode(ctx, op, bucket, x, out, activation=activation)]
        return [*sums, self._tiled(ctx, op, bucket, out, activation)]

    def decode(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, source: Source, out: Buffer, *, activation: str = ""
    ) -> Launch:
        """A product of few tokens, with what comes before and after it where those can be fused."""
        w = ctx.ternary(op.weights)
        times = 2 if activation else 1
        defines = {
            "COLS": w.cols,
            "ROW_BYTES": w.row_bytes,
            "TOKENS": bucket.tokens,
            "INPUT": source.kind,
            "GLU": int(bool(activation)),
            "RELU2": int(activation == "relu2"),
            "ADD": int(op.add),
        }
        args = product_args(ctx, op, source, out)
        if self._decodes_mma(w):
            tiles, split = self._decode_shape(w)
            defines |= {"TILES": tiles, "KSPLIT": split}
            spec = KernelSpec("ternary_decode_mma", "ternary_decode_mma", tuple(defines.items()))
            groups = ceil_div(ceil_div(w.rows, MMA_ROWS), tiles)
            return Launch(spec, (groups, 1, 1), (WARP * tiles * split, 1, 1), args)
        lanes = self._lanes(w, times)
        groups = ceil_div(w.rows // times * lanes, self._group)
        return self._rows.launch("ternary_decode", groups, args, defines=defines | {"LANES": lanes})

    def _tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, activation: str) -> Launch:
        """A product of many tokens."""
        w = ctx.ternary(op.weights)
        x = ctx.tensors[op.x], ctx.tensors[op.scale], row_sums(ctx, op.x)
        args = (ctx.step, *x, w.codes, w.scales, out, np.int32(w.rows))
        defines = {"COLS": w.cols, "ROW_BYTES": w.row_bytes, "ADD": int(op.add)}
        if self._tiles_mma(w):
            defines |= {"GLU": int(bool(activation)), "RELU2": int(activation == "relu2")}
            tiles = self._tile_shape(w, bucket.tokens)
            spec = KernelSpec("ternary_gemm_mma", "ternary_gemm_mma", tuple((defines | tiles).items()))
            grid = (ceil_div(w.rows, tiles["BM"]), ceil_div(bucket.tokens, tiles["BN"]), 1)
            return Launch(spec, grid, (WARP * tiles["WARPS_N"] * tiles["WARPS_M"], 1, 1), args)
        side = 16 if self._group >= 128 else 8
        down = self._group // side
        each = min(4, ceil_div(bucket.tokens, down))
        defines |= {"TX": side, "TY": down, "EACH_M": each}
        spec = KernelSpec("ternary_gemm", "ternary_gemm", tuple(defines.items()))
        grid = (ceil_div(w.rows, side * TILE_ROWS), ceil_div(bucket.tokens, down * each), 1)
        return Launch(spec, grid, (self._group, 1, 1), args)

    def gates(self, w: TernaryBuffer) -> bool:
        """Whether the product of several tokens can apply the activation between its gates and ups."""
        return self._decodes_mma(w) and self._tiles_mma(w)

    def quantises(self, w: TernaryBuffer, tokens: int, *, times: int = 1) -> bool:
        """Whether a product can quantise its tokens: a work-group can hold them, and a work-item its codes."""
        if self._decodes_mma(w):
            held = tokens * (4 * w.row_bytes + 256 + 64) + MOST_WARPS * (WARP * 16 + 8)
            return tokens == 1 or (tokens <= DECODE_TOKENS and held <= self._local)
        if tokens > 1:
            return False
        local = 4 * w.row_bytes + self._group * (8 + 4 * times)
        chunks = ceil_div(w.row_bytes // CHUNK_BYTES, self._lanes(w, times))
        return local <= self._local and chunks * times <= HELD_CHUNKS

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        """Each weight row is read once for up to ``DECODE_TOKENS`` rows of x, with matrix units for up to 64."""
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        x, out, n = ctx.tensors[op.x], ctx.tensors[op.out], np.int32(rows)
        if self.mma and weight.dtype == "f16":
            if bucket.rows == 1 and cols % 256 == 0 and cols <= HEAD_COLS:
                spec = KernelSpec("dense_decode", "dense_decode", (("COLS", cols), ("WARPS", HEAD_WARPS)))
                block = (WARP * HEAD_WARPS, 1, 1)
                return [Launch(spec, (2 * self._units, 1, 1), block, (ctx.step, x, weight.data, out, n))]
            if cols % 8 == 0:
                tiles = min(ceil_div(bucket.rows, 8), 8)
                most = ctx.program.limits.max_rows
                split, scales = ctx.scratch("row halves", most * cols * 4), ctx.scratch("row scales", most * 4)
                sizes = ("COLS", cols), ("NT", tiles), ("WARPS", HEAD_MMA_WARPS)
                block = (WARP * HEAD_MMA_WARPS, 1, 1)
                grid = (ceil_div(rows, HEAD_MMA_WARPS * HEAD_WARP_ROWS), ceil_div(bucket.rows, 8 * tiles), 1)
                halves, product = (KernelSpec("dense_mma", entry, sizes) for entry in ("split_rows", "dense_mma"))
                return [
                    Launch(halves, (bucket.rows, 1, 1), block, (ctx.step, x, split, scales)),
                    Launch(product, grid, block, (ctx.step, split, scales, weight.data, out, n)),
                ]
        tokens = min(bucket.rows, DECODE_TOKENS)
        each = HEAD_ROWS if tokens == 1 else 1
        defines = {"WEIGHT_F16": int(weight.dtype == "f16"), "LANES": HEAD_LANES, "EACH": each, "TOKENS": tokens}
        args = (ctx.step, x, weight.data, out, np.int32(cols), n)
        launch = self._rows.launch("dense_matmul", 1, args, defines=defines)
        return [
            replace(launch, grid=(ceil_div(rows * HEAD_LANES, self._group * each), ceil_div(bucket.rows, tokens), 1))
        ]

    def _row_sums(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """What makes the sums of the operation's activations, where the program does not quantise them itself."""
        if quantised(op.x, ctx.program.ops):
            return []
        args = (ctx.step, ctx.tensors[op.x], row_sums(ctx, op.x))
        return [self._rows.launch("row_sums", bucket.tokens, args, defines={"COLS": ctx.shape(op.x)[1]})]

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        """Work-items that share a row: enough that every compute unit has a work-group."""
        wanted = self._units * self._group // (w.rows // times)
        most = min(MOST_LANES, self._group, power_of_two(w.row_bytes // CHUNK_BYTES))
        return max(min(power_of_two(max(wanted, 1)) * 2, most), min(LEAST_LANES, most))

    def _decodes_mma(self, w: TernaryBuffer) -> bool:
        """Whether ternary_decode_mma can multiply by it: a warp's codes fit its registers, and x in local memory."""
        fits = ceil_div(w.row_bytes, MMA_STEP) <= MOST_STEPS * MOST_WARPS and 4 * w.row_bytes + 4096 * 3 <= self._local
        return self.mma and fits

    def _decode_shape(self, w: TernaryBuffer) -> tuple[int, int]:
        """Row tiles of a work-group, and warps that share a tile's K: enough to have all weights in flight at once."""
        tiles, steps = ceil_div(w.rows, MMA_ROWS), ceil_div(w.row_bytes, MMA_STEP)
        wanted = min(max(1, round(self._units * WANTED_WARPS / tiles)), steps)
        split = min(ceil_div(steps, min(steps // wanted, MOST_STEPS)), MOST_WARPS)
        return max(1, min(round(tiles / self._units), MOST_WARPS // split)), split

    def _tiles_mma(self, w: TernaryBuffer) -> bool:
        """Whether ternary_gemm_mma can multiply by it: it takes the activations 16 bytes at a time."""
        return self.mma and w.cols % 16 == 0

    def _tile_shape(self, w: TernaryBuffer, tokens: int) -> dict[str, int]:
        """Of ternary_gemm_mma: tall tiles where those are enough for every compute unit."""
        token_tile = min(64, max(16, power_of_two(tokens)))
        tall = ceil_div(w.rows, 128) * ceil_div(tokens, token_tile) >= self._units * 3 // 4
        row_tile, warps = (128, (4, min(2, token_tile // 16))) if tall else (32, (2, token_tile // 16))
        stages = min(4, self._local // (STAGE_BYTES[0] * token_tile + STAGE_BYTES[1] * row_tile))
        tiles = {"BM": row_tile, "BN": token_tile, "STAGES": stages, "AHEAD": stages - 2}
        return tiles | {"WARPS_N": warps[0], "WARPS_M": warps[1]}


def power_of_two(n: int) -> int:
    """The greatest that is no larger than ``n``."""
    return 1 << (n.bit_length() - 1)
