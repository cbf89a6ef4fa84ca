"""Products on NVIDIA's matrix units: for one and several tokens, tiled for many tokens, and the output head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitnet.core.gpu.clc.products import (
    DECODE_TOKENS,
    Products,
    decode_defines,
    paired,
    tiled_defines,
)
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div, next_power_of_two, power_of_two
from bitnet.core.gpu.ops.pairs import Pair
from bitnet.core.gpu.ops.products import ProductInput, product_args, tiled_args
from bitnet.core.gpu.ops.tables import row_digits, table_of
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import DenseMatmul, Embed, TernaryMatmul

WARP = 32
"""Work-items of a warp."""
MMA_ROWS = 16
"""Rows of W that a warp of ternary_decode_mma processes at a time."""
MMA_STEP = 64
"""Bytes of codes of each of these rows that it processes at a time."""
MAX_STEPS = 6
"""Maximum steps of MMA_STEP bytes for a warp of ternary_decode_mma, which holds them in registers."""
MAX_WARPS = 16
"""Maximum warps of a work-group of ternary_decode_mma."""
WANTED_WARPS = 8
"""Target number of warps per compute unit, so that all weight loads of a product of few tokens are in flight at
once."""
GROUPS = (32, 64, 128, 256)
"""Columns of a group of ternary_groups_mma."""
TERM_BYTES = 14 << 10
"""Maximum local memory of ternary_groups_mma for the terms of all steps."""
MAX_GROUP_WARPS = 12
"""Maximum warps of a work-group of ternary_groups_mma, which need more registers."""
WANTED_GROUP_WARPS = 12
"""As WANTED_WARPS, of ternary_groups_mma."""
SPLIT_GROUPS = 8
"""Warps of ternary_groups_mma that share a tile's K, where it does not quantise its input."""
MANY_TILES = 6
"""Tiles a compute unit from which half of them share a tile of one token: fewer meetings of warps."""
MAX_DEPTH = 8
"""Maximum steps of MMA_STEP bytes whose loads a warp of ternary_groups_mma has in flight."""
TABLE_GROUPS, TABLE_ROWS, TABLE_WARPS, DIGITS_GROUP = (32, 64, 128), 8, 4, 256
"""Columns of a group that heads of ternary tables may have; rows of x, and tiles of 16 rows of W, of a work-group; and
the work-items of a row in table_digits."""
STAGE_BYTES = 128, 32
"""Bytes of a token, and of a row of W, in a stage of ternary_gemm_mma."""
HEAD_WARPS = 8
"""Warps of a work-group of dense_decode."""
HEAD_MMA_WARPS = 8
"""Warps of a work-group of dense_mma."""
HEAD_WARP_ROWS = 32
"""Weight rows of a warp of dense_mma."""
HEAD_COLS = 4096
"""Maximum columns of dense_decode, which holds a row in registers."""


