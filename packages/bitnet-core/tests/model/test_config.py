"""Configuration from metadata: the rules for each architecture, and every invalid value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.model import ModelConfig

Make = Callable[..., Any]


def test_official_architecture(tiny: Make) -> None:
    model = tiny()
    model.metadata["general.name"] = "Tiny"
    assert model.open().config == ModelConfig(
        architecture="bitnet-b1.58",
        name="Tiny",
        vocab_size=300,
        hidden_size=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn_size=256,
        context_length=64,
        rms_eps=float(np.float32(1e-5)),
        rope_theta=500_000.0,
        rope_style="neox",
        rope_freq_factors=None,
        activation="relu2",
        sub_norms=True,
        tied_embeddings=True,
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.key_length", 1026, "the limit is 1024"),
        ("attention.key_length", 2**31 - 2, "the limit is 1024"),
        ("attention.head_count", 2**20, "the limit is 8192 for 128"),
        ("feed_forward_length", 8193, "the limit is 8192 for 128"),
        ("embedding_length", 131_076, "not supported; the limit is 131072"),
    ],
)
def test_sizes_that_no_model_has(tiny: Make, key: str, value: int, message: str) -> None:
    """They are refused before anything is made of them, whatever else is wrong."""
    model = tiny()
    model.metadata |= {model.key("rope.scaling.type"): "linear", model.key("rope.scaling.factor"): 2.0}
    model.metadata[model.key("attention.key_length")] = 32
    model.metadata[model.key(key)] = value
    with pytest.raises(ModelFileError, match=message) as caught:
        model.open()
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "key", "activation", "rope"),
    [
        ("bitnet-b1.58", "gpt2", None, "relu2", "neox"),
        ("bitnet-25", "gpt2", None, "relu2", "neox"),
        ("bitnet", "gpt2", None, "relu2", "neox"),  # 2B4T by llama.cpp
        ("bitnet", "llama", None, "silu", "neox"),  # 1bitLLM
        ("bitnet", "llama", "relu2", "relu2", "neox"),
        ("bitnet-b1.58", "gpt2", "silu", "silu", "neox"),
        ("llama", "gpt2", None, "silu", "interleaved"),
    ],
)
def test_activation_and_rotation(
    tiny: Make, architecture: str, tokenizer: str, key: str | None, activation: str, rope: str
) -> None:
    model = tiny(architecture)
    model.metadata["tokenizer.ggml.model"] = tokenizer
    if key is not None:
        model.metadata[f"{architecture}.hidden_activation"] = key
    config = model.open().config
    assert (config.activation, config.rope_style) == (activation, rope)


def test_defaults(tiny: Make) -> None:
    model = tiny("llama")
    for key in ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count"):
        del model.metadata[f"llama.{key}"]
    for layer in range(2):
        for name in ("attn_k", "attn_v"):
            model.codes[f"blk.{layer}.{name}"] = model.codes[f"blk.{layer}.attn_q"]
            model.i2s(f"blk.{layer}.{name}")
        for name in ("attn_sub_norm", "ffn_sub_norm"):
            del model.tensors[f"blk.{layer}.{name}.weight"]
    model.tensors["output.weight"] = model.tensors["token_embd.weight"]
    config = model.open().config
    assert config.kv_heads == config.heads
    assert config.rope_theta == 10_000.0
    assert config.name == "tiny"
    assert not config.sub_norms
    assert not config.tied_embeddings


def test_one_value_for_each_layer(tiny: Make) -> None:
    model = tiny()
    model.metadata[model.key("attention.head_count_kv")] = [2, 2]
    assert model.open().config.kv_heads == 2
    model.metadata[model.key("attention.head_count_kv")] = [2, 4]
    with pytest.raises(ModelFileError, match="head_count_kv"):
        model.open()


def test_frequency_factors(tiny: Make) -> None:
    model = tiny("llama")
    factors = np.random.default_rng().uniform(1, 8, 16).astype(np.float32)
    model.tensors["rope_freqs.weight"] = factors
    np.testing.assert_array_equal(model.open().config.rope_freq_factors, factors)
    model.metadata["llama.rope.scaling.type"] = "linear"
    model.metadata["llama.rope.scaling.factor"] = 2.0
    np.testing.assert_array_equal(model.open().config.rope_freq_factors, factors * 2)
    model.metadata["llama.rope.scaling.factor"] = 1.0  # what llama.cpp writes for 1bitLLM's models
    del model.tensors["rope_freqs.weight"]
    assert model.open().config.rope_freq_factors is None


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4),
        ({"rope.scale_linear": 4.0}, 4),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, 4),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1),
        ({"rope.scaling.type": "none", "rope.scale_linear": 4.0}, 1),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 1),
    ],
)
def test_linear_scaling(tiny: Make, keys: dict[str, Any], factor: float) -> None:
    """The rule of llama.cpp's loader (``llama-model.cpp``, ``llama-context.cpp``): linear is the default type."""
    model = tiny()
    model.metadata |= {model.key(key): value for key, value in keys.items()}
    found = model.open().config.rope_freq_factors
    np.testing.assert_array_equal(np.ones(16) if found is None else found, np.full(16, factor))


