"""Ternary block formats against the projects that write them, and on random weights against their definitions.

``ternary_blocks.npz`` holds 1,024 random weights of each type, the bytes that another project's code made of them, and
the numbers that its reader gives back. Q2_0, Q1_0, TQ1_0 and TQ2_0: llama.cpp's ``ggml-quants.c`` as llama-cpp-python
0.3.36 brings it. PQ2_0 and PTQ1_0: the reference loops of PrismML's fork (``quantize_row_*_ref``). STQ1_0: random
bytes, read by the loop and the code book of llama.cpp's pull request 22836.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from bitnet.core.gguf import unpack_ternary
from bitnet.core.gguf.blocks import (
    FORMATS,
    TWO_BITS,
    code_bytes,
    code_places,
    encode_blocks,
    packed_codes,
    ternary_codes,
)
from bitnet.core.gguf.quants import decode
from bitnet.core.gguf.ternary import holds_threes, load_ternary, pack_codes
from bitnet.core.gguf.types import BLOCKS, GGMLType

SAMPLES = np.load(Path(__file__).with_name("ternary_blocks.npz"))
NAMES = sorted({name.partition(".")[0] for name in SAMPLES.files})


def drawn(dtype: GGMLType, blocks: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales that the type can hold."""
    codes = rng.integers(0, 3, (blocks, BLOCKS[dtype][0]), dtype=np.uint8)
    if dtype is GGMLType.STQ1_0:  # one zero in each four weights 16 apart
        fours = rng.choice(np.array([0, 2], np.uint8), (blocks, 4, 16, 4))
        np.put_along_axis(fours, rng.integers(0, 4, (blocks, 4, 16, 1)), 1, axis=3)
        codes = fours.swapaxes(2, 3).reshape(blocks, 256)
    if dtype is GGMLType.Q1_0:
        codes = rng.choice(np.array([0, 2], np.uint8), codes.shape)
    return codes, rng.uniform(-2, 2, blocks).astype(np.float16)


def test_samples_are_there() -> None:
    assert set(NAMES) == {dtype.name for dtype in FORMATS} - {"Q2_0_G128"}  # which has PQ2_0's layout


@pytest.mark.parametrize("name", NAMES)
def test_another_projects_blocks(name: str) -> None:
    dtype = GGMLType[name]
    weights, scales, data = (SAMPLES[f"{name}.{part}"] for part in ("weights", "scales", "data"))
    out = np.full(len(weights), np.nan, np.float32)
    decode(dtype, data, out)
    np.testing.assert_array_equal(out, SAMPLES[f"{name}.values"].astype(np.float32))
    made = encode_blocks(dtype, (weights + 1).view(np.uint8).reshape(len(scales), -1), scales)
    np.testing.assert_array_equal(made.reshape(-1), data)
    loaded = load_ternary(dtype, (1, len(weights)), data, "official", master=False, grouped=True)
    np.testing.assert_array_equal(unpack_ternary(loaded.codes, len(weights))[0], weights)
    np.testing.assert_array_equal(loaded.scale[0], scales)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)
def test_there_and_back(dtype: GGMLType) -> None:
    codes, scales = drawn(dtype, 300, np.random.default_rng())
    blocks = encode_blocks(dtype, codes, scales)
    assert blocks.shape == (300, BLOCKS[dtype][1])
    have, units = ternary_codes(dtype, blocks)
    np.testing.assert_array_equal(have, codes)
    np.testing.assert_array_equal(units, scales)
    assert not holds_threes(dtype, blocks.reshape(-1))


@pytest.mark.parametrize("dtype", [GGMLType.TQ1_0, GGMLType.TQ2_0])
def test_written_blocks_are_the_gguf_packages(dtype: GGMLType) -> None:
    codes, scales = drawn(dtype, 200, np.random.default_rng())
    scales, codes[:, 0] = abs(scales), 2  # a block of zeros would have no scale there
    values = (codes.view(np.int8) - np.float32(1)) * scales[:, None].astype(np.float32)
    kind = gguf.GGMLQuantizationType(dtype)
    blocks = encode_blocks(dtype, codes, scales)
    np.testing.assert_array_equal(blocks.reshape(-1), gguf.quants.quantize(values, kind).reshape(-1))
    np.testing.assert_array_equal(gguf.quants.dequantize(blocks, kind), values)


