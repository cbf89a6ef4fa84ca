"""Decodes TL1 and TL2, the packings of bitnet.cpp's look-up kernels for ARM and x86.

TL1 packs two neighbouring weights into a number from 0 to 8 in 4 bits. TL2 packs three into a number from -13 to 13,
with its magnitude in 4 bits and its sign stored separately. The numbers are ordered by tiles, whose sizes are compiled
into the kernels and not stored in files. Supported are the sizes in bitnet.cpp's ``setup_env.py`` for the models that
its converter accepts. Layouts: ``utils/convert-hf-to-gguf-bitnet.py`` of https://github.com/microsoft/BitNet;
``docs/formats.md`` writes them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf.types import GGMLType, tl2_bytes

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Tile(NamedTuple):
    """A tile of ``rows`` × ``columns``, in which ``lanes`` rows are computed together."""

    rows: int
    columns: int
    lanes: int


TL1_TILES: Mapping[tuple[int, int], Tile] = {
    (3200, 8640): Tile(160, 64, 32),
    (3200, 3200): Tile(320, 128, 64),
    (8640, 3200): Tile(320, 64, 32),
    (1536, 4096): Tile(256, 128, 32),
    (1536, 1536): Tile(128, 64, 64),
    (4096, 1536): Tile(256, 128, 32),
    (14336, 4096): Tile(256, 128, 32),
    (4096, 14336): Tile(128, 64, 64),
    (1024, 4096): Tile(256, 128, 32),
    (4096, 4096): Tile(128, 64, 64),
}
"""Tiles by (rows, columns) of a matrix, for bitnet_b1_58-3B and -large and Llama3-8B-1.58."""
TL2_TILES: Mapping[tuple[int, int], Tile] = {
    (3200, 8640): Tile(160, 96, 32),
    (3200, 3200): Tile(320, 96, 32),
    (8640, 3200): Tile(320, 96, 32),
    (1536, 4096): Tile(256, 96, 32),
    (1536, 1536): Tile(128, 192, 32),
    (4096, 1536): Tile(256, 96, 32),
    (14336, 4096): Tile(256, 96, 32),
    (4096, 14336): Tile(128, 96, 32),
    (1024, 4096): Tile(256, 96, 32),
    (4096, 4096): Tile(128, 96, 32),
}
_LANES = 32
"""Rows computed together by every TL2 kernel; its lanes of eight are in the order 0, 2, 1, 3."""
_TWO = np.array([(v // 3, v % 3) for v in range(9)], np.uint8)
_THREE = np.array([(v // 9, v // 3 % 3, v % 3) for v in range(27)], np.uint8)
"""Codes (weight + 1) for each number; the first weight is the most significant base-3 digit."""


def check_tl_tiles(dtype: GGMLType, shape: tuple[int, int]) -> None:
    """Check that the tile sizes for a matrix of this shape are known.

    Raises:
        ValueError: They are not.
    """
    if shape not in (TL1_TILES if dtype is GGMLType.TL1 else TL2_TILES):
        raise ValueError(
            f"no tile sizes are known for {dtype.name} of {shape[0]} rows and {shape[1]} columns, and the file has "
            f"none: take the model's I2_S file, or convert its Hugging Face folder"
        )


def tl_rows(dtype: GGMLType, shape: tuple[int, int], data: Bytes) -> Iterator[Bytes]:
    """Yield codes (weight + 1) ``uint8[rows, K]`` for one row of tiles after another.

    Raises:
        ValueError: A number is out of range, or a zero has a sign.
    """
    n, k = shape
    if dtype is GGMLType.TL1:
        tile = TL1_TILES[shape]
        size = tile.rows * k // 4
        for begin in range(0, n * k // 4, size):
            yield _tl1(data[begin : begin + size], k, tile)
        return
    tile = TL2_TILES[shape]
    threes = k // tile.columns * tile.columns
    parts = n * threes // 6, n * threes // 24, n * (k - threes) // 4
    numbers, signs, pairs, _ = np.split(data[: tl2_bytes(shape)], np.cumsum(parts))
    for begin in range(n // tile.rows):
        three, sign, two = (_part(part, begin, n // tile.rows) for part in (numbers, signs, pairs))
        codes = _threes(three, sign, threes, tile)
        yield np.concatenate([codes, _pairs(two, k - threes, tile.rows)], axis=1) if two.size else codes


def _part(data: Bytes, index: int, count: int) -> Bytes:
    size = data.size // count
    return data[index * size : (index + 1) * size]


def _tl1(data: Bytes, k: int, tile: Tile) -> Bytes:
    """A row of tiles. Each tile is divided into ``lanes`` rows, then ``256 / lanes`` columns, 16 rows, and 4
    columns."""
    columns = 256 // tile.lanes
    halves = np.stack([data >> np.uint8(4), data & np.uint8(15)], axis=-1).reshape(
        k // tile.columns, tile.rows // tile.lanes, tile.columns // columns, tile.lanes // 16, columns // 4, 16, 2
    )
    return _named(_TWO, halves.transpose(1, 3, 5, 0, 2, 4, 6).reshape(tile.rows, k // 2))


def _halves(data: Bytes, shape: tuple[int, int, int]) -> Bytes:
    """TL2's numbers ``[tiles, lanes' rows, columns, ...]``: each 32 bytes hold two of each of 32 rows."""
    halves = np.stack([data >> np.uint8(4), data & np.uint8(15)], axis=-1).reshape(*shape, 4, 8, 2)
    ordered: Bytes = halves[:, :, :, [0, 2, 1, 3]].transpose(1, 3, 4, 0, 2, 5)
    return ordered.reshape(shape[1] * _LANES, -1)


def _pairs(data: Bytes, k: int, rows: int) -> Bytes:
    return _named(_TWO, _halves(data, (k // 32, rows // _LANES, 8)))


def _threes(data: Bytes, signs: Bytes, k: int, tile: Tile) -> Bytes:
    numbers = _halves(data, (k // tile.columns, tile.rows // _LANES, tile.columns // 6))
    if numbers.max() > 13:
        raise ValueError(f"it holds the number {numbers.max()}, which does not encode three weights")
    # A 16-bit word holds the signs of eight neighbouring numbers of rows m and m + 16, m = 0 … 15. From the highest bit
    # down: the first number of row m, the first of row m + 16, the second of row m, …
    words = (
        np.ascontiguousarray(signs)
        .view("<u2")
        .reshape(k // tile.columns, tile.rows // _LANES, tile.columns // 24, 16, 1, 1)
    )
    shifts = np.arange(15, -1, -1, dtype=np.uint16).reshape(8, 2)
    minus = (words >> shifts & np.uint16(1)).transpose(1, 5, 3, 0, 2, 4).reshape(tile.rows, k // 3).astype(np.bool_)
    if (minus & (numbers == 0)).any():
        raise ValueError("a zero has a sign")
    signed = numbers.view(np.int8)
    return _named(_THREE, (np.where(minus, -signed, signed) + np.int8(13)).view(np.uint8))


def _named(table: Bytes, numbers: Bytes) -> Bytes:
    """The codes encoded by ``numbers``."""
    if numbers.max() >= len(table):
        raise ValueError(f"it holds the number {numbers.max()}, which does not encode weights")
    codes: Bytes = table[numbers]
    return codes.reshape(len(numbers), -1)
