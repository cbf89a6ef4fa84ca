"""Reported statistics of a file's weights, and warnings about layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, i2s_bytes, write_gguf
from bitnet.core.gguf.blocks import encode_blocks
from bitnet.core.gguf.ternary import I2SLayout, i2s_codes, i2s_tail
from bitnet.core.model.default import default_model_path
from bitnet.core.model.inspect import TensorReport, inspect_tensors


def trained(n: int, k: int) -> np.ndarray:
    """Weights with more zeros in some rows and columns than in others, as trained ones have."""
    rng = np.random.default_rng()
    rows, columns = rng.normal(0, 0.5, (n, 1)), rng.normal(0, 0.5, (1, k))
    values = rng.normal(size=(n, k)) * np.exp(rows + columns)
    return (np.sign(values) * (np.abs(values) > 0.5)).astype(np.int8)


def encoded(weights: np.ndarray, layout: I2SLayout) -> TensorSource:
    codes = (weights + 1).view(np.uint8)
    if layout == "official":
        data = i2s_bytes(weights, 0.5)
    else:
        width = 16 if layout == "arm" else weights.shape[1]
        quarters = codes.reshape(-1, 4, width)
        packed = quarters[:, 0] << 6 | quarters[:, 1] << 4 | quarters[:, 2] << 2 | quarters[:, 3]
        data = np.concatenate([packed.reshape(-1), i2s_tail(0.5)])
    return TensorSource(weights.shape, GGMLType.I2_S, data)


def report(path: Path, tensor: TensorSource, layout: I2SLayout = "official") -> TensorReport:
    write_gguf(path / "a", {}, {"w": tensor, "norm": np.ones(3, np.float32)})
    first, second = inspect_tensors(GGUFFile(path / "a"), layout)
    assert second.info.name == "norm"
    assert (second.statistics, second.warnings) == (None, ())
    return first


@pytest.mark.parametrize("layout", ["official", "arm", "columns"])
def test_statistics(tmp_path: Path, layout: I2SLayout) -> None:
    weights = trained(300, 320)
    statistics = report(tmp_path, encoded(weights, layout), layout).statistics
    assert statistics is not None
    assert statistics.minus == pytest.approx((weights == -1).mean())
    assert statistics.zero == pytest.approx((weights == 0).mean())
    assert statistics.plus == pytest.approx((weights == 1).mean())
    assert statistics.unused == 0
    assert statistics.scale == 0.5


@pytest.mark.parametrize("dtype", [GGMLType.TQ1_0, GGMLType.TQ2_0])
def test_statistics_of_other_types(tmp_path: Path, dtype: GGMLType) -> None:
    weights = trained(100, 512)
    data = gguf.quants.quantize(weights * np.float32(2), gguf.GGMLQuantizationType(dtype))
    found = report(tmp_path, TensorSource(weights.shape, dtype, data))
    assert found.statistics is not None
    assert found.statistics.zero == pytest.approx((weights == 0).mean())
    assert found.statistics.scale == 2.0
    assert found.warnings == ()


@pytest.mark.parametrize("name", ["w.scale", "w.weight_scale"])
def test_a_scale_in_a_tensor_of_its_own(tmp_path: Path, name: str) -> None:
    weights = trained(100, 512)
    data = gguf.quants.quantize(weights * np.float32(2), gguf.GGMLQuantizationType.TQ2_0)
    source = TensorSource(weights.shape, GGMLType.TQ2_0, data)
    tensors: dict[str, Any] = {"w.weight": source, name: np.array([0.375], np.float32)}
    write_gguf(tmp_path / "a", {}, tensors)
    statistics = next(inspect_tensors(GGUFFile(tmp_path / "a"))).statistics
    assert statistics is not None
    assert statistics.scale == 0.75


@pytest.mark.parametrize("columns", [64, 192])
def test_padding_counts_for_nothing(tmp_path: Path, columns: int) -> None:
    """Rows are read into whole blocks of 128."""
    weights = np.random.default_rng().choice(np.array([-1, 0, 1, 1], np.int8), (50, columns))
    codes, scales = (weights + 1).astype(np.uint8), np.ones(weights.size // 64, np.float16)
    blocks = encode_blocks(GGMLType.Q2_0, codes.reshape(-1, 64), scales)
    statistics = report(tmp_path, TensorSource(weights.shape, GGMLType.Q2_0, blocks)).statistics
    assert statistics is not None
    shares = [float((weights == weight).mean()) for weight in (-1, 0, 1)]
    assert [statistics.minus, statistics.zero, statistics.plus] == pytest.approx(shares)


@pytest.mark.parametrize("shape", [(640, 2560), (1024, 1728), (256, 256)])
@pytest.mark.parametrize("layout", ["official", "columns"])
@pytest.mark.parametrize("assumed", ["official", "arm", "columns"])
def test_layouts_are_told_apart(tmp_path: Path, shape: tuple[int, int], layout: I2SLayout, assumed: I2SLayout) -> None:
    found = report(tmp_path, encoded(trained(*shape), layout), assumed)
    mixed = (layout == "columns") != (assumed == "columns")
    assert any("when read with the I2_S layout" in w for w in found.warnings) == mixed
    assert len(found.warnings) == mixed


@pytest.mark.parametrize("layout", ["official", "arm", "columns"])
def test_weights_without_structure_raise_no_doubt(tmp_path: Path, layout: I2SLayout) -> None:
    weights = np.random.default_rng().integers(-1, 2, (1024, 1024), dtype=np.int8)
    assert report(tmp_path, encoded(weights, layout)).warnings == ()


def test_odd_codes(tmp_path: Path) -> None:
    weights = trained(128, 128)
    source = encoded(weights, "official")
    assert isinstance(source.data, np.ndarray)
    source.data[0] |= 0b11000000
    assert "codes are 3" in report(tmp_path, source).warnings[0]
    assert "zero" in report(tmp_path, encoded(np.zeros((128, 128), np.int8), "official")).warnings[0]
    assert "zero" in report(tmp_path, encoded(np.where(weights == 0, 1, weights), "official")).warnings[0]
    assert "balanced" in report(tmp_path, encoded(np.abs(weights), "official")).warnings[0]


def test_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    data = gguf.quants.quantize(trained(2, 512) * np.float32(1), gguf.GGMLQuantizationType.TQ2_0)
    data[1, -2:] = np.array([np.nan], "<f2").view(np.uint8)  # the scale of the last block
    assert "a scale is not finite" in report(tmp_path, TensorSource((2, 512), GGMLType.TQ2_0, data)).warnings[0]
    odd = TensorSource((3, 64), GGMLType.I2_S, np.zeros(48 + 32, np.uint8))
    assert "multiple of 128" in report(tmp_path, odd).warnings[0]


@pytest.mark.parametrize("stored", ["official", "arm"])
@pytest.mark.parametrize("assumed", ["official", "arm"])
def test_the_order_of_columns_is_told_by_norms(tmp_path: Path, stored: I2SLayout, assumed: I2SLayout) -> None:
    """A trained model: the one that comes with the package."""
    model = GGUFFile(default_model_path())
    tensors: dict[str, Any] = {}
    for name, info in model.tensors.items():
        tensors[name] = TensorSource(info.shape, info.type, model.data(info))
        if info.type is GGMLType.I2_S:
            codes = i2s_codes(model.data(info), info.shape[1], 0, info.shape[0], "official")
            tensors[name] = encoded(codes.view(np.int8) - np.int8(1), stored)
    write_gguf(tmp_path / "a", {}, tensors)
    warned = [r for r in inspect_tensors(GGUFFile(tmp_path / "a"), assumed) if r.warnings]
    if stored == assumed:
        assert not warned
        return
    assert len(warned) >= 10
    for found in warned:
        assert f"_norm.weight' when read with the I2_S layout '{stored}'" in found.warnings[0]


SIGNALLING = int(np.array(0x7F800001).astype(np.int32))
"""The bits of a NaN that raises a warning where it is converted."""


@pytest.mark.parametrize("bits", [*np.array([np.nan, np.inf, 0, 3e38], np.float32).view(np.int32), SIGNALLING])
@pytest.mark.filterwarnings("error")
def test_norms_that_tell_nothing(tmp_path: Path, bits: int) -> None:
    norm = np.full(512, bits, np.int32).view(np.float32)
    tensors: dict[str, Any] = {"blk.0.attn_norm.weight": norm, "blk.0.attn_q.weight": encoded(trained(256, 512), "arm")}
    write_gguf(tmp_path / "a", {}, tensors)
    assert [r.warnings for r in inspect_tensors(GGUFFile(tmp_path / "a"))] == [(), ()]
