"""Launches of ternary_few: products of few tokens that come quantised."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from bitnet.core.gpu import Buffer, Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.ops.pairs import Pair
from bitnet.core.gpu.ops.products import product_defines, tiled_args
from bitnet.core.hal import TernaryMatmul
from bitnet.cuda.weights import ternary

ROWS, STEP = 16, 256
"""Sizes of the kernel, as in its source: rows of a tile, and columns that a warp takes at a time."""
GROUPS = (64, 128, 256)
"""Columns that may share a scale."""
TOKENS = (16, 8)
"""Tokens of a block. More need too many registers."""
X_BYTES, MANY_X_BYTES = 72 * 1024, 96 * 1024
"""Maximum bytes of a block's activations, in steps of at most ``max(TOKENS)`` tokens and of more; a block of the
smaller of :data:`TOKENS` may have more."""
WARPS = 12
"""Warps of a block in which each tile has one warp. With fewer tiles, the other warps help fetch activations."""
MAX_ROUND_WARPS = 20
"""Maximum warps of a block of 8 tokens that has so many tiles, one for each."""
SPLIT_WARPS = {8: (16, 12), 16: (12,)}
"""Choices for the warps of a block in which several warps share a tile, by the block's tokens: the first that
fits."""
SPLITS = {4: 4, 8: 2}
"""Number of warps that share a tile, by the maximum tiles of the block."""
DEPTHS = (4, 3, 2)
"""Choices for the steps of a warp whose codes are in shared memory or in flight. More would delay the activations."""


class FewShape(NamedTuple):
    """A launch of ternary_few.

    Attributes:
        tokens: Tokens of a block.
        warps: Warps of a block.
        split: Warps that share a tile.
        depth: Steps of a warp in shared memory.
        blocks: Number of blocks for the same tokens.
        shared: Bytes of shared memory that a block asks for.
    """

    tokens: int
    warps: int
    split: int
    depth: int
    blocks: int
    shared: int


def few_shape(
    w: TernaryBuffer, tokens: int, multiprocessors: int, most: int, *, glu: bool = False, ordered: bool = False
) -> FewShape | None:
    """The launch for a matrix, or None if the kernel does not support it with ``most`` bytes of shared memory.

    Args:
        glu: The results are gates and ups. Every matrix that is supported without is supported with it, too.
        ordered: Activations come in the order in which threads need them, and take no shared memory.
    """
    if w.cols % 16 or (w.group is not None and (w.group not in GROUPS or w.cols % STEP)):
        return None
    tiles, steps = ceil_div(w.rows, ROWS), ceil_div(4 * w.row_bytes, STEP)
    x_bytes = X_BYTES if tokens <= max(TOKENS) else MANY_X_BYTES
    for each in TOKENS:
        if each > min(TOKENS) and (tokens <= min(TOKENS) or each * w.cols > x_bytes):
            continue
        blocks = min(tiles, max(1, multiprocessors // ceil_div(tokens, each)))
        wanted = next((split for most_tiles, split in SPLITS.items() if ceil_div(tiles, blocks) <= most_tiles), 1)
        while (w.group is not None and steps % wanted) or (glu and wanted > each // 4):  # a warp has a gate with its up
            wanted //= 2
        one = ceil_div(tiles, blocks)
        alone = one if each == min(TOKENS) and WARPS < one <= MAX_ROUND_WARPS else WARPS
        choices = [(wanted, warps) for warps in SPLIT_WARPS[each]] if wanted > 1 else []
        for (split, warps), depth in product((*choices, (1, alone), (1, WARPS)), DEPTHS):
            shared = _shared(w, each, warps, split, depth, ordered=ordered)
            if shared <= most:
                return FewShape(each, warps, split, depth, blocks, shared)
    return None


def _shared(w: TernaryBuffer, tokens: int, warps: int, split: int, depth: int, *, ordered: bool) -> int:
    """Bytes of shared memory of a block: activations, codes and scales, and results that warps pass on."""
    steps = ceil_div(ceil_div(4 * w.row_bytes, STEP), split) * split
    stage = ROWS * (STEP // 4 + (0 if w.group is None else max(4, STEP // w.group * 2)))
    passed = tokens // 2 * 128 * (1 if w.group is None else 2 * STEP // w.group)
    x = 0 if ordered else tokens * (steps * STEP + 32)
    return x + warps * (depth * stage + (passed if split > 1 else 0))


def few_product(
    ctx: Context,
    op: TernaryMatmul,
    tokens: int,
    out: Buffer,
    activation: str,
    shape: FewShape,
    codes: Buffer | None = None,
    pair: Pair | None = None,
) -> Launch:
    """A product, with the activation after it that ``activation`` names, or with the other one of a pair.

    Args:
        codes: The activations in the order of the kernel.
    """
    w = ternary(ctx, op.weights)
    defines = {"COLS": w.cols, "ROW_BYTES": w.row_bytes, "GROUP": w.group or 0, "TOKENS": shape.tokens}
    defines |= {"WARPS": shape.warps, "KSPLIT": shape.split, "DEPTH": shape.depth, "ORDERED": int(codes is not None)}
    defines |= {**product_defines(op, activation), **w.defines, **(pair.defines if pair else {})}
    step, x, *rest = tiled_args(ctx, op, out)
    args = (step, codes or x, *rest, *(pair.args(pair.second.codes) if pair else ()))
    spec = KernelSpec("ternary_few", "ternary_few", tuple(defines.items()))
    grid, block = (shape.blocks, ceil_div(tokens, shape.tokens), 1), (32 * shape.warps, 1, 1)
    return Launch(spec, grid, block, args, shape.shared, overlaps=True)