@pytest.mark.parametrize("dtype", sorted(TWO_BITS))
def test_threes_are_found(dtype: GGMLType) -> None:
    rng = np.random.default_rng()
    codes, scales = drawn(dtype, 50, rng)
    codes[rng.integers(50), rng.integers(codes.shape[1])] = 3
    assert holds_threes(dtype, encode_blocks(dtype, codes, scales).reshape(-1))


def test_weights_that_q1_0_cannot_hold() -> None:
    """A zero beside others; a block of zeros has the scale 0."""
    codes, scales = drawn(GGMLType.Q1_0, 20, np.random.default_rng())
    codes[3] = 1
    values = np.empty(codes.shape, np.float32)
    decode(GGMLType.Q1_0, encode_blocks(GGMLType.Q1_0, codes, scales).reshape(-1), values)
    np.testing.assert_array_equal(values, (codes.view(np.int8) - 1) * scales[:, None].astype(np.float32))
    codes[7, 65] = 1
    with pytest.raises(ValueError, match="has no zeros"):
        encode_blocks(GGMLType.Q1_0, codes, scales)


def test_weights_that_stq1_0_cannot_hold() -> None:
    codes, scales = drawn(GGMLType.STQ1_0, 20, np.random.default_rng())
    codes[7, 65::16][:4] = 1
    with pytest.raises(ValueError, match="exactly one zero"):
        encode_blocks(GGMLType.STQ1_0, codes, scales)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)
def test_packing_with_and_without_unpacking_is_the_same(dtype: GGMLType) -> None:
    rng = np.random.default_rng()
    codes, scales = drawn(dtype, 6, rng)
    blocks = encode_blocks(dtype, codes, scales)
    packed = packed_codes(dtype, blocks)
    assert (packed is None) == (FORMATS[dtype].repack is None)
    if packed is None:
        return
    assert np.array_equal(packed.reshape(-1), pack_codes(codes.reshape(1, -1)).reshape(-1))
    zero = blocks.copy()
    zero[2, FORMATS[dtype].scale_at : FORMATS[dtype].scale_at + 2] = 0
    assert packed_codes(dtype, zero) is None
    if dtype in TWO_BITS:
        codes[4, 5] = 3
        assert packed_codes(dtype, encode_blocks(dtype, codes, scales)) is None
        return
    noise = rng.integers(0, 256, blocks.shape, np.uint8)  # bytes that no writer of base-3 digits makes, among others
    at = slice(FORMATS[dtype].scale_at, FORMATS[dtype].scale_at + 2)
    noise[:, at] = blocks[:, at]
    packed = packed_codes(dtype, noise)
    assert packed is not None
    assert np.array_equal(packed.reshape(-1), pack_codes(ternary_codes(dtype, noise)[0].reshape(1, -1)).reshape(-1))


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)
def test_codes_are_digits_of_single_bytes(dtype: GGMLType) -> None:
    """In any block, also those that no writer makes; STQ1_0 has a number for four weights."""
    places = code_places(dtype)
    assert (places is None) == (dtype is GGMLType.STQ1_0)
    if places is not None:
        base, place, factor = places
        noise = np.random.default_rng().integers(0, 256, (50, BLOCKS[dtype][1]), np.uint8)
        digits = (noise[:, place] * factor).astype(np.int32) * base >> 8
        codes = FORMATS[dtype].unpack(code_bytes(dtype, noise))
        np.testing.assert_array_equal(digits * 2 if base == 2 else digits, codes)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)
def test_halves_are_rounded_floats(dtype: GGMLType) -> None:
    """In every bit: of negative scales, too, of zero, of the least half, and of a weight of 2."""
    rng = np.random.default_rng()
    codes, scales = drawn(dtype, 6, rng)
    if dtype not in (GGMLType.STQ1_0, GGMLType.Q1_0):
        scales[:3] = 0, -0.0, 2**-24
    shape = codes.shape
    for last in (None, 3) if dtype in TWO_BITS else (None,):
        if last is not None:
            codes[5, 1] = last
        blocks = encode_blocks(dtype, codes, scales).reshape(-1)
        halves, floats = np.full(shape, np.nan, np.float16), np.full(shape, np.nan, np.float32)
        decode(dtype, blocks, halves)
        decode(dtype, blocks, floats)
        assert np.array_equal(halves.view(np.uint16), floats.astype(np.float16).view(np.uint16))
