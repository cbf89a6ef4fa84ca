"""The layout of packed weights, lane by lane, at every level of this processor, against numpy."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.cpu import native, structures
from bitnet.core.gguf.ternary import pack_ternary

ALIGNMENT = 64


class Layout(NamedTuple):
    """A level's tiles, as ``kernels/cpu/tile_*.h`` define them; their columns are ``4 planes``."""

    rows: int
    planes: int
    base: int
    tiles: int


LAYOUTS = {
    "amx": Layout(16, 5, 3, 3),
    "vbmi_avx512": Layout(16, 5, 3, 3),
    "avx512": Layout(16, 4, 4, 4),
    "vnni_avx2": Layout(8, 4, 4, 4),
    "avx2": Layout(8, 4, 4, 4),
    "neon": Layout(4, 4, 4, 4),
    "relaxed_simd128": Layout(4, 4, 4, 4),
    "simd128": Layout(4, 4, 4, 4),
    "scalar": Layout(4, 4, 4, 4),
}


def test_every_level_has_a_layout() -> None:
    assert LAYOUTS.keys() == set(native.LEVELS)


def test_lanes_hold_the_digits_of_their_columns(library: ctypes.CDLL) -> None:
    random = np.random.default_rng()
    for name, level in native.levels(library).items():
        pool = library.bitnet_pool_new(2)
        try:
            byte_of: dict[int, int] = {}
            for _ in range(12):
                group = int(random.choice([0, 0, 32, 64, 96, 128, 256, 1024]))
                rows = int(random.integers(1, 260))
                columns = group * int(random.integers(1, 6)) if group else int(random.integers(1, 2000))
                weights = random.integers(-1, 2, (rows, columns)).astype(np.int8)
                packed = _packed(library, level, pool, weights, group)
                numbers = _numbers(weights, group, LAYOUTS[name])
                assert len(packed) == len(numbers), (name, rows, columns, group)
                for number, byte in set(zip(numbers.tolist(), packed.tolist(), strict=True)):
                    assert byte_of.setdefault(number, byte) == byte, (name, rows, columns, group)
        finally:
            library.bitnet_pool_delete(pool)
        assert len(set(byte_of.values())) == len(byte_of) == 3 ** LAYOUTS[name].planes
        if LAYOUTS[name].base == 4:
            assert all(number == byte for number, byte in byte_of.items())


@pytest.mark.parametrize("group", [0, 64])
def test_the_unused_code_makes_no_neighbour_wrong(library: ctypes.CDLL, group: int) -> None:
    """A hostile file may hold the code 3: other rows stay as they are."""
    random = np.random.default_rng()
    for name, level in native.levels(library).items():
        pool = library.bitnet_pool_new(1)
        try:
            weights = random.integers(-1, 2, (70, 640)).astype(np.int8)
            right = _packed(library, level, pool, weights, group).reshape(-1, 4)
            weights[33] = 2
            wrong = _packed(library, level, pool, weights, group).reshape(-1, 4)
        finally:
            library.bitnet_pool_delete(pool)
        tile_rows = LAYOUTS[name].rows
        other = np.arange(len(right)) % tile_rows != 33 % tile_rows
        np.testing.assert_array_equal(right[other], wrong[other], err_msg=name)


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (50, 384), (193, 1280)])
def test_binary_weights_are_bits(library: ctypes.CDLL, rows: int, columns: int) -> None:
    """Bit p of byte j of a row's lane is the column 4p + j of 32; rows past the last are zeros."""
    weights = np.random.default_rng().choice(np.array([-1, 1], np.int8), (rows, columns))
    for name, level in native.levels(library).items():
        pool = library.bitnet_pool_new(1)
        try:
            packed = _packed(library, level, pool, weights, 64, binary=True)
        finally:
            library.bitnet_pool_delete(pool)
        layout = LAYOUTS[name]
        tiles = -(-rows // layout.rows)
        bits = np.zeros((tiles * layout.rows, columns), np.uint8)
        bits[:rows] = weights > 0
        lanes = bits.reshape(tiles, layout.rows, -1, 8, 4).transpose(0, 2, 1, 4, 3)  # [tile, group, row, byte, bit]
        numbers = np.packbits(lanes, axis=-1, bitorder="little")[..., 0]
        panels = [numbers[at : at + layout.tiles] for at in range(0, tiles, layout.tiles)]
        expected = np.concatenate([panel.transpose(1, 0, 2, 3).ravel() for panel in panels])
        np.testing.assert_array_equal(packed, expected, err_msg=name)


def _packed(
    library: ctypes.CDLL,
    level: int,
    pool: int,
    weights: npt.NDArray[np.int8],
    group: int,
    binary: bool = False,
) -> Any:
    rows, columns = weights.shape
    codes, scales = pack_ternary(weights), np.zeros(weights.size // (group or weights.size), np.float16)
    size = library.bitnet_packed_bytes(level, rows, columns, group, binary)
    units = np.empty(library.bitnet_packed_scales(level, rows, columns, group) if group else 1, np.uint8)
    room = np.full(size + 2 * ALIGNMENT, 0xA5, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    where = room.ctypes.data + begin
    shape = rows, columns, group
    job = structures.PackJob(codes.ctypes.data, where, *shape, scales.ctypes.data, units.ctypes.data, binary)
    library.bitnet_pack(level, pool, job)
    assert (room[:begin] == 0xA5).all()
    assert (room[begin + size :] == 0xA5).all()
    return room[begin : begin + size]


def _numbers(weights: npt.NDArray[np.int8], group: int, layout: Layout) -> npt.NDArray[np.int64]:
    """The number that each byte stands for, in the order of the packed bytes."""
    rows, columns = weights.shape
    span, wide = group or columns, 4 * layout.planes
    groups = -(-span // wide)
    tiles = -(-rows // layout.rows)
    digits = np.zeros((tiles * layout.rows, columns // span, groups * wide), np.int64)
    digits[:rows, :, :span] = weights.reshape(rows, -1, span) + 1
    # [tile, row, span, group, plane, byte] → [tile, span, group, row, byte]
    split = digits.reshape(tiles, layout.rows, -1, groups, layout.planes, 4)
    numbers = (split * (layout.base ** np.arange(layout.planes))[:, None]).sum(axis=4)
    panels = [numbers[at : at + layout.tiles] for at in range(0, tiles, layout.tiles)]
    return np.concatenate([panel.transpose(2, 3, 0, 1, 4).reshape(-1) for panel in panels])
