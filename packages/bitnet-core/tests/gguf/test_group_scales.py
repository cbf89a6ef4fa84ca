"""Ternary tensors with a scale in each block: Q2_0 in groups of 64 and of 128, and TQ types whose scales differ."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGUFFile, TensorSource, unpack_ternary, write_gguf
from bitnet.core.gguf.quants import decode
from bitnet.core.gguf.ternary import load_ternary
from bitnet.core.gguf.types import GGMLType

GROUPS = {GGMLType.Q2_0: 64, GGMLType.Q2_0_G128: 128}


def q2_0_by_definition(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bytes of a tensor, one code at a time: an f16 scale, then four neighbouring codes a byte, lowest bits first.

    Source: ``block_q2_0`` and ``dequantize_row_q2_0`` of llama.cpp (``ggml-common.h``, ``ggml-quants.c``).
    """
    (n, k), count = codes.shape, scales.shape[1]
    group, out = k // count, bytearray()
    for row in range(n):
        for s in range(count):
            block = bytearray(group // 4)
            for j in range(group):
                block[j // 4] |= int(codes[row, s * group + j]) << 2 * (j % 4)
            out += scales[row, s].astype("<f2").tobytes() + block
    return np.frombuffer(bytes(out), np.uint8)


def drawn(n: int, k: int, group: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes (weight + 1) and scales."""
    return rng.integers(0, 3, (n, k)), rng.uniform(-2, 2, (n, k // group)).astype(np.float16)


@pytest.mark.parametrize("dtype", GROUPS)
@pytest.mark.parametrize("shape", [(3, 128), (40, 640), (5, 2048)])
def test_q2_0(dtype: GGMLType, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng()
    codes, scales = drawn(*shape, GROUPS[dtype], rng)
    data = q2_0_by_definition(codes, scales)
    loaded = load_ternary(dtype, shape, data, "official", master=False, grouped=True)
    np.testing.assert_array_equal(unpack_ternary(loaded.codes, shape[1]), codes - 1)
    np.testing.assert_array_equal(loaded.scale, scales)
    assert loaded.scale.dtype == np.float16
    out = np.full(shape, np.nan, np.float16)
    decode(dtype, data, out)
    np.testing.assert_array_equal(out, (codes - 1) * scales.repeat(GROUPS[dtype], 1))


@pytest.mark.parametrize("dtype", GROUPS)
def test_bytes_tell_the_groups(dtype: GGMLType, tmp_path: Path) -> None:
    """Two types share a number in files: tensors of the right one fill the room between their offsets."""
    rng = np.random.default_rng()
    tensors: dict[str, Any] = {"norm": rng.standard_normal(7).astype(np.float32)}
    drawn_of = {}
    for name, shape in {"small": (1, 128), "large": (33, 640), "last": (8, 256)}.items():
        drawn_of[name] = drawn(*shape, GROUPS[dtype], rng)
        tensors[name] = TensorSource(shape, dtype, q2_0_by_definition(*drawn_of[name]))
    path = tmp_path / "a.gguf"
    write_gguf(path, {"general.architecture": "qwen3"}, tensors)
    file = GGUFFile(path)
    for name, (codes, scales) in drawn_of.items():
        info = file.tensors[name]
        assert info.type is dtype
        out = np.empty(info.shape, np.float32)
        decode(info.type, file.data(info), out)
        np.testing.assert_array_equal(out, (codes - 1) * scales.repeat(GROUPS[dtype], 1).astype(np.float32))


@pytest.mark.parametrize("number", [42, 43])
def test_the_number_of_stq1_0(number: int, tmp_path: Path) -> None:
    """Tencent's files have STQ1_0 under the number 42; llama.cpp's pull request has 43."""
    rng = np.random.default_rng()
    tensors: dict[str, Any] = {"norm": rng.standard_normal(7).astype(np.float32)}
    blocks = {name: rng.integers(0, 256, (n, 42), dtype=np.uint8) for name, n in {"small": 3, "large": 120}.items()}
    for name, data in blocks.items():
        tensors[name] = TensorSource((len(data) // 3, 768), GGMLType.STQ1_0, data)
    path = tmp_path / "a.gguf"
    write_gguf(path, {"general.architecture": "qwen3"}, tensors)
    for name in blocks:
        entry = GGUFFile(path).tensors[name].entry
        at = entry + 8 + len(name) + 4 + 2 * 8
        content = path.read_bytes()
        assert content[at : at + 4] == struct.pack("<I", 43)
        path.write_bytes(content[:at] + struct.pack("<I", number) + content[at + 4 :])
    file = GGUFFile(path)
    for name, data in blocks.items():
        assert file.tensors[name].type is GGMLType.STQ1_0
        np.testing.assert_array_equal(file.data(file.tensors[name]).reshape(-1, 42), data)


def test_files_that_hold_neither(tmp_path: Path) -> None:
    codes, scales = drawn(33, 640, 64, np.random.default_rng())
    path = tmp_path / "a.gguf"
    source = TensorSource((33, 640), GGMLType.Q2_0, q2_0_by_definition(codes, scales))
    write_gguf(path, {"general.architecture": "qwen3"}, {"x": source})
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelFileError, match="past the end of the file"):
        GGUFFile(path)


def test_weights_that_are_not_ternary() -> None:
    codes, scales = drawn(4, 128, 64, np.random.default_rng())
    codes[2, 77] = 3
    data = q2_0_by_definition(codes, scales)
    with pytest.raises(ValueError, match="code 3, which means 2"):
        load_ternary(GGMLType.Q2_0, (4, 128), data, "official", master=False, grouped=True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite(value: float) -> None:
    codes, scales = drawn(4, 128, 64, np.random.default_rng())
    scales[1, 1] = value
    with pytest.raises(ValueError, match="not finite"):
        load_ternary(GGMLType.Q2_0, (4, 128), q2_0_by_definition(codes, scales), "official", master=False, grouped=True)


@pytest.mark.parametrize("dtype", [GGMLType.TQ1_0, GGMLType.TQ2_0])
def test_tq_with_several_scales(dtype: GGMLType) -> None:
    """As the ``gguf`` package quantises and reads them."""
    rng = np.random.default_rng()
    codes, scales = drawn(6, 1024, 256, rng)
    weights = ((codes - 1) * abs(scales).repeat(256, 1)).astype(np.float32)
    kind = gguf.GGMLQuantizationType(dtype)
    data = gguf.quants.quantize(weights, kind)
    loaded = load_ternary(dtype, (6, 1024), data.reshape(-1), "official", master=False, grouped=True)
    have = unpack_ternary(loaded.codes, 1024) * loaded.scale.repeat(256, 1).astype(np.float32)
    np.testing.assert_array_equal(have, gguf.quants.dequantize(data, kind))
    with pytest.raises(ValueError, match="different scales"):
        load_ternary(dtype, (6, 1024), data.reshape(-1), "official", master=False)
