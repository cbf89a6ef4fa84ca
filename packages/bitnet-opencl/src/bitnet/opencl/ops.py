"""Grids and tuning: the operations as OpenCL launches; what is not here is as on every GPU.

A step of one token is lowered to six launches a layer: norm and quantisation go into the product after them, the gate's
activation into the product before it, the rotation and the cache's new entry into attention, whose parts are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, KernelSources, KernelSpec, Launch, Lowering, TernaryBuffer
from bitnet.core.gpu.fusion import Source, feed_forward, feeds, lower, normed, quantised, read_again, row_sums
from bitnet.core.gpu.ops import Dispatch, RowOps, advance, ceil_div
from bitnet.core.hal import Attention, DenseMatmul, GluNormQuant, NormQuant, Op, RopeAppend, Sample, TernaryMatmul
from bitnet.opencl.attention import AttentionOps

ENTRY = r"^kernel (?:__attribute__\(\(.*\)\) )?void (\w+)\("
SOURCES = KernelSources("bitnet.opencl", "opencl", ending=".cl", common="common.clh", entry=ENTRY)
DECODE_TOKENS = 8
"""More tokens than this take the tiled product."""
CHUNK_BYTES = 16
HELD_CHUNKS = 16
"""Of codes that a work-item of a fused product may keep in registers."""
LEAST_LANES, MOST_LANES = 8, 64
TILE_ROWS = 8
"""Rows of W of a work-item of ternary_gemm, as its source has it."""
HEAD_LANES, HEAD_ROWS = 32, 4


class OpenCLOps:
    """The lowering for a device.

    Args:
        compute_units: Of the device.
        group: Work-items of a work-group at most.
        local_bytes: Local memory of a work-group at most.
        gpu: Whether it is one: a CPU gains nothing by large work-groups, and its compiler takes long for them.
    """

    def __init__(self, compute_units: int, group: int, local_bytes: int, *, gpu: bool) -> None:
        self._units, self._local = compute_units, local_bytes
        self._group = _power_of_two(min(group, 256))
        self._rows = RowOps(group=self._group)
        self._attention = AttentionOps(compute_units, self._group, local_bytes)
        samples = RowOps(group=_power_of_two(min(group, 1024))) if gpu else self._rows
        self._table: Dispatch = {
            **self._rows.table(),
            NormQuant: self.norm_quant,
            GluNormQuant: self.glu_norm_quant,
            TernaryMatmul: self.ternary_matmul,
            DenseMatmul: self.dense_matmul,
            Attention: self._attention.lower,
            Sample: samples.sample,
        }

    def lowering(self) -> Lowering:
        """What :class:`bitnet.core.gpu.GpuDevice` takes."""
        return Lowering(self.step, advance)

    def step(self, ctx: Context, bucket: Bucket) -> list[Launch]:
        """The program's launches, fused where a bucket and the neighbouring operations allow it."""
        return lower(ctx, bucket, lambda ops, at: self._fused(ctx, ops, at, bucket))

    def norm_quant(self, ctx: Context, op: NormQuant, bucket: Bucket) -> list[Launch]:
        (launch,) = self._rows.norm_quant(ctx, op, bucket)
        *args, dim = launch.args
        return [replace(launch, args=(*args, row_sums(ctx, op.out), dim))]

    def glu_norm_quant(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        (launch,) = self._rows.glu_norm_quant(ctx, op, bucket)
        *args, dim, products = launch.args
        return [replace(launch, args=(*args, row_sums(ctx, op.out), dim, products))]

    def ternary_matmul(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        w, out = ctx.ternary(op.weights), ctx.tensors[op.out]
        x = Source(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
        sums = self._row_sums(ctx, op, bucket)
        if bucket.tokens <= DECODE_TOKENS:
            return [*sums, self._decode(ctx, op, bucket, x, out)]
        side = 16 if self._group >= 128 else 8
        down = self._group // side
        each = min(4, ceil_div(bucket.tokens, down))
        defines = (("COLS", w.cols), ("ROW_BYTES", w.row_bytes), ("ADD", int(op.add)))
        spec = KernelSpec("ternary_gemm", "ternary_gemm", (*defines, ("TX", side), ("TY", down), ("EACH_M", each)))
        args = (ctx.step, x.x, ctx.tensors[op.scale], row_sums(ctx, op.x), w.codes, w.scales, out, np.int32(w.rows))
        grid = (ceil_div(w.rows, side * TILE_ROWS), ceil_div(bucket.tokens, down * each), 1)
        return [*sums, Launch(spec, grid, (self._group, 1, 1), args)]

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

    def _fused(self, ctx: Context, ops: Sequence[Op], at: int, bucket: Bucket) -> tuple[list[Launch], int]:
        """Launches for the operations from ``at`` on, and how many operations they do."""
        if bucket.tokens == 1 and not ctx.program.keep:
            match ops[at : at + 4]:
                case [RopeAppend() as rope, Attention() as op, *_] if (rope.qkv, rope.layer) == (op.qkv, op.layer):
                    if self._attention.splits(op, bucket):
                        return self._attention.decode(ctx, op, bucket, rope), 2
                case [NormQuant() as n, TernaryMatmul() as up, GluNormQuant() as glu, TernaryMatmul() as down] if (
                    feeds(n, up, ops[at + 2 :])
                    and feeds(glu, down, ops[at + 4 :])
                    and (up.out, up.add) == (glu.gate_up, False)
                    and not read_again(up.out, ops[at + 3 :])
                    and self._quantises(ctx.ternary(up.weights), times=2)
                    and self._quantises(ctx.ternary(down.weights))
                ):
                    return feed_forward(self._decode, ctx, (n, up, glu, down), bucket), 4
                case [NormQuant() as n, TernaryMatmul() as op, *_] if feeds(n, op, ops[at + 2 :]):
                    if self._quantises(ctx.ternary(op.weights)):
                        return [self._decode(ctx, op, bucket, normed(ctx, n), ctx.tensors[op.out])], 2
        return self._table[type(ops[at])](ctx, ops[at], bucket), 1

    def _row_sums(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """What makes the sums of the operation's activations, where the program does not quantise them itself."""
        if quantised(op.x, ctx.program.ops):
            return []
        args = (ctx.step, ctx.tensors[op.x], row_sums(ctx, op.x))
        return [self._rows.launch("row_sums", bucket.tokens, args, defines={"COLS": ctx.shape(op.x)[1]})]

    def _decode(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, source: Source, out: Buffer, *, activation: str = ""
    ) -> Launch:
        w = ctx.ternary(op.weights)
        times = 2 if activation else 1
        lanes = self._lanes(w, times)
        defines = {
            "COLS": w.cols,
            "ROW_BYTES": w.row_bytes,
            "TOKENS": bucket.tokens,
            "LANES": lanes,
            "INPUT": source.kind,
            "GLU": int(bool(activation)),
            "RELU2": int(activation == "relu2"),
            "ADD": int(op.add),
        }
        norm = ctx.dense(source.norm).data if source.norm else source.x
        sums = source.x if source.kind else row_sums(ctx, op.x)
        args: tuple[Arg, ...] = (ctx.step, source.x, source.scale or source.x, sums, norm, np.float32(source.eps))
        args = (*args, w.codes, w.scales, out, np.int32(w.rows))
        groups = ceil_div(w.rows // times * lanes, self._group)
        return self._rows.launch("ternary_decode", groups, args, defines=defines)

    def _lanes(self, w: TernaryBuffer, times: int = 1) -> int:
        """Work-items that share a row: enough that every compute unit has a work-group."""
        wanted = self._units * self._group // (w.rows // times)
        most = min(MOST_LANES, self._group, _power_of_two(w.row_bytes // CHUNK_BYTES))
        return max(min(_power_of_two(max(wanted, 1)) * 2, most), min(LEAST_LANES, most))

    def _quantises(self, w: TernaryBuffer, *, times: int = 1) -> bool:
        """Whether a work-group of ternary_decode can hold the whole row of activations, and a work-item its codes."""
        local = 4 * w.row_bytes + self._group * (8 + 4 * times)
        chunks = ceil_div(w.row_bytes // CHUNK_BYTES, self._lanes(w, times))
        return local <= self._local and chunks * times <= HELD_CHUNKS


def _power_of_two(n: int) -> int:
    """The greatest that is no larger than ``n``."""
    return 1 << (n.bit_length() - 1)
