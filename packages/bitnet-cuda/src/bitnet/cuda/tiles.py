"""Matrices whose tiles are fetched by the copy engine (TMA, from Hopper on), and the tiles of ternary_tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitnet.core.gpu import Buffer
from bitnet.core.gpu.ops import ceil_div

MANY_TOKENS = 256
"""Steps with more tokens than this use kernels with copy-engine fetches, which are slower for 256 tokens."""
PANEL = 128
"""Bytes of the widest row of a tile."""
ALIGNMENT = 1024
"""Alignment of a tile in shared memory, in bytes."""


@dataclass(frozen=True, slots=True)
class TiledMatrix:
    """A kernel argument: ``TensorMap`` in the sources.

    Attributes:
        buffer: Bytes, row after row.
        rows: Rows of the matrix. Reads past the last row or a row's end give zeros.
        width: Bytes of a row; a multiple of 16.
        tile_rows: Rows of a tile, at most 256.
        tile_width: Bytes of a tile's row: 32 or 128, which are swizzled in shared memory.
    """

    buffer: Buffer
    rows: int
    width: int
    tile_rows: int
    tile_width: int

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The results that a block computes at a time: ``rows`` of W by ``tokens``."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupTile(ProductTile):
    """The same, of blocks of which a multiprocessor has ``resident`` at a time.

    Attributes:
        cost: Nanoseconds for a group of 128 columns, while the multiprocessor has as many blocks.
    """

    resident: int
    cost: int


TILES = (ProductTile(256, 128), ProductTile(256, 160), ProductTile(192, 160))
GROUP_TILES = (
    GroupTile(128, 128, 1, 560),
    GroupTile(192, 64, 1, 500),
    GroupTile(128, 64, 1, 380),
    GroupTile(64, 64, 2, 355),
    GroupTile(64, 32, 3, 335),
    GroupTile(64, 16, 3, 265),
    GroupTile(64, 8, 3, 225),
)
"""Tiles of ternary_group_tiles, whose threads hold f32 sums beside two sets of integers. Costs are those of an H200."""
END_CYCLES = 10_000
"""Cost of a tile besides its products, mostly storing it."""


def product_tile(tiles: Sequence[ProductTile], rows: int, tokens: int, depth: int, multiprocessors: int) -> ProductTile:
    """The tile with the least estimated time for a product of so many rows, tokens and units of 128 of K."""

    def cycles(tile: ProductTile) -> int:
        turns = ceil_div(ceil_div(rows, tile.rows) * ceil_div(tokens, tile.tokens), multiprocessors)
        return turns * (depth * tile.rows * tile.tokens // 32 + END_CYCLES)

    return min(tiles, key=cycles)


def group_tile(rows: int, tokens: int, multiprocessors: int) -> GroupTile:
    """The tile of ternary_group_tiles with the least estimated time for a product of so many rows and tokens."""

    def time(tile: GroupTile) -> int:
        tiles = ceil_div(rows, tile.rows) * ceil_div(tokens, tile.tokens)
        return ceil_div(tiles, tile.resident * multiprocessors) * tile.cost

    return min(GROUP_TILES, key=time)
