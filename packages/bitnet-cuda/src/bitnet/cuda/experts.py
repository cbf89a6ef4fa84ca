"""Launches of mixtures of experts in CUDA.

A step of few tokens takes three kernels: the router's logits, the products with gates and ups, and the last ones with
their sums; both products choose the experts by themselves. In larger steps a launch groups the pairs of token and
expert by expert, and tiles of pairs are multiplied on the tensor cores. Other shapes take a kernel that fuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, Dispatch, KernelSpec, Launch
from bitnet.core.gpu.fusions import ExpertFeedForward
from bitnet.core.gpu.ops import activation_defines, ceil_div
from bitnet.core.gpu.ops.experts import ALONE, MAX_LANES, TILE, max_tiles
from bitnet.core.gpu.ops.variants import ExpertGlu
from bitnet.core.hal import ExpertMatmul, GluNormQuant, Route
from bitnet.cuda.products import DECODE_TOKENS, STEP, TENSOR_CORES, shared_bytes
from bitnet.cuda.weights import Matrix, experts

GROUP = 256
"""Threads of a block of most kernels."""
ROUTE_ONE = 128
"""Threads of a block of route_logits for one token: a warp for each expert."""
MAX_AHEAD = 4096
"""Maximum columns of which a warp of route_logits loads a row before it waits."""
TILES_GROUP = 1024
"""Threads of the block of expert_tiles."""
MAX_SUMS = 6144
"""Sums of expert_matmul that 24 KiB of shared memory hold."""
UP_WARPS, MAX_STEPS, MAX_TOP = 8, 8, 16
"""Warps of a block of expert_up; maximum steps of 256 columns, of which a thread of expert_up or expert_down holds all
codes; maximum experts of a token, which have a warp each."""
MAX_ROWS = 32 * 1024
"""Maximum bytes of int8 rows in shared memory of a block of them."""
PITCH = 64
"""Bytes between rows of x in shared memory, as in the source."""


class Tiles(NamedTuple):
    """A shape of expert_mma: tiles of ``8 * pairs`` pairs, warps of ``16 * rows`` rows, and ``depth`` steps of codes in
    flight."""

    pairs: int
    rows: int
    depth: int


SHAPES = ((3, Tiles(1, 1, 8)), (10, Tiles(2, 2, 4)))
"""The shapes for steps of at most so many pairs an expert."""
MANY = Tiles(4, 2, 2)
"""The shape for more."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """The pairs of a step in tiles: their order, the tiles, and how many these may be."""

    order: Buffer
    tiles: Buffer
    count: int


class ExpertLaunches:
    """Launches for a device with a compute capability such as ``(9, 0)``."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._tensor_cores, self._shared = capability >= TENSOR_CORES, shared_bytes(capability)

    def table(self) -> Dispatch:
        """The entries of a launch table."""
        fused: Dispatch = {ExpertFeedForward: self.feed_forward} if self._tensor_cores else {}
        return {Route: self.route, ExpertMatmul: self.expert_matmul, ExpertGlu: self.glu, **fused}

    def route(self, ctx: Context, op: Route, bucket: Bucket) -> list[Launch]:
        """The logits of all experts, and the choice among them."""
        logits, made = self._logits(ctx, op, bucket)
        top = np.int32(ctx.shape(op.ids)[1])
        args = (ctx.step, logits, ctx.tensors[op.ids], ctx.tensors[op.shares], top)
        defines = {name: int(value) for name, value in made.kernel.defines} | {"WG": ROUTE_ONE}
        grid = ceil_div(bucket.tokens, ROUTE_ONE // 32), 1, 1
        return [made, _launch("route", grid, ROUTE_ONE, args, defines, entry="route_top")]

    def expert_matmul(self, ctx: Context, op: ExpertMatmul, bucket: Bucket) -> list[Launch]:
        """Products of pairs, and their sums where each pair has a row of its own."""
        tokens, top = ctx.shape(op.ids)
        matrices, made, first = experts(ctx, op), list[Launch](), 0
        columns, summed = sum(w.rows for w in matrices) // op.experts, op.shares is not None
        out = ctx.scratch("results of experts", tokens * top * columns * 4) if summed else ctx.tensors[op.out]
        shape = self._tile_shape(matrices[0], op, bucket.tokens * top)
        places = None
        if shape is not None or bucket.tokens > ALONE:
            tile = 8 * shape.pairs if shape else TILE
            tiles, places = self._tiles(ctx, op, bucket, tile)
            if not self._tiled_before(ctx, op, bucket, tile):
                made.append(tiles)
        for w in matrices:
            rows = ctx.program.weights[op.weights[0]].shape[0] if len(matrices) == 1 else w.rows
            each, parts = rows // op.experts, w.rows // rows
            sizes = map(np.int32, (1 if summed else top, each, parts, first, columns))
            x = ctx.tensors[op.x], ctx.tensors[op.scale]
            if shape is not None and places is not None:
                args = (ctx.step, *x, w.codes, w.scales, places.order, places.tiles, out, *sizes)
                defines = {"COLS": w.cols, "EXPERTS": op.experts, "NT": shape.pairs, "MT": shape.rows}
                defines |= {"DEPTH": min(shape.depth, w.cols // STEP), **w.defines}
                grid = ceil_div(each * parts, GROUP // 2 * shape.rows), places.count, 1
                shared = 8 * shape.pairs * (w.cols + PITCH)
                made.append(_launch("expert_mma", grid, GROUP, args, defines, shared=shared))
            else:
                order, tiles_at = (places.order, places.tiles) if places else (ctx.step, ctx.step)
                inputs = (ctx.step, *x, ctx.tensors[op.ids], w.codes, w.scales, order, tiles_at)
                defines = _plain(w, op.experts, grouped=places is not None)
                across = ceil_div(each * parts, defines["WG"] // MAX_LANES)
                grid = across, places.count if places else bucket.tokens * top, 1
                args = (*inputs, out, np.int32(top), *sizes)
                made.append(_launch("expert_matmul", grid, defines["WG"], args, defines))
            first += each * parts
        if op.shares is not None:
            sums = (ctx.step, out, ctx.tensors[op.shares], ctx.tensors[op.out], np.int32(top), np.int32(columns))
            grid = ceil_div(columns, GROUP), bucket.tokens, 1
            made.append(_launch("expert_sums", grid, GROUP, sums, {"WG": GROUP}))
        return made

    def glu(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        """The activations of all experts of a token, each a row of its own."""
        width, gate_up = ctx.shape(op.out)[1] // op.parts, ctx.tensors[op.gate_up]
        weight = ctx.dense(op.weight).data if op.weight else gate_up
        group = GROUP if width > 2 * GROUP else GROUP // 2
        args = (ctx.step, gate_up, weight, np.float32(op.eps), _limit(op), ctx.tensors[op.out], ctx.tensors[op.scale])
        defines = {
            "WG": group,
            "DIM": width,
            "NORM": int(op.weight is not None),
            **activation_defines(op.activation),
        }
        return [_launch("expert_glu", (op.parts, bucket.tokens, 1), group, args, defines)]

    def feed_forward(self, ctx: Context, group: ExpertFeedForward, bucket: Bucket) -> list[Launch] | None:
        """The whole mixture for few tokens; None for other shapes."""
        route, glu, top = group.route, group.glu, ctx.shape(group.route.ids)[1]
        (up, *rest), down = experts(ctx, group.up), experts(ctx, group.down)[0]
        hidden, width = up.cols, down.cols
        scaled = up.group is None and down.group is None and not rest and len(group.up.weights) == 2
        split = 2 if hidden // STEP % 2 == 0 else 1
        short = (
            hidden <= STEP * MAX_STEPS * split and width <= STEP * MAX_STEPS and max(hidden, top * width) <= MAX_ROWS
        )
        whole = hidden % STEP == 0 and width % STEP == 0 and glu.weight is None and glu.parts == top <= MAX_TOP
        if not (bucket.tokens <= DECODE_TOKENS and scaled and short and whole):
            return None
        logits, made = self._logits(ctx, route, bucket)
        count, tokens = group.up.experts, ctx.shape(route.ids)[0]
        products = ctx.scratch("products of experts", tokens * top * width * 4)
        sizes = {"EXPERTS": count, "TOP": top}
        tiles = UP_WARPS // split
        norm = ctx.dense(route.weight).data, np.float32(route.eps)
        args = (ctx.step, ctx.tensors[route.x], *norm, logits, up.codes, up.scales, _limit(glu), products)
        defines = {"COLS": hidden, "F": width, "TILES": tiles, "KSPLIT": split, **activation_defines(glu.activation)}
        grid = ceil_div(width, 8 * tiles), top, bucket.tokens
        first = _launch("expert_up", grid, 32 * UP_WARPS, args, {**defines, **sizes, **up.defines})
        rows = down.rows // count
        results = (down.codes, down.scales, ctx.tensors[group.down.out], np.int32(rows))
        last = (ctx.step, products, logits, *results)
        grid = ceil_div(rows, 16), bucket.tokens, 1
        defines = {"COLS": width, **sizes, **down.defines}
        return [made, first, _launch("expert_down", grid, 32 * top, last, defines)]

    def _logits(self, ctx: Context, op: Route, bucket: Bucket) -> tuple[Buffer, Launch]:
        """The logits of all experts, and the launch that computes them."""
        router = ctx.dense(op.router)
        count, width = router.shape
        logits = ctx.scratch("router logits", ctx.shape(op.x)[0] * count * 4)
        one = bucket.tokens == 1 and width % 128 == 0 and width <= MAX_AHEAD
        # A warp's tokens and experts: as many as keep the multiprocessors busy.
        each, rows = (
            (1, 1) if one else (2, 2) if bucket.tokens <= DECODE_TOKENS else (4, 2) if bucket.tokens <= 128 else (8, 4)
        )
        group, token_warps = (ROUTE_ONE, 1) if one else (GROUP, 2 if bucket.tokens > 2 * each else 1)
        defines = {"WG": group, "COLS": width, "EXPERTS": count, "TOKENS": each, "ROWS": rows}
        defines |= {"TOKEN_WARPS": token_warps, "ONE": int(one)}
        grid = ceil_div(count, rows * (group // 32 // token_warps)), ceil_div(bucket.tokens, each * token_warps), 1
        args = (ctx.step, ctx.tensors[op.x], ctx.dense(op.weight).data, np.float32(op.eps), router.data, logits)
        return logits, _launch("route", grid, group, args, defines, entry="route_logits")

    def _tiles(self, ctx: Context, op: ExpertMatmul, bucket: Bucket, tile: int) -> tuple[Launch, Grouped]:
        """The launch that groups pairs by expert, and its results."""
        tokens, top = ctx.shape(op.ids)
        order = ctx.scratch("order of pairs", tokens * top * 4)
        tiles = ctx.scratch("tiles of pairs", max_tiles(tokens * top, op.experts) * 12)
        count = max_tiles(bucket.tokens * top, op.experts, tile)
        args = (ctx.step, ctx.tensors[op.ids], order, tiles, np.int32(top), np.int32(count))
        defines = {"WG": TILES_GROUP, "EXPERTS": op.experts, "TILE": tile}
        return _launch("expert_tiles", (1, 1, 1), TILES_GROUP, args, defines), Grouped(order, tiles, count)

    def _tiled_before(self, ctx: Context, op: ExpertMatmul, bucket: Bucket, tile: int) -> bool:
        """Whether an earlier product of the step has left the same tiles of the same pairs."""
        ops = ctx.program.ops
        for earlier in reversed(ops[: ops.index(op)]):
            if isinstance(earlier, Route) and earlier.ids == op.ids:
                return False
            if isinstance(earlier, ExpertMatmul) and earlier.ids == op.ids:
                pairs = bucket.tokens * ctx.shape(op.ids)[1]
                shape = self._tile_shape(experts(ctx, earlier)[0], earlier, pairs)
                return earlier.experts == op.experts and tile == (8 * shape.pairs if shape else TILE)
        return False

    def _tile_shape(self, w: Matrix, op: ExpertMatmul, pairs: int) -> Tiles | None:
        """The shape of expert_mma for so many pairs, or None if the kernel does not take the matrices."""
        if not self._tensor_cores or w.group is not None or w.cols % STEP:
            return None
        wanted = next((shape for most, shape in SHAPES if pairs <= most * op.experts), MANY)
        fitting = (shape for shape in (wanted, SHAPES[0][1]) if 8 * shape.pairs * (w.cols + PITCH) <= self._shared)
        return next(fitting, None)


def _launch(
    file: str,
    grid: tuple[int, int, int],
    group: int,
    args: tuple[Arg, ...],
    defines: Mapping[str, int],
    *,
    entry: str | None = None,
    shared: int = 0,
) -> Launch:
    spec = KernelSpec(file, entry or file, tuple(defines.items()))
    return Launch(spec, grid, (group, 1, 1), args, shared, overlaps=True)


def _plain(w: Matrix, count: int, *, grouped: bool) -> dict[str, int]:
    """Preprocessor constants of expert_matmul: as many rows of a matrix as shared memory holds the sums of."""
    width, tokens = w.group or w.cols, TILE if grouped else 1
    group = GROUP
    while group > MAX_LANES and group // MAX_LANES * tokens * (w.cols // width) > MAX_SUMS:
        group //= 2
    each = {32: 4, 64: 2}.get(w.group or 0, 1)
    sizes = {"WG": group, "LANES": MAX_LANES, "TOKENS": tokens, "COLS": w.cols, "ROW_BYTES": w.row_bytes}
    return {**sizes, "GROUP": w.group or 0, "EACH": each, "EXPERTS": count, "GROUPED": int(grouped), **w.defines}


def _limit(op: GluNormQuant) -> np.float32:
    limit: np.float32 = np.float32(np.inf if op.clamp is None else op.clamp)
    return limit