@pytest.mark.parametrize("factors", [np.ones(4), np.zeros(16), np.full(16, np.nan), np.full(16, -1)])
def test_impossible_frequency_factors(tiny: Make, factors: np.ndarray) -> None:
    model = tiny()
    model.tensors["rope_freqs.weight"] = factors.astype(np.float32)
    with pytest.raises(ModelFileError, match="rope_freqs"):
        model.open()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", None, "is missing"),
        ("block_count", 0, "not a positive integer"),
        ("block_count", "2", "not a positive integer"),
        ("block_count", 2**31, "not a positive integer"),
        ("block_count", True, "not a positive integer"),
        ("context_length", -1, "not a positive integer"),
        ("embedding_length", 126, "not a multiple of the 4 heads"),
        ("feed_forward_length", 2.5, "not a positive integer"),
        ("attention.head_count", 0, "not a positive integer"),
        ("attention.head_count_kv", 3, "does not divide the 4 heads"),
        ("attention.key_length", 31, "cannot be rotated in pairs"),
        ("attention.value_length", 16, "are supported"),
        ("rope.dimension_count", 16, "are supported"),
        ("attention.layer_norm_rms_epsilon", None, "is missing"),
        ("attention.layer_norm_rms_epsilon", 0.0, "not a positive number"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "not a positive number"),
        ("rope.freq_base", float("inf"), "not a positive number"),
        ("rope.freq_base", "x", "not a positive number"),
        ("rope.scaling.type", "ntk", "'ntk' is not supported"),
        ("rope.scaling.factor", np.float64(1e300), "float32 does not hold"),
        ("rope.scaling.factor", np.float64(1e-300), "float32 does not hold"),
        ("hidden_activation", "gelu", "'gelu' is not supported"),
        ("hidden_activation", [1, 2], "not supported"),
    ],
)
def test_values_that_cannot_be(tiny: Make, key: str, value: object, message: str) -> None:
    model = tiny()
    if key in ("attention.key_length",):
        del model.metadata[model.key("rope.dimension_count")]
    if value is None:
        del model.metadata[model.key(key)]
    else:
        model.metadata[model.key(key)] = value
    with pytest.raises(ModelFileError) as caught:
        model.open()
    error = caught.value
    assert message in str(error)
    assert error.field == f"metadata {model.key(key)!r}"
    assert (error.offset is None) == (value is None)
    if error.offset is not None and isinstance(value, int) and 0 <= value < 2**31:
        content = model.path.read_bytes()
        assert int.from_bytes(content[error.offset :][: 1 if value is True else 4], "little") == value


@pytest.mark.parametrize("value", ["gemma", 5, None])
def test_other_architectures(tiny: Make, value: object) -> None:
    model = tiny()
    if value is None:
        del model.metadata["general.architecture"]
    else:
        model.metadata["general.architecture"] = value
    with pytest.raises(ModelFileError, match="not supported; supported are bitnet-b1"):
        model.open()
