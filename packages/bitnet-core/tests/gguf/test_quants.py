"""Decoders against the ``gguf`` package's, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bitnet.core.gguf import quants
from bitnet.core.gguf.types import BLOCKS, GGMLType, tensor_bytes

SCALES_AT = {
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
}


def random_blocks(dtype: GGMLType, count: int, rng: np.random.Generator) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, BLOCKS[dtype][1]), dtype=np.uint8)
    for at in SCALES_AT.get(dtype, ()):
        blocks[:, at : at + 2] = rng.normal(0, 1, (count, 1)).astype("<f2").view(np.uint8)
    return blocks


@pytest.mark.parametrize("dtype", [*SCALES_AT, GGMLType.BF16])
def test_decoder_equals_the_gguf_packages(dtype: GGMLType) -> None:
    rng = np.random.default_rng()
    blocks = random_blocks(dtype, 5 * 256 + 3, rng)
    if dtype is GGMLType.BF16:
        values = rng.normal(0, 100, 1283).astype(np.float32)
        blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint8).reshape(-1, 2)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(dtype)).reshape(-1)
    out = np.full(expected.shape, np.nan, np.float32)
    quants.decode(dtype, blocks.reshape(-1), out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [GGMLType.F32, GGMLType.F16])
def test_floats(dtype: GGMLType) -> None:
    values = np.random.default_rng().normal(size=1000).astype({4: "<f4", 2: "<f2"}[BLOCKS[dtype][1]])
    out = np.full(1000, np.nan, np.float32)
    quants.decode(dtype, values.view(np.uint8), out)
    np.testing.assert_array_equal(out, values.astype(np.float32))


def test_decoding_goes_on_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(GGMLType.Q6_K, 100, np.random.default_rng())
    whole, pieces = np.empty(25600, np.float16), np.empty(25600, np.float16)
    quants.decode(GGMLType.Q6_K, blocks.reshape(-1), whole)
    monkeypatch.setattr(quants, "CHUNK", 256 * 7)
    quants.decode(GGMLType.Q6_K, blocks.reshape(-1), pieces)
    np.testing.assert_array_equal(pieces, whole)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    known = BLOCKS.keys() & {int(t) for t in gguf.GGMLQuantizationType}
    assert {t.name for t in BLOCKS.keys() - known} == {"Q2_0", "Q2_0_G128", "STQ1_0", "PQ2_0", "PTQ1_0"}
    assert {t: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(t)] for t in known} == {t: BLOCKS[t] for t in known}
    assert tensor_bytes(GGMLType.I2_S, (256, 128)) == 256 * 32 + 32
