"""Launches of matrix products in OpenCL C: ternary products for few and for many tokens, and the output head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops import RowOps, ceil_div, power_of_two
from bitnet.core.gpu.ops.pairs import Pair
from bitnet.core.gpu.ops.products import ProductInput, product_args, product_defines, quantised, row_sums, tiled_args
from bitnet.core.gpu.ops.scaled import TERMS, group_grid, group_layout, group_shape
from bitnet.core.gpu.ops.tables import table_launches
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import DenseMatmul, Embed, TernaryMatmul

DECODE_TOKENS = 8
"""Steps with more tokens than this use the tiled product."""
MAX_GROUP = 256
"""Default maximum of work-items in a work-group."""
CHUNK_BYTES = 16
"""Bytes of codes in one load."""
HELD_CHUNKS = 16
"""Maximum chunks of codes that a work-item of a fused product holds in registers."""
MIN_LANES, MAX_LANES = 8, 64
TILE_ROWS = 8
"""Rows of W of a work-item of ternary_gemm, as its source has it."""
HEAD_LANES, HEAD_ROWS = 32, 4


class Products:
    """Launches for a device, with dot products of four bytes.

    Classes for matrix units derive from this one, and fall back to it for shapes that the units do not support.
    """

    def __init__(self, abilities: Abilities) -> None:
        self._units, self._local = abilities.compute_units, abilities.local_bytes
        self._group = power_of_two(min(abilities.group, MAX_GROUP))
        self._rows = RowOps(group=self._group)
        self._group_chunks = HELD_CHUNKS  # of a work-item of a fused product with scales of groups

    def ternary_matmul(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, *, out: Buffer | None = None, activation: str = ""
    ) -> list[Launch]:
        """Launches of the operation, into ``out`` if given, followed by ``activation`` if :meth:`gates` allows it."""
        out = out or ctx.tensors[op.out]
        sums = self._row_sums(ctx, op, bucket)
        if bucket.tokens <= DECODE_TOKENS:
            x = ProductInput(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
            return [*sums, self.decode(ctx, op, bucket, x, out, activation=activation)]
        return [*sums, self.tiled(ctx, op, bucket, out, activation=activation)]

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
        """A product of few tokens, with the operations fused before and after it."""
        w, times = ctx.ternary(op.weights), 2 if activation else 1
        if w.group is not None:
            return self._groups(ctx, op, bucket, source, out, activation=activation)
        lanes = self._lanes(w, times)
        groups = ceil_div(w.rows // times * lanes, self._group)
        defines = decode_defines(w, op, bucket, source, activation) | {"LANES": lanes}
        return self._rows.launch("ternary_decode", groups, product_args(ctx, op, source, out), defines=defines)

    def pair(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, pair: Pair) -> Launch:
        """Two products of few tokens, and the convolution of the first one, which is ``op``."""
        x = ProductInput(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
        launch = self._groups(ctx, op, bucket, x, pair.convolved, activation="")
        more, _, _ = group_grid(pair.second, bucket.tokens, group_shape(pair.first, bucket.tokens))
        return paired(launch, (launch.grid[0] + more, launch.grid[1], 1), pair)

    def tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, *, activation: str = "") -> Launch:
        """A product of many tokens."""
        w = ctx.ternary(op.weights)
        if w.group is not None:
            x = ProductInput(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
            return self._groups(ctx, op, bucket, x, out, activation=activation)
        side = 16 if self._group >= 128 else 8
        down = self._group // side
        each = min(4, ceil_div(bucket.tokens, down))
        defines = tiled_defines(w, op) | {"TX": side, "TY": down, "EACH_M": each}
        spec = KernelSpec("ternary_gemm", "ternary_gemm", tuple(defines.items()))
        grid = (ceil_div(w.rows, side * TILE_ROWS), ceil_div(bucket.tokens, down * each), 1)
        return Launch(spec, grid, (self._group, 1, 1), tiled_args(ctx, op, out))

    def gates(self, w: TernaryBuffer) -> bool:
        """Whether the product of several tokens can apply the activation between its gates and ups."""
        return False

    def quantises(self, w: TernaryBuffer, tokens: int, *, times: int = 1) -> bool:
        """Whether a product can quantise its own input: tokens fit a work-group, and codes fit a work-item."""
        if tokens > 1:
            return False
        if w.group is not None:
            return self._fused_groups(w, times) is not None
        local = 4 * w.row_bytes + self._group * (8 + 4 * times)
        chunks = ceil_div(w.row_bytes // CHUNK_BYTES, self._lanes(w, times))
        return local <= self._local and chunks * times <= HELD_CHUNKS

    def _groups(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, source: ProductInput, out: Buffer, *, activation: str
    ) -> Launch:
        """A product of weights with scales of groups, of any number of tokens."""
        w = ctx.ternary(op.weights)
        shape = self._fused_groups(w, 2 if activation else 1) if source.kind else group_shape(w, bucket.tokens)
        assert shape is not None
        defines = shape | {"INPUT": source.kind, **product_defines(op, activation)}
        spec = KernelSpec("ternary_groups", "ternary_groups", tuple(defines.items()))
        args = product_args(ctx, op, source, out)
        return Launch(spec, group_grid(w, bucket.tokens, defines), (defines["WG"], 1, 1), args)

    def _fused_groups(self, w: TernaryBuffer, times: int) -> dict[str, int] | None:
        """Preprocessor constants of a product of one token that quantises its own input, with ``times`` rows of W for
        each result; None if its codes do not fit a work-item, or its terms and activations a work-group."""
        shape, layout = group_shape(w, 1), group_layout(w)
        units = ceil_div(layout.count, layout.sets)
        lanes, most = min(self._lanes(w, times), power_of_two(units)), min(MAX_LANES, self._group)
        pitch = layout.count // 2 * 2 + 1
        while True:
            terms = self._group // lanes * times * pitch
            held = ceil_div(units, lanes) * 2 * layout.blocks * times
            local = 4 * (w.row_bytes + terms) + 8 * self._group
            if terms <= TERMS and held <= self._group_chunks and local <= self._local:
                return shape | {"WG": self._group, "LANES": lanes, "HELD": times}
            if lanes >= most:
                return None
            lanes *= 2

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        """Each weight row is read once for up to ``DECODE_TOKENS`` rows of x."""
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        tokens = min(bucket.rows, DECODE_TOKENS)
        each = HEAD_ROWS if tokens == 1 else 1
        defines = {"WEIGHT_F16": int(weight.dtype == "f16"), "LANES": HEAD_LANES, "EACH": each, "TOKENS": tokens}
        args = (ctx.step, ctx.tensors[op.x], weight.data, ctx.tensors[op.out], np.int32(cols), np.int32(rows))
        launch = self._rows.launch("dense_matmul", 1, args, defines=defines)
        return [
            replace(launch, grid=(ceil_div(rows * HEAD_LANES, self._group * each), ceil_div(bucket.rows, tokens), 1))
        ]

    def table(self, ctx: Context, op: Embed | DenseMatmul, bucket: Bucket) -> list[Launch]:
        """``embed`` or ``dense_matmul`` of a ternary table."""
        return table_launches(ctx, op, bucket)

    def _row_sums(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """The launch that computes the sums of the activations, if no operation of the program quantises them; products
        of weights with scales of groups need none."""
        if quantised(op.x, ctx.program.ops) or ctx.ternary(op.weights).group is not None:
            return []
        args = (ctx.step, ctx.tensors[op.x], row_sums(ctx, op.x))
        return [self._rows.launch("row_sums", bucket.tokens, args, defines={"COLS": ctx.shape(op.x)[1]})]

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        """Work-items that share a row: enough to give every compute unit a work-group."""
        wanted = self._units * self._group // (w.rows // times)
        most = min(MAX_LANES, self._group, power_of_two(w.row_bytes // CHUNK_BYTES))
        return max(min(power_of_two(max(wanted, 1)) * 2, most), min(MIN_LANES, most))


def decode_defines(
    w: TernaryBuffer, op: TernaryMatmul, bucket: Bucket, source: ProductInput, activation: str
) -> dict[str, int]:
    """Preprocessor constants of every kernel for products of few tokens."""
    return {
        "COLS": w.cols,
        "ROW_BYTES": w.row_bytes,
        "TOKENS": bucket.tokens,
        "INPUT": source.kind,
        **product_defines(op, activation),
        **group_defines(w),
    }


def group_defines(w: TernaryBuffer) -> dict[str, int]:
    """The preprocessor constant of kernels that know scales of groups: the columns of one."""
    return {"GROUP": w.group} if w.group is not None else {}


def tiled_defines(w: TernaryBuffer, op: TernaryMatmul) -> dict[str, int]:
    """Preprocessor constants of every kernel for products of many tokens."""
    return {"COLS": w.cols, "ROW_BYTES": w.row_bytes, "ADD": int(op.add), **group_defines(w)}


def paired(launch: Launch, grid: tuple[int, int, int], pair: Pair) -> Launch:
    """The launch of a first product with the second one's work-groups."""
    kernel = replace(launch.kernel, defines=(*launch.kernel.defines, *pair.defines.items()))
    return replace(launch, kernel=kernel, grid=grid, args=(*launch.args, *pair.args(pair.second.codes)))
