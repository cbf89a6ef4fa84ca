"""Defaults of keys missing in ``config.json``, by architecture. ``tests/oracle`` compares them with transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.model import open_model
from bitnet.core.model.config import ModelConfig
from bitnet.core.model.convert import convert_model
from bitnet.core.model.hf_config import HFConfig

Make = Callable[..., Any]
BITNET = {
    "vocab_size": 128_256,
    "hidden_size": 2560,
    "layers": 30,
    "heads": 20,
    "kv_heads": 5,
    "head_dim": 128,
    "ffn_size": 6912,
    "context_length": 2048,
    "rms_eps": 1e-5,
    "rope_theta": 500_000.0,
    "activation": "relu2",
    "tied_embeddings": False,
}
LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 32,
    "head_dim": 128,
    "ffn_size": 11_008,
    "context_length": 2048,
    "rms_eps": 1e-6,
    "rope_theta": 10_000.0,
    "activation": "silu",
    "tied_embeddings": False,
}
OLMO = LLAMA | {"vocab_size": 50_304, "rms_eps": 1e-5, "layer_norms": True}
QWEN2 = LLAMA | {"vocab_size": 151_936, "ffn_size": 22_016, "context_length": 32_768, "qkv_biases": True}
QWEN3 = QWEN2 | {"head_norms": True, "qkv_biases": False}
HUNYUAN = LLAMA | {"vocab_size": 290_943, "rms_eps": 1e-5, "head_norms": True}
SCALES = {"embedding_scale": 1.0, "residual_scale": 1 / math.sqrt(32), "logit_scale": 2**-12}
MINICPM = LLAMA | {"tied_embeddings": True} | SCALES
TABLE = {
    "BitNetForCausalLM": BITNET,
    "LlamaForCausalLM": LLAMA,
    "BitnetForCausalLM": LLAMA,
    "OlmoForCausalLM": OLMO,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "MiniCPMForCausalLM": MINICPM,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
}
IDS: dict[str, tuple[int | None, int | None]] = dict.fromkeys(TABLE, (1, 2))
IDS |= {"BitNetForCausalLM": (128_000, 128_001), "Qwen2ForCausalLM": (None, None), "Qwen3ForCausalLM": (None, None)}
IDS["OlmoForCausalLM"] = (None, 50_279)


def read(folder: Path, architecture: str, **values: Any) -> HFConfig:
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    known = {"architectures": [architecture], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(known | values))
    return HFConfig(folder)


def model(folder: Path, architecture: str, **values: Any) -> ModelConfig:
    return read(folder, architecture, **values).model


@pytest.mark.parametrize("architecture", TABLE)
def test_nothing_but_the_architecture(architecture: str, tmp_path: Path) -> None:
    config = read(tmp_path, architecture)
    assert {name: getattr(config.model, name) for name in TABLE[architecture]} == TABLE[architecture]
    assert (config.default_ids["bos_token_id"], config.default_ids["eos_token_id"]) == IDS[architecture]
    assert config.rope() == ({}, {})


@pytest.mark.parametrize("architecture", TABLE)
def test_null_is_derived(architecture: str, tmp_path: Path) -> None:
    """Only a key that is not there has BitNet's five key/value heads; null stands for as many as there are heads."""
    config = model(tmp_path, architecture, num_key_value_heads=None, head_dim=None, num_attention_heads=16)
    assert (config.heads, config.kv_heads, config.head_dim) == (16, 16, config.hidden_size // 16)


@pytest.mark.parametrize("architecture", TABLE)
def test_rotary_parameters(architecture: str, tmp_path: Path) -> None:
    default = TABLE[architecture]["rope_theta"]

    def theta(**values: Any) -> float:
        return model(tmp_path, architecture, **values).rope_theta

    assert theta(rope_parameters={"rope_type": "default"}) == default
    assert theta(rope_parameters={"rope_theta": 7.0}) == 7
    assert theta(rope_parameters={"rope_theta": 7.0}, rope_theta=8.0) == 7
    assert theta(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=8.0) == 8
    assert theta(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 7.0}) == default
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    trained = {"max_position_embeddings": 64}
    given = scaling | {"original_max_position_embeddings": 64}
    expected = read(tmp_path, architecture, rope_parameters=given).rope()[1]["rope_freqs.weight"]
    for values in (trained, {"original_max_position_embeddings": 64}):
        factors = read(tmp_path, architecture, rope_parameters=scaling, **values).rope()[1]["rope_freqs.weight"]
        assert factors.tolist() == expected.tolist()
    with pytest.raises(ModelFileError, match="partial_rotary_factor"):
        model(tmp_path, architecture, rope_parameters={"partial_rotary_factor": 0.5})


def test_a_converted_model_has_them(folder: Make) -> None:
    """A checkpoint of transformers' BitNet without these keys was converted with those of Llama."""
    source = folder()
    source.pack("autobitlinear")
    for key in ("rope_theta", "rms_norm_eps", "hidden_act", "max_position_embeddings"):
        del source.config[key]
    target = source.path.parent / "out.gguf"
    convert_model(source.write(), target)
    config = open_model(target).config
    assert (config.rope_theta, config.activation, config.context_length) == (500_000.0, "relu2", 2048)
    assert config.rms_eps == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "generation", "settings", "expected"),
    [
        ({}, {}, {}, (1, 2)),  # of a Llama's 283 tokens
        ({"eos_token_id": 5}, {}, {}, (1, 5)),
        ({"eos_token_id": None, "bos_token_id": None}, {}, {}, (None, None)),
        ({}, {"eos_token_id": [7, 8], "bos_token_id": 6}, {}, (6, 7)),
        ({}, {}, {"eos_token": "<|end|>", "bos_token": "<|begin|>"}, (-8, -7)),
    ],
)
def test_begin_and_end(folder: Make, config: Any, generation: Any, settings: Any, expected: Any) -> None:
    """The defaults of the architecture, where nothing in the folder names another token, or says that there is none."""
    source = folder("LlamaForCausalLM")
    source.pack("autobitlinear")
    del source.config["bos_token_id"], source.config["eos_token_id"]
    source.config |= config
    source.settings = settings
    path = source.write()
    (path / "generation_config.json").write_text(json.dumps(generation))
    convert_model(path, path.parent / "out.gguf")
    metadata = open_model(path.parent / "out.gguf").metadata
    found = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    assert found == tuple(source.size + i if i is not None and i < 0 else i for i in expected)
