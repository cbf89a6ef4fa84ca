"""MiniCPM's scales: files that lack them or have impossible ones, and what folding them into weights gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.hal import TERNARY_TABLES

Make = Callable[..., Any]
SCALES = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}


@pytest.fixture
def minicpm(tiny: Make) -> Any:
    model = tiny("minicpm")
    for layer in range(2):
        for name in ("attn_sub_norm", "ffn_sub_norm"):
            del model.tensors[f"blk.{layer}.{name}.weight"]
    model.metadata |= {model.key(name): value for name, value in SCALES.items()}
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_folded_where(minicpm: Any, tied: bool) -> None:
    """A stream divided by the residual scale: 48 times the embedding, and norms with 16 times the epsilon."""
    if not tied:
        minicpm.tensors["output.weight"] = minicpm.tensors["token_embd.weight"] * np.float16(2)
    file = minicpm.open()
    config, weights = file.config, file.weights
    assert (config.rope_style, config.activation) == ("interleaved", "silu")
    assert config.stream_eps == pytest.approx(16 * config.rms_eps)
    table = minicpm.tensors["token_embd.weight"].astype(np.float64)
    np.testing.assert_allclose(weights["token_embd"].load(), 48 * table, rtol=2**-22)
    norm = minicpm.tensors["output_norm.weight"]
    np.testing.assert_allclose(weights["output_norm"].load(), norm / (8 * 48 if tied else 8), rtol=2**-22)
    if not tied:
        np.testing.assert_array_equal(weights["output"].load(), minicpm.tensors["output.weight"])
    for name in ("attn_output", "ffn_down", "attn_q"):
        assert weights[f"blk.1.{name}"].load().scale[0] == np.float32(minicpm.scales[f"blk.1.{name}"])


def test_tables_are_rounded_once(minicpm: Any) -> None:
    """Float embeddings lose nothing; quantised ones become f16, as without a scale."""
    minicpm.metadata[minicpm.key("embedding_scale")] = 11.7
    raw = np.random.default_rng().normal(size=(300, 128)).astype(np.float32)
    for kind, dtype in (("F32", np.float32), ("F16", np.float32), ("BF16", np.float32), ("Q8_0", np.float16)):
        name = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(raw, name)
        minicpm.tensors["token_embd.weight"] = TensorSource(raw.shape, GGMLType[kind], data.view(np.uint8).reshape(-1))
        table = minicpm.open().weights["token_embd"].load()
        assert table.dtype == dtype
        exact = gguf.quants.dequantize(data, name).astype(np.float64) * np.float64(np.float32(11.7)) * 4
        np.testing.assert_allclose(table, exact, rtol=2**-11 if dtype is np.float16 else 2**-22, atol=2**-25)


@pytest.mark.parametrize("unit", [1.0, 2000.0])
def test_a_ternary_table(minicpm: Any, unit: float) -> None:
    """The scales stay f16, and a scale too large for f16 is an error."""
    blocks = np.full((300 * 128 // 64, 18), 0b10_01_00_10, np.uint8)
    blocks[:, :2] = np.array([unit], "<f2").view(np.uint8)
    minicpm.tensors["token_embd.weight"] = TensorSource((300, 128), GGMLType.Q2_0, blocks.reshape(-1))
    table = minicpm.open().weights_for((TERNARY_TABLES,))["token_embd"]
    if unit == 1:
        scales = table.load().scale
        assert scales.dtype == np.float16
        assert (scales == 48).all()
    else:
        with pytest.raises(ModelFileError, match="too large for float16") as caught:
            table.load()
        assert caught.value.field == "tensor 'token_embd.weight'"


@pytest.mark.parametrize("name", SCALES)
def test_missing_scales(minicpm: Any, name: str) -> None:
    del minicpm.metadata[minicpm.key(name)]
    with pytest.raises(ModelFileError, match="is missing") as caught:
        minicpm.open()
    assert caught.value.field == f"metadata 'minicpm.{name}'"
    assert caught.value.hint is not None


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e9, float("inf"), "1"])
def test_scales_that_no_model_has(minicpm: Any, value: object) -> None:
    minicpm.metadata[minicpm.key("residual_scale")] = value
    with pytest.raises(ModelFileError, match="residual_scale"):
        minicpm.open()


def test_floats_are_no_masters(minicpm: Any) -> None:
    """BitCPM4 is trained with a scale for each group: one absmean for a whole matrix would be another model."""
    minicpm.tensors["blk.0.attn_q.weight"] = np.random.default_rng().normal(size=(128, 128)).astype(np.float32)
    with pytest.raises(ModelFileError, match="not ternary"):
        minicpm.open().weights["blk.0.attn_q"].load()


@pytest.mark.parametrize(("name", "why"), [("clip", "reads no images")])
def test_architectures_that_are_refused_with_a_reason(minicpm: Any, name: str, why: str) -> None:
    minicpm.metadata["general.architecture"] = name
    with pytest.raises(ModelFileError, match=why) as caught:
        minicpm.open()
    assert caught.value.field == "metadata 'general.architecture'"