class NvidiaProducts(Products):
    """Launches for devices whose driver builds ``nvidia/warps``."""

    def decode(
        self,
        ctx: Context,
        op: TernaryMatmul,
        bucket: Bucket,
        source: ProductInput,
        out: Buffer,
        *,
        activation: str = "",
    ) -> Launch:
        w = ctx.ternary(op.weights)
        if not self._decodes(w):
            return super().decode(ctx, op, bucket, source, out, activation=activation)
        return self._decode(ctx, op, bucket, source, out, w, activation)

    def pair(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, pair: Pair) -> Launch:
        if not self._decodes(pair.first):
            return super().pair(ctx, op, bucket, pair)
        both = replace(pair.first, rows=pair.first.rows + pair.second.rows)
        x = ProductInput(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
        launch = self._decode(ctx, op, bucket, x, pair.convolved, both, "")
        return paired(launch, launch.grid, pair)

    def _decode(
        self,
        ctx: Context,
        op: TernaryMatmul,
        bucket: Bucket,
        source: ProductInput,
        out: Buffer,
        w: TernaryBuffer,
        activation: str,
    ) -> Launch:
        """A product of few tokens by matrix units, with work-groups for all rows of ``w``."""
        shape = self._decode_shape(w) if w.group is None else self._group_shape(w, bucket.tokens, source.kind)
        tiles, split = shape["TILES"], shape["KSPLIT"]
        name = "ternary_decode_mma" if w.group is None else "ternary_groups_mma"
        defines = decode_defines(w, op, bucket, source, activation) | shape
        spec = KernelSpec(f"nvidia/{name}", name, tuple(defines.items()))
        groups = ceil_div(ceil_div(w.rows, MMA_ROWS), tiles)
        return Launch(spec, (groups, 1, 1), (WARP * tiles * split, 1, 1), product_args(ctx, op, source, out))

    def tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, *, activation: str = "") -> Launch:
        w = ctx.ternary(op.weights)
        if not self._tiles(w):
            return super().tiled(ctx, op, bucket, out, activation=activation)
        tiles = self._tile_shape(w, bucket.tokens)
        defines = tiled_defines(w, op) | {"GLU": int(bool(activation)), "RELU2": int(activation == "relu2")} | tiles
        spec = KernelSpec("nvidia/ternary_gemm_mma", "ternary_gemm_mma", tuple(defines.items()))
        grid = (ceil_div(w.rows, tiles["BM"]), ceil_div(bucket.tokens, tiles["BN"]), 1)
        block = (WARP * tiles["WARPS_N"] * tiles["WARPS_M"], 1, 1)
        return Launch(spec, grid, block, tiled_args(ctx, op, out))

    def gates(self, w: TernaryBuffer) -> bool:
        return self._decodes(w) and self._tiles(w)

    def quantises(self, w: TernaryBuffer, tokens: int, *, times: int = 1) -> bool:
        if not self._decodes(w):
            return super().quantises(w, tokens, times=times)
        held = tokens * (4 * w.row_bytes + 256 + 64) + MAX_WARPS * (WARP * 16 + 8)
        return tokens == 1 or (w.group is None and tokens <= DECODE_TOKENS and held <= self._local)

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        """Each weight row is read once for up to 64 rows of x."""
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        x, out, n = ctx.tensors[op.x], ctx.tensors[op.out], np.int32(rows)
        if weight.dtype == "f16" and bucket.rows == 1 and cols % 256 == 0 and cols <= HEAD_COLS:
            spec = KernelSpec("nvidia/dense_decode", "dense_decode", (("COLS", cols), ("WARPS", HEAD_WARPS)))
            block = (WARP * HEAD_WARPS, 1, 1)
            return [Launch(spec, (2 * self._units, 1, 1), block, (ctx.step, x, weight.data, out, n))]
        if weight.dtype == "f16" and cols % 8 == 0:
            tiles = min(ceil_div(bucket.rows, 8), 8)
            most = ctx.program.limits.max_rows
            split, scales = ctx.scratch("row halves", most * cols * 4), ctx.scratch("row scales", most * 4)
            sizes = ("COLS", cols), ("NT", tiles), ("WARPS", HEAD_MMA_WARPS)
            block = (WARP * HEAD_MMA_WARPS, 1, 1)
            grid = (ceil_div(rows, HEAD_MMA_WARPS * HEAD_WARP_ROWS), ceil_div(bucket.rows, 8 * tiles), 1)
            halves, product = (KernelSpec("nvidia/dense_mma", entry, sizes) for entry in ("split_rows", "dense_mma"))
            return [
                Launch(halves, (bucket.rows, 1, 1), block, (ctx.step, x, split, scales)),
                Launch(product, grid, block, (ctx.step, split, scales, weight.data, out, n)),
            ]
        return super().dense_matmul(ctx, op, bucket)

    def table(self, ctx: Context, op: Embed | DenseMatmul, bucket: Bucket) -> list[Launch]:
        """A head is multiplied with three int8 digits of each activation, as exact sums for each group."""
        w = table_of(ctx, op)
        if isinstance(op, Embed) or w.group not in TABLE_GROUPS or w.cols % w.group:
            return super().table(ctx, op, bucket)
        each, (digits, units) = min(bucket.rows, TABLE_ROWS), row_digits(ctx, w)
        sizes = {"COLS": w.cols, "GROUP": w.group}
        split = KernelSpec("nvidia/table_digits", "table_digits", tuple({**sizes, "WG": DIGITS_GROUP}.items()))
        shape = {"ROW_BYTES": w.row_bytes, "TOKENS": each, "INPUT": 0, "GLU": 0, "RELU2": 0, "ADD": 0, "TABLE": 1}
        steps = ceil_div(w.row_bytes, MMA_STEP)
        shape |= {"TILES": TABLE_WARPS, "KSPLIT": 1, "DEPTH": min(steps, 4 if each <= 4 else 2), "SPAN": 1}
        spec = KernelSpec("nvidia/ternary_groups_mma", "ternary_groups_mma", tuple((sizes | shape).items()))
        grid = (ceil_div(w.rows, MMA_ROWS * TABLE_WARPS), ceil_div(bucket.rows, each), 1)
        args = (ctx.step, digits, units, digits, digits, np.float32(0), w.codes, w.scales, ctx.tensors[op.out])
        return [
            Launch(split, (bucket.rows, 1, 1), (DIGITS_GROUP, 1, 1), (ctx.step, ctx.tensors[op.x], digits, units)),
            Launch(spec, grid, (WARP * TABLE_WARPS, 1, 1), (*args, np.int32(w.rows))),
        ]

    def _decodes(self, w: TernaryBuffer) -> bool:
        """Whether ternary_decode_mma or, with scales of groups, ternary_groups_mma supports this weight: a warp's codes
        fit its registers, and x fits local memory."""
        if w.group is not None:
            return w.group in GROUPS and w.cols % w.group == 0 and 4 * w.row_bytes + 2 * TERM_BYTES <= self._local
        return ceil_div(w.row_bytes, MMA_STEP) <= MAX_STEPS * MAX_WARPS and 4 * w.row_bytes + 4096 * 3 <= self._local

    def _decode_shape(self, w: TernaryBuffer) -> dict[str, int]:
        """Row tiles per work-group, and warps that share a tile's K: enough to have all weight loads in flight at
        once."""
        tiles, steps = ceil_div(w.rows, MMA_ROWS), ceil_div(w.row_bytes, MMA_STEP)
        wanted = min(max(1, round(self._units * WANTED_WARPS / tiles)), steps)
        split = min(ceil_div(steps, min(steps // wanted, MAX_STEPS)), MAX_WARPS)
        return {"TILES": max(1, min(round(tiles / self._units), MAX_WARPS // split)), "KSPLIT": split}

    def _group_shape(self, w: TernaryBuffer, tokens: int, kind: int = 0) -> dict[str, int]:
        """Preprocessor constants of ternary_groups_mma: as of :meth:`_decode_shape`, steps whose loads are in flight,
        and steps of each warp whose terms are in local memory.

        Work-groups that quantise the token take several tiles, so that few do it. Others take one: a compute unit then
        does not wait for the last of a few large ones.
        """
        assert w.group is not None
        tiles, steps = ceil_div(w.rows, MMA_ROWS), ceil_div(w.row_bytes, MMA_STEP)
        wanted, quantises = SPLIT_GROUPS, kind != 0
        if quantises:
            wanted = next_power_of_two(ceil_div(self._units * WANTED_GROUP_WARPS, tiles))
        elif tokens == 1 and ceil_div(steps, SPLIT_GROUPS) > MAX_DEPTH:
            wanted = MAX_GROUP_WARPS
        elif tokens == 1 and tiles >= MANY_TILES * self._units:
            wanted = SPLIT_GROUPS // 2
        split = min(wanted, steps, MAX_GROUP_WARPS)
        taken = MAX_GROUP_WARPS // split if quantises else 1
        each, per = ceil_div(steps, split), 256 // w.group
        span = each if taken * MMA_ROWS * tokens * (each * split * per | 1) * 4 <= TERM_BYTES else 1
        return {"TILES": taken, "KSPLIT": split, "DEPTH": min(each, MAX_DEPTH), "SPAN": span}

    def _tiles(self, w: TernaryBuffer) -> bool:
        """Whether ternary_gemm_mma supports this weight: it reads activations 16 bytes at a time."""
        return w.cols % 16 == 0

    def _tile_shape(self, w: TernaryBuffer, tokens: int) -> dict[str, int]:
        """Preprocessor constants of ternary_gemm_mma: tall tiles if there are enough for all compute units; with scales
        of groups, whose sums take more registers, ones of fewer warps."""
        token_tile = min(64, max(16, power_of_two(tokens)))
        enough = ceil_div(w.rows, 128) * ceil_div(tokens, token_tile) >= self._units * 3 // 4
        tall = enough and w.group is None
        row_tile, warps = (128, (4, min(2, token_tile // 16))) if tall else (32, (2, token_tile // 16))
        for side in (128, token_tile) if w.group is not None else ():
            if ceil_div(w.rows, 64) * ceil_div(tokens, side) >= 2 * self._units:
                token_tile, row_tile, warps = side, 64, (2, min(2, side // 16))
                break
        stages = min(4, self._local // (STAGE_BYTES[0] * token_tile + STAGE_BYTES[1] * row_tile))
        tiles = {"BM": row_tile, "BN": token_tile, "STAGES": stages, "AHEAD": stages - 2}
        return tiles | {"WARPS_N": warps[0], "WARPS_M": warps[1]}
