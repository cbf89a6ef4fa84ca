"""Launches of ternary_bits: products of one token by counts of bits."""

from __future__ import annotations

from typing import NamedTuple

from bitnet.core.gpu import Buffer, Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.ops.pairs import Pair
from bitnet.core.gpu.ops.products import ProductInput, product_args, product_defines
from bitnet.core.hal import TernaryMatmul
from bitnet.cuda.tiles import ALIGNMENT, PANEL, TiledMatrix
from bitnet.cuda.weights import ternary

ROWS, STEP, GROUP = 16, 512, 128
"""Sizes of the kernel, as in its source: rows of a tile, columns that a warp takes at a time, columns of a scale."""
STEP_BYTES = ROWS * (STEP // 4 + STEP // GROUP * 2)
"""Bytes of a step of a tile in shared memory: codes and scales."""
PLANES = 3
"""The kernel's kind of input for activations that come as bits, after those of :class:`ProductInput`."""
GROUP_WORDS = 73
"""Words of shared memory for the bits of a group's activations. The kernel uses 72, but with 72 a layer took 25.5 µs
instead of 24.3 on an H200, and with 80, 24.6; why is not known."""
ONE_BLOCKS, BLOCKS = 3, 2
"""Maximum blocks per multiprocessor: of blocks that process one tile at a time and read activations that are quantised
already, and of others. If there are no more tiles than blocks, each tile has a block of its own."""
ONE_WARPS = 8
"""Maximum warps of a block that processes one tile at a time."""
TILES, WARPS, DEPTH = 2, 5, 2
"""Otherwise: tiles that a block processes at a time, maximum warps per tile, and tiles per warp whose weights are in
shared memory or on their way there."""
SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor."""
RESERVED = 2048
"""Maximum bytes of shared memory that a block takes besides those that its launch requests."""


class BitsShape(NamedTuple):
    """A launch of ternary_bits.

    Attributes:
        tiles: Tiles that a block processes at a time.
        split: Warps that share a tile's columns.
        depth: Tiles per warp whose weights are in shared memory or on their way there.
        blocks: Number of blocks.
        shared: Bytes of shared memory that a block asks for.
    """

    tiles: int
    split: int
    depth: int
    blocks: int
    shared: int


def bits_shape(
    w: TernaryBuffer, multiprocessors: int, most: int, *, ready: bool, sliced: bool = False
) -> BitsShape | None:
    """The launch for a matrix, or None if the kernel does not support it with ``most`` bytes of shared memory.

    Blocks have their tiles at once, or room for one more tile than they process. Where two tiles of a long row do not
    fit so, a block processes one at a time, shared by more warps.

    Args:
        ready: Activations come quantised. Otherwise each block does that work, so more blocks take longer.
        sliced: They come as bits.
    """
    if w.group != GROUP or w.cols % STEP:
        return None
    choices = ((1, ONE_WARPS, 1), (TILES, WARPS, 1), (TILES, WARPS, DEPTH), (1, ONE_WARPS, DEPTH))
    shapes = [_shape(w, *choice, multiprocessors, ready=ready, sliced=sliced) for choice in choices]
    wanted = (s for s in shapes if s.shared <= most and (s.depth > 1 or s.tiles * s.blocks * ROWS >= w.rows))
    return next(wanted, shapes[0] if shapes[0].shared <= most else None)


def _shape(
    w: TernaryBuffer, tiles: int, warps: int, depth: int, multiprocessors: int, *, ready: bool, sliced: bool
) -> BitsShape:
    """The launch of blocks of ``tiles`` tiles, each for at most ``warps`` warps."""
    steps, groups = w.cols // STEP, w.cols // GROUP
    each = ceil_div(steps, warps)
    split = ceil_div(steps, each)
    terms = 2 * tiles * ROWS * (groups | 1)
    words = terms if sliced else groups * GROUP_WORDS + terms
    shared = ALIGNMENT + depth * tiles * split * each * STEP_BYTES + 4 * words
    at_once = max(1, min(ONE_BLOCKS if tiles == 1 and ready else BLOCKS, SHARED // (shared + RESERVED)))
    blocks = ceil_div(ceil_div(w.rows, ROWS), tiles)
    blocks = ceil_div(blocks, ceil_div(blocks, at_once * multiprocessors))  # which process the same number of tiles
    return BitsShape(tiles, split, depth, blocks, shared)


def bits_product(
    ctx: Context,
    op: TernaryMatmul,
    source: ProductInput,
    out: Buffer,
    activation: str,
    shape: BitsShape,
    bits: Buffer | None = None,
    pair: Pair | None = None,
) -> Launch:
    """A product of one token, with the operations before and after it that ``source`` and ``activation`` name, or with
    the other one of a pair.

    Args:
        bits: Those of the activations' codes.
    """
    w = ternary(ctx, op.weights)
    defines = {"COLS": w.cols, "TILES": shape.tiles, "KSPLIT": shape.split, "DEPTH": shape.depth}
    defines["INPUT"] = source.kind if bits is None else PLANES
    defines |= {**product_defines(op, activation), **(pair.defines if pair else {})}
    tile_rows = ROWS // 2 if activation else ROWS
    codes = TiledMatrix(w.codes, w.rows, w.row_bytes, tile_rows, PANEL)
    args = product_args(ctx, op, source, out)
    args = (args[0], bits or args[1], *args[2:6], codes, *args[7:])
    if pair:
        second = pair.second
        args = (*args, *pair.args(TiledMatrix(second.codes, second.rows, second.row_bytes, tile_rows, PANEL)))
    spec = KernelSpec("ternary_bits", "ternary_bits", tuple(defines.items()))
    grid, block = (shape.blocks, 1, 1), (32 * shape.tiles * shape.split, 1, 1)
    return Launch(spec, grid, block, args, shape.shared, overlaps=True)
