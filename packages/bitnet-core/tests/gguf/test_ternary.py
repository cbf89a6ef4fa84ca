"""Packing of ternary weights, and decoding every encoding of a file into it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bitnet.core.gguf import i2s_bytes, pack_ternary, unpack_ternary
from bitnet.core.gguf.ternary import I2SLayout, check_ternary, i2s_tail, load_ternary
from bitnet.core.gguf.types import GGMLType


def random_weights(n: int, k: int) -> np.ndarray:
    return np.random.default_rng().integers(-1, 2, (n, k), dtype=np.int8)


def pack_by_definition(weights: np.ndarray) -> np.ndarray:
    """The packing as the hardware contract words it, one weight at a time."""
    n, k = weights.shape
    packed = np.zeros((n, -(-k // 128) * 32), np.uint8)
    for row in range(n):
        for i in range(-(-k // 128) * 128):
            code = weights[row, i] + 1 if i < k else 1
            packed[row, i // 128 * 32 + i % 32] |= code << (6 - 2 * (i % 128 // 32))
    return packed


@pytest.mark.parametrize("k", [1, 100, 128, 130, 256, 300])
def test_packing_is_as_defined(k: int) -> None:
    weights = random_weights(5, k)
    packed = pack_ternary(weights)
    np.testing.assert_array_equal(packed, pack_by_definition(weights))
    np.testing.assert_array_equal(unpack_ternary(packed, k), weights)


def read(
    dtype: GGMLType, shape: tuple[int, int], data: np.ndarray, layout: I2SLayout = "official", *, master: bool = False
) -> tuple[np.ndarray, float]:
    data.flags.writeable = False
    loaded = load_ternary(dtype, shape, data, layout, master=master)
    assert loaded.codes.shape == (shape[0], -(-shape[1] // 128) * 32)
    return unpack_ternary(loaded.codes, shape[1]), float(loaded.scale[0])


def test_official_i2s_rows_are_adopted() -> None:
    weights = random_weights(6, 256)
    data = i2s_bytes(weights, 0.625)
    loaded = load_ternary(GGMLType.I2_S, weights.shape, data, "official", master=False)
    assert np.shares_memory(loaded.codes, data)
    assert loaded.scale == 0.625
    np.testing.assert_array_equal(loaded.codes, pack_by_definition(weights))


@pytest.mark.parametrize("shape", [(128, 3), (2100, 320), (16, 200)])
def test_i2s_blocks_run_on_over_rows(shape: tuple[int, int]) -> None:
    # bitnet_b1_58-3B has ffn rows of 8640 weights: 67.5 blocks.
    weights = random_weights(*shape)
    codes, scale = read(GGMLType.I2_S, shape, i2s_bytes(weights, 2.0))
    np.testing.assert_array_equal(codes, weights)
    assert scale == 2.0


def flat_blocks(codes: np.ndarray, width: int) -> np.ndarray:
    """Blocks of ``4 * width`` weights in ``width`` bytes, written one weight at a time."""
    out = np.zeros(codes.size // 4, np.uint8)
    for i, code in enumerate(codes.reshape(-1)):
        block, place = divmod(i, 4 * width)
        out[block * width + place % width] |= code << (6 - 2 * (place // width))
    return out


@pytest.mark.parametrize("shape", [(4, 64), (8, 112), (1028, 64)])
def test_arm_layout(shape: tuple[int, int]) -> None:
    weights = random_weights(*shape)
    data = np.concatenate([flat_blocks((weights + 1).view(np.uint8), 16), i2s_tail(0.5)])
    codes, scale = read(GGMLType.I2_S, shape, data, "arm")
    np.testing.assert_array_equal(codes, weights)
    assert scale == 0.5


@pytest.mark.parametrize("shape", [(4, 5), (1032, 130)])
def test_column_layout(shape: tuple[int, int]) -> None:
    weights = random_weights(*shape)
    codes = (weights + 1).view(np.uint8)
    data = np.empty(codes.size // 4, np.uint8)
    for r in range(shape[0] // 4):
        for c in range(shape[1]):
            q = codes[4 * r : 4 * r + 4, c]
            data[r * shape[1] + c] = q[0] << 6 | q[1] << 4 | q[2] << 2 | q[3]
    got, _ = read(GGMLType.I2_S, shape, np.concatenate([data, i2s_tail(1.0)]), "columns")
    np.testing.assert_array_equal(got, weights)


@pytest.mark.parametrize("dtype", [GGMLType.TQ1_0, GGMLType.TQ2_0])
@pytest.mark.parametrize("shape", [(3, 256), (1030, 512)])
def test_tq(dtype: GGMLType, shape: tuple[int, int]) -> None:
    weights = random_weights(*shape)
    weights[1, :256] = 0  # a block of zeros, whose scale is 0
    data = gguf.quants.quantize(weights * np.float32(0.75), gguf.GGMLQuantizationType(dtype)).reshape(-1)
    codes, scale = read(dtype, shape, data)
    np.testing.assert_array_equal(codes, weights)
    assert scale == 0.75


def test_tq_with_many_scales_is_refused() -> None:
    values = random_weights(2, 512) * np.float32(1.0)
    values[1] *= 2
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.TQ2_0).reshape(-1)
    with pytest.raises(ValueError, match=r"2 different scales, 1\.0 to 2\.0"):
        read(GGMLType.TQ2_0, (2, 512), data)


FLOATS = {GGMLType.F32: "<f4", GGMLType.F16: "<f2", GGMLType.BF16: "bf16"}


def encode(dtype: GGMLType, values: np.ndarray) -> np.ndarray:
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType(dtype)).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_masters_are_quantised_absmean(dtype: GGMLType) -> None:
    data = encode(dtype, np.random.default_rng().normal(0, 0.02, (1500, 96)).astype(np.float32))
    raw = data if dtype is GGMLType.BF16 else data.view(FLOATS[dtype])
    exact = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(dtype)).reshape(1500, 96).astype(np.float64)
    codes, scale = read(dtype, (1500, 96), data, master=True)
    assert scale == pytest.approx(np.abs(exact).mean(), rel=1e-6)
    clear = np.abs(np.abs(exact / scale) % 1 - 0.5) > 1e-5
    np.testing.assert_array_equal(codes[clear], np.clip(np.rint(exact / scale), -1, 1)[clear])
    with pytest.raises(ValueError, match="not ternary"):
        read(dtype, (1500, 96), data, master=False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("master", [False, True])
def test_floats_that_are_ternary_keep_their_scale(dtype: GGMLType, master: bool) -> None:
    # Their mean magnitude is less than their scale, so quantising them again would be wrong.
    weights = random_weights(1200, 64)
    codes, scale = read(dtype, weights.shape, encode(dtype, weights * np.float32(0.625)), master=master)
    np.testing.assert_array_equal(codes, weights)
    assert scale == 0.625


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_zero(dtype: GGMLType) -> None:
    codes, scale = read(dtype, (2, 64), encode(dtype, np.zeros((2, 64), np.float32)))
    assert not codes.any()
    assert scale == 0


def test_not_finite() -> None:
    with pytest.raises(ValueError, match="scale is nan"):
        read(GGMLType.I2_S, (1, 128), i2s_bytes(random_weights(1, 128), float("nan")))
    with pytest.raises(ValueError, match="scale is nan"):
        read(GGMLType.F32, (1, 2), encode(GGMLType.F32, np.array([1, np.nan], np.float32)), master=True)


@pytest.mark.parametrize(
    ("dtype", "shape", "layout", "message"),
    [
        (GGMLType.Q8_0, (2, 128), "official", "Q8_0 holds no ternary weights"),
        (GGMLType.I2_S, (2, 32), "official", "multiple of 128"),
        (GGMLType.I2_S, (6, 128), "columns", "multiple of 4"),
    ],
)
def test_what_cannot_be_ternary(dtype: GGMLType, shape: tuple[int, int], layout: I2SLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_ternary(dtype, shape, layout)
