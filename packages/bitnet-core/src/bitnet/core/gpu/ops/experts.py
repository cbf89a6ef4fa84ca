"""Launches of mixtures of experts, for backends that have kernels with these names and arguments.

A product takes one launch where each of its pairs of token and expert reads the expert's matrices for itself, as in a
step of few tokens. In larger steps, a launch before it groups the pairs by expert, so that several share what is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Buffer, Launch, launch
from bitnet.core.gpu.ops.rows import ceil_div
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import ExpertMatmul, GluNormQuant, Route

ALONE = 4
"""Maximum tokens of a step whose pairs are not grouped."""
TILE = 8
"""Pairs of an expert that share what a work-group reads."""
MAX_LANES = 16
"""Maximum work-items that share a row."""


@dataclass(frozen=True, slots=True)
class ExpertOps:
    """The launches for work-groups of ``group`` work-items with ``local_bytes`` of local memory."""

    group: int
    local_bytes: int

    def route(self, ctx: Context, op: Route, bucket: Bucket) -> list[Launch]:
        """The logits of all experts, and the choice among them."""
        router, top = ctx.dense(op.router), np.int32(ctx.shape(op.ids)[1])
        experts, width = router.shape
        logits = ctx.scratch("router logits", ctx.shape(op.x)[0] * experts * 4)
        lanes = min(MAX_LANES, self.group)
        args = (ctx.step, ctx.tensors[op.x], ctx.dense(op.weight).data, np.float32(op.eps), router.data, logits)
        defines = {"WG": self.group, "LANES": lanes, "EXPERTS": experts}
        grid = ceil_div(experts, self.group // lanes), bucket.tokens, 1
        sizes = np.int32(width), np.int32(experts)
        chosen = (ctx.step, logits, ctx.tensors[op.ids], ctx.tensors[op.shares], top)
        return [
            launch("route", grid, self.group, (*args, *sizes), defines, entry="route_logits"),
            launch("route", (bucket.tokens, 1, 1), self.group, chosen, defines, entry="route_top"),
        ]

    def expert_matmul(self, ctx: Context, op: ExpertMatmul, bucket: Bucket) -> list[Launch]:
        """Products of pairs, and their sums where each pair has a row of its own."""
        tokens, top = ctx.shape(op.ids)
        matrices, made, first = ctx.experts(op), list[Launch](), 0
        columns = sum(w.rows for w in matrices) // op.experts
        grouped = bucket.tokens > ALONE
        tiles, places = self._tiles(ctx, op, bucket) if grouped else ([], (ctx.step, ctx.step))
        made += tiles
        summed = op.shares is not None
        out = ctx.scratch("results of experts", tokens * top * columns * 4) if summed else ctx.tensors[op.out]
        for w in matrices:
            rows = ctx.program.weights[op.weights[0]].shape[0] if len(matrices) == 1 else w.rows
            defines = self._defines(w, TILE if grouped else 1)
            pairs = _most_tiles(bucket.tokens * top, op.experts) if grouped else bucket.tokens * top
            inputs = (ctx.step, ctx.tensors[op.x], ctx.tensors[op.scale], ctx.tensors[op.ids], w.codes, w.scales)
            numbers = (top, 1 if summed else top, op.experts, rows // op.experts, w.rows // rows, first, columns)
            flags = (w.group is not None, grouped)
            args = (*inputs, *places, out, *map(np.int32, (*numbers, *flags)))
            group = defines["WG"]
            grid = ceil_div(w.rows // op.experts, group // defines["LANES"]), pairs, 1
            made.append(launch("expert_matmul", grid, group, args, defines))
            first += w.rows // op.experts
        if op.shares is not None:
            args = (ctx.step, out, ctx.tensors[op.shares], ctx.tensors[op.out], np.int32(top), np.int32(columns))
            grid = ceil_div(columns, defines["WG"]), bucket.tokens, 1
            made.append(launch("expert_matmul", grid, defines["WG"], args, defines, entry="expert_sums"))
        return made

    def glu(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        """The activations of all experts of a token."""
        width, limit = ctx.shape(op.out)[1] // op.parts, np.float32(np.inf if op.clamp is None else op.clamp)
        gate_up = ctx.tensors[op.gate_up]
        weight = ctx.dense(op.weight).data if op.weight else gate_up
        results = ctx.tensors[op.out], ctx.tensors[op.scale], np.int32(width), limit
        args = (ctx.step, gate_up, weight, np.float32(op.eps), *results)
        defines = {"WG": self.group, "NORM": int(op.weight is not None), "RELU2": int(op.activation == "relu2")}
        return [launch("expert_glu", (op.parts, bucket.tokens, 1), self.group, args, defines)]

    def _tiles(self, ctx: Context, op: ExpertMatmul, bucket: Bucket) -> tuple[list[Launch], tuple[Buffer, Buffer]]:
        """The launch that groups pairs by expert, and its results."""
        tokens, top = ctx.shape(op.ids)
        most = _most_tiles(tokens * top, op.experts)
        order, tiles = ctx.scratch("order of pairs", tokens * top * 4), ctx.scratch("tiles of pairs", most * 12)
        count = np.int32(_most_tiles(bucket.tokens * top, op.experts))
        args = (ctx.step, ctx.tensors[op.ids], order, tiles, np.int32(top), count)
        defines = {"WG": self.group, "EXPERTS": op.experts, "TOKENS": TILE}
        return [launch("expert_tiles", (1, 1, 1), self.group, args, defines)], (order, tiles)

    def _defines(self, w: TernaryBuffer, tokens: int) -> dict[str, int]:
        """Preprocessor constants of the product: as many rows of a matrix as local memory holds the sums of."""
        width = w.group or w.cols
        lanes, group = min(MAX_LANES, self.group), self.group
        while group > lanes and 4 * group // lanes * tokens * (w.cols // width) > self.local_bytes // 2:
            group //= 2
        each = {32: 4, 64: 2}.get(width, 1)
        shape = {"COLS": w.cols, "ROW_BYTES": w.row_bytes, "GROUP": width, "EACH": each}
        return {"WG": group, "LANES": lanes, "TOKENS": tokens, **shape}


def _most_tiles(pairs: int, experts: int) -> int:
    """Maximum tiles of so many pairs: every expert's last one may not be full."""
    return pairs // TILE + min(pairs, experts)
