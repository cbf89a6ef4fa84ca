"""Lowers ternary products to WebGPU dispatches, for one token, a few and many, with one scale or scales of groups."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, Launch, TernaryBuffer, launch
from bitnet.core.gpu.drivers.windows import MAX_GROUPS, Windows, in_two
from bitnet.core.gpu.ops import ceil_div, next_power_of_two
from bitnet.core.gpu.ops.group_products import GroupProducts
from bitnet.core.gpu.ops.products import NORM, ProductInput, product_defines
from bitnet.core.gpu.ops.scaled import group_layout
from bitnet.core.hal import TernaryMatmul

GROUP = 256
"""Invocations of a workgroup: what every WebGPU device allows."""
SCALES = (32, 64, 128, 256)
"""Columns of a group that these kernels support; for others there are plain ones."""
FEW_TOKENS = {False: 16, True: 32}
"""Steps with more tokens use the tiled product, without and with scales of groups."""
GEMV_TOKENS = (8, 4, 1)
"""Choices for the tokens that a workgroup of the product of few tokens multiplies its codes with, the best first; the
first that fits workgroup memory is used."""
GEMV_ROWS = (2, 1)
"""Choices for the rows that invocations share in that product."""
GEMV_LANES = (16, 8)
"""Choices for the invocations that share rows."""
TILED_GROUPS = 200
"""Workgroups of the tiled product that keep a large GPU busy."""
DECODE_SHARED = 5 * 1024
"""Bytes of workgroup memory that ternary_decode uses besides those of its row."""
EARLY_VECS = 8
"""Maximum vec4s of codes that an invocation of a product of one token asks for before the norm."""


class Tile(NamedTuple):
    """A workgroup of the tiled product: invocations along each side, and tokens and rows of each; 64 columns at a time
    are multiplied ``steps`` fold, which ``slices`` of the invocations share."""

    side: int
    each_m: int
    each_n: int
    steps: int
    slices: int = 1

    def groups(self, tokens: int, rows: int) -> tuple[int, int, int]:
        """The grid."""
        return ceil_div(rows, self.side * self.each_n), ceil_div(tokens, self.side * self.each_m), 1

    def shared(self, parts: int) -> int:
        """Bytes of workgroup memory, with so many scales of a row in it."""
        units, split = 4 * self.steps, 4 * GROUP * self.each_m if self.slices > 1 else 0
        return 16 * units * self.side * (self.each_m + self.each_n) + 4 * parts * self.side * self.each_n + split


LARGE_TILES = (Tile(16, 4, 8, 1), Tile(16, 4, 4, 2))
"""Tiles of many tokens, each used if there are enough of them."""
SPLIT_TILES = (Tile(8, 2, 4, 4, 4), Tile(8, 4, 4, 4, 4))
"""Tiles of fewer tokens, whose columns are shared: for up to 16 tokens, and for more."""
SMALL_TILES = (Tile(16, 1, 4, 2), Tile(16, 2, 4, 2))
"""The same where columns cannot be shared: they need no more workgroup memory than every device has."""


class Products:
    """Launches for a device that binds matrices by ``windows`` and has ``shared`` bytes of workgroup memory.

    ``largest`` is the maximum of bytes that it binds.
    """

    def __init__(self, windows: Windows, shared: int, largest: int) -> None:
        self._windows, self._shared, self._binding = windows, shared, largest

    def ternary_matmul(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer | None = None
    ) -> list[Launch]:
        """A product of few tokens reads each weight once for up to 8 of them; one of many goes by tiles.
        Into ``out`` if given."""
        w = ctx.ternary(op.weights)
        few = bucket.tokens <= FEW_TOKENS[w.group is not None]
        shape = self._few(w, bucket.tokens) if few else self._tiled(w, bucket.tokens)
        if shape is None:
            return GroupProducts(self._windows).lower(ctx, op, bucket, out)
        x, out = (ctx.tensors[op.x], ctx.tensors[op.scale]), out or ctx.tensors[op.out]
        launches = []
        for codes, first, rows in self._windows(w.codes, w.rows):
            sizes = (np.uint32(n) for n in (w.cols, rows, first, w.rows))
            args: tuple[Arg, ...] = (ctx.step, *x, codes, w.scales, out, *sizes)
            if isinstance(shape, Tile):
                defines, entry, grid = self._tile_defines(w, shape), "ternary_gemm", shape.groups(bucket.tokens, rows)
            else:
                across = in_two(ceil_div(rows, GROUP // shape["LANES"] * shape["EACH"]))
                defines, entry, grid = shape, "ternary_gemv", (*across, ceil_div(bucket.tokens, shape["TOKENS"]))
            defines = {"ALIGNED": int(w.cols % 16 == 0), "ADD": int(op.add)} | defines
            launches.append(launch(entry, grid, GROUP, args, defines))
        return launches

    def decodes(self, ctx: Context, op: TernaryMatmul, factors: int = 0) -> bool:
        """Whether :meth:`decode` can do a product of one token: row, factors and terms fit workgroup memory, its
        weights a binding."""
        w = ctx.ternary(op.weights)
        if w.group is not None and w.group not in SCALES:
            return False
        lanes = _lanes(w)
        terms = 2 * GROUP // lanes * _term_pitch(w) if w.group is not None else 0
        groups = ceil_div(w.rows, GROUP // lanes)
        fits = 4 * (w.row_bytes + factors + terms) + DECODE_SHARED <= self._shared and w.codes.nbytes <= self._binding
        return fits and groups < MAX_GROUPS

    def decode(
        self,
        ctx: Context,
        op: TernaryMatmul,
        bucket: Bucket,
        source: ProductInput,
        out: Buffer,
        *,
        activation: str = "",
        splits: int = 1,
        head_dim: int = 4,
    ) -> Launch:
        """The product of one token, with the operations fused before and after it."""
        w = ctx.ternary(op.weights)
        rows, lanes, scales = w.rows // (2 if activation else 1), _lanes(w), _scale_defines(w)
        vecs = ceil_div(w.row_bytes // 16, lanes)  # of an invocation
        defines = {
            "COLS": w.cols,
            "LANES": lanes,
            "NORM": int(source.kind == NORM),
            **product_defines(op, activation),
            "HELD": ceil_div(w.cols // 4, GROUP),
            **scales,
            "EARLY": max(min(vecs, EARLY_VECS) // scales["UNIT"], 1),
        }
        if w.group is not None:
            defines["TERM_PITCH"] = _term_pitch(w)
        if splits > 1:
            defines |= {"MERGE": 1, "SPLITS": splits, "HEAD_QUADS": head_dim // 4}
        args = (source.x, source.gain(ctx), w.codes, w.scales, out, np.uint32(rows), np.float32(source.eps))
        entry = "ternary_groups_decode" if w.group is not None else "ternary_decode"
        return launch(entry, (ceil_div(rows, GROUP // lanes), 1, 1), GROUP, args, defines)

    def _few(self, w: TernaryBuffer, tokens: int) -> dict[str, int] | None:
        """Constants of ternary_gemv; None if it does not support the weight's groups."""
        scales = _scale_defines(w)
        if w.group is not None and w.group not in SCALES:
            return None
        for wanted, each, lanes in product(GEMV_TOKENS, GEMV_ROWS, GEMV_LANES):
            most = ceil_div(tokens, ceil_div(tokens, wanted))
            rows, pitch = GROUP // lanes * each, lanes * scales["SETS"] + 1
            results = 4 * rows * pitch if w.group is not None else 4 * GROUP
            units = 4 * lanes * scales["UNIT"]
            if most * (16 * units + results) <= self._shared:
                defines = {"LANES": lanes, "EACH": each, "TOKENS": most, "LOADS": ceil_div(most * units, GROUP)}
                return defines | scales | {"TERM_PITCH": pitch, "OUTS": ceil_div(rows * most, GROUP)}
        return None

    def _tiled(self, w: TernaryBuffer, tokens: int) -> Tile | None:
        """The tile for a step; None if ternary_gemm does not support the weight's groups."""
        if w.group is not None and w.group not in SCALES:
            return None
        for tile in LARGE_TILES:
            across, along, _ = tile.groups(tokens, w.rows)
            fits = self._fits(w, tile) and tile.side * tile.each_m <= tokens
            if fits and across * along >= TILED_GROUPS:
                return tile
        split, small = SPLIT_TILES[tokens > 16], SMALL_TILES[tokens > 16]
        if w.group is None and self._fits(w, split):
            return split
        return small if self._fits(w, small) else None

    def _fits(self, w: TernaryBuffer, tile: Tile) -> bool:
        return tile.shared(self._tile_defines(w, tile)["PARTS"] if w.group is not None else 0) <= self._shared

    @staticmethod
    def _tile_defines(w: TernaryBuffer, tile: Tile) -> dict[str, int]:
        """Constants of ternary_gemm."""
        loads = ceil_div(4 * tile.steps * tile.side * tile.each_m, GROUP)
        defines = {"SIDE": tile.side, "EACH_M": tile.each_m, "EACH_N": tile.each_n, "STEPS": tile.steps}
        defines |= {"SLICES": tile.slices, "SPLIT": int(tile.slices > 1), "X_LOADS": loads, "PARTS": 1}
        if w.group is not None:
            columns = 64 * tile.steps
            defines |= _scale_defines(w) | {"PARTS": max(columns // w.group, 1), "RUNS": max(w.group // columns, 1)}
        return defines


def _scale_defines(w: TernaryBuffer) -> dict[str, int]:
    """How the groups of a weight lie in its codes: vec4s of a unit, groups of a unit, bit pairs of a group."""
    if w.group is None:
        return {"UNIT": 1, "SETS": 1}
    layout = group_layout(w)
    return {"COLS": w.cols, "GROUP": w.group, "UNIT": 2 * layout.blocks, "SETS": layout.sets, "PLANES": layout.planes}


def _lanes(w: TernaryBuffer) -> int:
    """Invocations that share a row of a product of one token: each asks for about three vec4s of it at once."""
    lanes = 8
    while lanes < 32 and w.row_bytes > 64 * lanes:
        lanes *= 2
    if w.group is None:
        return lanes
    return min(lanes, next_power_of_two(ceil_div(w.row_bytes // 16, 2 * group_layout(w).blocks)))


def _term_pitch(w: TernaryBuffer) -> int:
    """Terms of a row, and one more where they are even in number, so that rows lie in different banks."""
    return group_layout(w).count | 1
