"""TL1 and TL2 as bitnet.cpp's converter writes them.

``WRITTEN`` holds SHA-256 digests (128 bits) of what ``preprocess_weights_tl1`` and ``preprocess_weights_tl2`` of
``utils/convert-hf-to-gguf-bitnet.py`` (https://github.com/microsoft/BitNet, 2026-07) make of the weights that
:func:`drawn` gives, with the tile sizes that its ``setup_env.py`` names. The encoders here are the definitions of the
layouts: the place of every number by its row and column. They make the same bytes, and the reader must lead back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, unpack_ternary, write_gguf
from bitnet.core.gguf.ternary import check_ternary
from bitnet.core.gguf.tl_packing import TL1_TILES, TL2_TILES, Tile, tl_rows
from bitnet.core.gguf.types import tensor_bytes
from bitnet.core.model import open_model
from bitnet.core.model.convert import convert_model
from bombs.base import GGUF, Shape

SMALL = [(1536, 1536), (1024, 4096), (1536, 4096), (4096, 1536), (3200, 3200)]
WRITTEN = {
    GGMLType.TL1: {
        (1536, 1536): "1327b14de875a91ba20a3d9034790f16",
        (1024, 4096): "a068648abcfb215497862c8f3310aaaa",
        (1536, 4096): "b7fbae029aa164a5c1853cf2ebeac688",
        (4096, 1536): "2e6f907454102ff3898a2bb5eee1f429",
        (3200, 3200): "86c4d9a7b8e604ab133e43368031aa73",
    },
    GGMLType.TL2: {
        (1536, 1536): "ee726fd17fe641b11f65da9caecbafa9",
        (1024, 4096): "50898a5dd8586ab1370d267f81609511",
        (1536, 4096): "65de834fa7efde6ad50fbc2c3a6aeef6",
        (4096, 1536): "98789a1edddd27d6cf58ec9014de429a",
        (3200, 3200): "97fdfa49bbeff4b76cc2ef735aa8c6c1",
    },
}


def drawn(shape: tuple[int, int], seed: str | None = None) -> np.ndarray:
    """Weights of a shape; without a seed always the same."""
    n, k = shape
    text = f"{n}x{k}" if seed is None else seed
    digest = np.frombuffer(hashlib.shake_256(text.encode()).digest(n * k), np.uint8)
    weights: np.ndarray = (digest % 3).astype(np.int8).reshape(n, k) - np.int8(1)
    return weights


def tl1(weights: np.ndarray, tile: Tile) -> np.ndarray:
    """Two weights are the number ``3 a + b + 4``; its place goes from the row of tiles down to the half of a byte."""
    k = weights.shape[1]
    numbers = 3 * weights[:, 0::2] + weights[:, 1::2] + 4
    row, pair = np.indices(numbers.shape)
    width = 256 // tile.lanes // 2
    at = row // tile.rows
    at = at * (k // tile.columns) + pair // (tile.columns // 2)
    at = at * (tile.rows // tile.lanes) + row % tile.rows // tile.lanes
    at = at * (tile.columns // 2 // width) + pair % (tile.columns // 2) // width
    at = at * (tile.lanes // 16) + row % tile.rows % tile.lanes // 16
    at = at * (width // 2) + pair % (tile.columns // 2) % width // 2
    at = at * 16 + row % tile.rows % tile.lanes % 16
    return halves(at, pair % 2, numbers)


def halves(at: np.ndarray, half: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Bytes of two numbers each, the first in the upper half."""
    out = np.zeros(numbers.size // 2, np.uint8)
    for which, shift in ((0, 4), (1, 0)):
        chosen = half == which
        out[at[chosen]] |= numbers[chosen].astype(np.uint8) << np.uint8(shift)
    return out


def numbers_of_32_rows(numbers: np.ndarray, tile_rows: int, tile_numbers: int) -> np.ndarray:
    """TL2's numbers: a tile's parts of 32 rows, with two numbers of each row; groups of 8 rows go 0, 2, 1, 3."""
    row, column = np.indices(numbers.shape)
    at = row // tile_rows
    at = at * (numbers.shape[1] // tile_numbers) + column // tile_numbers
    at = at * (tile_rows // 32) + row % tile_rows // 32
    at = at * (tile_numbers // 2) + column % tile_numbers // 2
    lane = row % tile_rows % 32
    at = at * 4 + np.array([0, 2, 1, 3])[lane // 8]
    return halves(at * 8 + lane % 8, column % 2, numbers)


def tl2(weights: np.ndarray, tile: Tile) -> np.ndarray:
    """Three weights are the magnitude of ``9 a + 3 b + c``; the signs come after all of these; the rest are pairs."""
    n, k = weights.shape
    threes = k // tile.columns * tile.columns
    a, b, c = (weights[:, i:threes:3].astype(np.int64) for i in range(3))
    signed = 9 * a + 3 * b + c
    parts = [numbers_of_32_rows(abs(signed), tile.rows, tile.columns // 3)]
    row, column = np.indices(signed.shape)
    at = row // tile.rows
    at = at * (threes // tile.columns) + column // (tile.columns // 3)
    at = at * (tile.rows // 32) + row % tile.rows // 32
    at = at * (tile.columns // 24) + column % (tile.columns // 3) // 8
    lane = row % tile.rows % 32
    at = at * 16 + lane % 16
    bit = 15 - 2 * (column % 8) - lane // 16
    words = np.zeros(signed.size // 16, np.uint16)
    np.bitwise_or.at(words, at.reshape(-1), ((signed < 0).astype(np.uint16) << bit.astype(np.uint16)).reshape(-1))
    parts.append(words.astype("<u2").view(np.uint8))
    if threes < k:
        pairs = 3 * weights[:, threes::2] + weights[:, threes + 1 :: 2] + 4
        parts.append(numbers_of_32_rows(pairs, tile.rows, 16))
    out = np.zeros(tensor_bytes(GGMLType.TL2, (n, k)), np.uint8)
    data = np.concatenate(parts)
    out[: data.size] = data
    return out


Encoder = Callable[[np.ndarray, Tile], np.ndarray]
KINDS = [(GGMLType.TL1, TL1_TILES, tl1), (GGMLType.TL2, TL2_TILES, tl2)]
kinds = pytest.mark.parametrize(("dtype", "tiles", "encode"), KINDS, ids=["tl1", "tl2"])


@kinds
@pytest.mark.parametrize("shape", SMALL[:2] + [pytest.param(shape, marks=pytest.mark.nightly) for shape in SMALL[2:]])
def test_what_the_converter_wrote(dtype: GGMLType, tiles: Any, encode: Encoder, shape: tuple[int, int]) -> None:
    weights = drawn(shape)
    data = encode(weights, tiles[shape])
    assert hashlib.sha256(data.tobytes()).hexdigest()[:32] == WRITTEN[dtype][shape]
    np.testing.assert_array_equal(np.concatenate(list(tl_rows(dtype, shape, data))), weights + 1)


LARGE = Shape(hidden=1536, ffn=1536, heads=16, kv_heads=16, head_dim=96, vocab=260)


@kinds
def test_a_model(tmp_path: Path, dtype: GGMLType, tiles: Any, encode: Encoder) -> None:
    """A layer of square matrices of bitnet_b1_58-large's size; the converter names the scales ``NAME.weight_scale``."""
    rng, model, weights = np.random.default_rng(), GGUF(LARGE), {}
    shape = (1536, 1536)
    pair = [drawn(shape, str(rng.integers(2**60))) for _ in range(2)]
    encoded = [encode(each, tiles[shape]) for each in pair]
    for name in LARGE.matrices():
        which = rng.integers(2)
        weights[name] = pair[which], np.float32(rng.uniform(0.5, 2))
        model.tensors[f"blk.0.{name}.weight"] = TensorSource(shape, dtype, encoded[which])
        model.tensors[f"blk.0.{name}.weight_scale"] = TensorSource((), GGMLType.F32, weights[name][1].tobytes())
    path, target = model.write(tmp_path), tmp_path / "out.gguf"
    convert_model(path, target)
    for file in (open_model(path), open_model(target)):
        for name, (expected, scale) in weights.items():
            loaded: Any = file.weights[f"blk.0.{name}"].load()
            np.testing.assert_array_equal(unpack_ternary(loaded.codes, expected.shape[1]), expected)
            assert loaded.scale == [scale]
    assert (open_model(path).quantization, open_model(target).quantization) == (dtype.name, "I2_S")
    model.tensors["blk.0.ffn_up.weight_scale"] = np.array([np.nan], np.float32)
    with pytest.raises(ModelFileError, match="is nan"):
        open_model(model.write(tmp_path))
    del model.tensors["blk.0.ffn_up.weight_scale"]
    with pytest.raises(ModelFileError, match="is missing") as caught:
        open_model(model.write(tmp_path))
    assert caught.value.field == "tensor 'blk.0.ffn_up.weight_scale'"


def test_shapes_without_known_tiles(tmp_path: Path) -> None:
    model = GGUF(Shape(hidden=256, ffn=512, heads=8))
    for dtype in (GGMLType.TL1, GGMLType.TL2):
        data = np.zeros(tensor_bytes(dtype, (256, 256)), np.uint8)
        model.tensors["blk.0.attn_output.weight"] = TensorSource((256, 256), dtype, data)
        model.tensors["blk.0.attn_output.weight_scale"] = np.ones(1, np.float32)
        with pytest.raises(ModelFileError, match=r"no tile sizes are known for TL. of 256 rows.*take the model's I2_S"):
            open_model(model.write(tmp_path))
    with pytest.raises(ValueError, match="no tile sizes"):
        check_ternary(GGMLType.TL1, (2560, 6912), "official")


@pytest.mark.parametrize("shape", [(2, 128), (64,), (1, 2, 256)])
def test_shapes_that_cannot_be(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, {"general.architecture": "bitnet"}, {"x": np.zeros((*shape, 1)[-4:], np.float32).reshape(shape)})
    content = bytearray(path.read_bytes())
    at = content.index(b"\x01\x00\x00\x00\x00\x00\x00\x00x") + 9 + 4 + 8 * len(shape)
    content[at] = GGMLType.TL2
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="TL2 needs rows of 256") as caught:
        GGUFFile(path)
    assert caught.value.field == "tensor 'x' shape"
    assert caught.value.offset == at - 8 * len(shape)


def test_numbers_that_stand_for_nothing() -> None:
    shape = (1536, 1536)
    data = tl1(drawn(shape), TL1_TILES[shape])
    data[12_345] = 0x49
    with pytest.raises(ValueError, match="the number 9"):
        list(tl_rows(GGMLType.TL1, shape, data))
    data = tl2(drawn(shape), TL2_TILES[shape])
    data[54_321] = 0xE0
    with pytest.raises(ValueError, match="the number 14"):
        list(tl_rows(GGMLType.TL2, shape, data))


def test_signs_of_zeros() -> None:
    shape = (1536, 1536)
    data = tl2(np.zeros(shape, np.int8), TL2_TILES[shape])
    assert not data.any()
    data[1536 * 1536 // 6 + 999] = 0x10
    with pytest.raises(ValueError, match="a zero has a sign"):
        list(tl_rows(GGMLType.TL2, shape, data))
