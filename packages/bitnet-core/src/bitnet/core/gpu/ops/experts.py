"""Launches of mixtures of experts, for backends that have kernels with these names and arguments.

A product takes one launch where each of its pairs of token and expert reads the expert's matrices for itself, as in a
step of few tokens. In larger steps, a launch before it groups the pairs by expert, so that several share what is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer, Launch, launch
from bitnet.core.gpu.drivers.windows import Windows
from bitnet.core.gpu.ops.rows import activation_defines, ceil_div
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import ExpertMatmul, GluNormQuant, Route

ALONE = 4
"""Maximum tokens of a step whose pairs are not grouped."""
TILE = 8
"""Pairs of an expert that share what a work-group reads."""
MAX_LANES = 16
"""Maximum work-items that share a row."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of pairs with a matrix of each expert.

    Attributes:
        sizes: A token's experts, pairs that share a row, experts, rows of a matrix, matrices of an expert that are
            stacked, and the place of the first result among a pair's, whose number is the last.
        places: The order of pairs and their tiles; None: they are not grouped.
        out: The results of all pairs.
    """

    w: TernaryBuffer
    sizes: tuple[int, ...]
    places: tuple[Buffer, Buffer] | None
    out: Buffer


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
        tiles, places = self._tiles(ctx, op, bucket) if grouped else ([], None)
        made += tiles
        summed = op.shares is not None
        out = ctx.scratch("results of experts", tokens * top * columns * 4) if summed else ctx.tensors[op.out]
        for w in matrices:
            rows = ctx.program.weights[op.weights[0]].shape[0] if len(matrices) == 1 else w.rows
            sizes = (top, 1 if summed else top, op.experts, rows // op.experts, w.rows // rows, first, columns)
            made += self._products(ctx, op, bucket, Product(w, sizes, places, out))
            first += w.rows // op.experts
        if op.shares is not None:
            args = (ctx.step, out, ctx.tensors[op.shares], ctx.tensors[op.out], np.int32(top), np.int32(columns))
            made.append(self._sums(args, columns, bucket, made[-1]))
        return made

    def glu(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        """The activations of all experts of a token."""
        width, limit = ctx.shape(op.out)[1] // op.parts, np.float32(np.inf if op.clamp is None else op.clamp)
        gate_up = ctx.tensors[op.gate_up]
        weight = ctx.dense(op.weight).data if op.weight else gate_up
        results = ctx.tensors[op.out], ctx.tensors[op.scale], np.int32(width), limit
        args = (ctx.step, gate_up, weight, np.float32(op.eps), *results)
        defines = {"WG": self.group, "NORM": int(op.weight is not None), **activation_defines(op.activation)}
        return [launch("expert_glu", (op.parts, bucket.tokens, 1), self.group, args, defines)]

    def _tiles(self, ctx: Context, op: ExpertMatmul, bucket: Bucket) -> tuple[list[Launch], tuple[Buffer, Buffer]]:
        """The launch that groups pairs by expert, and its results."""
        tokens, top = ctx.shape(op.ids)
        order = ctx.scratch("order of pairs", tokens * top * 4)
        tiles = ctx.scratch("tiles of pairs", max_tiles(tokens * top, op.experts) * 12)
        count = np.int32(max_tiles(bucket.tokens * top, op.experts))
        args = (ctx.step, ctx.tensors[op.ids], order, tiles, np.int32(top), count)
        defines = {"WG": self.group, "EXPERTS": op.experts, "TOKENS": TILE}
        return [launch("expert_tiles", (1, 1, 1), self.group, args, defines)], (order, tiles)

    def _products(self, ctx: Context, op: ExpertMatmul, bucket: Bucket, product: Product) -> list[Launch]:
        """The products of all pairs with a matrix of each expert."""
        w, grouped = product.w, product.places is not None
        inputs = (ctx.step, ctx.tensors[op.x], ctx.tensors[op.scale], ctx.tensors[op.ids], w.codes, w.scales)
        flags = map(np.int32, (*product.sizes, w.group is not None, grouped))
        args = (*inputs, *(product.places or (ctx.step, ctx.step)), product.out, *flags)
        defines = {**self._defines(w, TILE if grouped else 1), "ROW_BYTES": w.row_bytes}
        return [launch("expert_matmul", self._grid(ctx, op, bucket, product, defines), defines["WG"], args, defines)]

    def _sums(self, args: tuple[Arg, ...], columns: int, bucket: Bucket, product: Launch) -> Launch:
        """The results of a token's experts times their shares, added up; ``product`` is one that made them."""
        grid = ceil_div(columns, product.block[0]), bucket.tokens, 1
        return Launch(replace(product.kernel, entry="expert_sums"), grid, product.block, args)

    def _grid(
        self, ctx: Context, op: ExpertMatmul, bucket: Bucket, product: Product, defines: Mapping[str, int]
    ) -> tuple[int, int, int]:
        """Work-groups of a product: along an expert's rows, and along the pairs or their tiles."""
        w, pairs = product.w, bucket.tokens * ctx.shape(op.ids)[1]
        across = ceil_div(w.rows // op.experts, defines["WG"] // defines["LANES"])
        return across, pairs if product.places is None else max_tiles(pairs, op.experts), 1

    def _defines(self, w: TernaryBuffer, tokens: int) -> dict[str, int]:
        """Preprocessor constants of the product: as many rows of a matrix as local memory holds the sums of."""
        width = w.group or w.cols
        lanes, group = min(MAX_LANES, self.group), self.group
        while group > lanes and 4 * group // lanes * tokens * (w.cols // width) > self.local_bytes // 2:
            group //= 2
        each = {32: 4, 64: 2}.get(width, 1)
        return {"WG": group, "LANES": lanes, "TOKENS": tokens, "COLS": w.cols, "GROUP": width, "EACH": each}


@dataclass(frozen=True, slots=True)
class BoundExpertOps(ExpertOps):
    """The same for APIs that bind a matrix in parts, by ``windows``, and few buffers: Vulkan and WebGPU."""

    windows: Windows

    def _products(self, ctx: Context, op: ExpertMatmul, bucket: Bucket, product: Product) -> list[Launch]:
        w, (chosen, tiles) = product.w, product.places or (ctx.tensors[op.ids], ctx.step)
        grouped, defines = product.places is not None, self._defines(w, TILE if product.places else 1)
        defines |= {"SCALED": int(w.group is not None), "GROUPED": int(grouped), "WIDE": int(w.cols % 16 == 0)}
        grid, made = self._grid(ctx, op, bucket, product, defines), []
        for codes, first, rows in self.windows(w.codes, w.rows):
            inputs = (ctx.step, ctx.tensors[op.x], ctx.tensors[op.scale], codes, w.scales)
            args = (*inputs, product.out, chosen, tiles, *map(np.int32, (*product.sizes, first, rows)))
            made.append(launch("expert_matmul", grid, defines["WG"], args, defines))
        return made

    def _sums(self, args: tuple[Arg, ...], columns: int, bucket: Bucket, product: Launch) -> Launch:
        grid = ceil_div(columns, self.group), bucket.tokens, 1
        return launch("expert_sums", grid, self.group, args, {"WG": self.group})


def max_tiles(pairs: int, experts: int, tile: int = TILE) -> int:
    """Maximum tiles of so many pairs: every expert's last one may not be full."""
    return pairs // tile + min(pairs, experts)
