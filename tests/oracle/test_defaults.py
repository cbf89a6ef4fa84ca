"""What ``bitnet convert`` reads of a ``config.json``, against transformers' own configuration classes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.model.architectures import HF_CLASSES, olmo
from bitnet.core.model.hf_config import HFConfig

transformers = pytest.importorskip("transformers", reason="transformers is not installed; tox -e oracle has it")

CLASSES = {
    "BitNetForCausalLM": "BitNetConfig",
    "LlamaForCausalLM": "LlamaConfig",
    "OlmoForCausalLM": "OlmoConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "HunYuanDenseV1ForCausalLM": "HunYuanDenseV1Config",
}
VALUES: dict[str, list[Any]] = {
    "vocab_size": [64, 1000],
    "hidden_size": [640, 1280],
    "intermediate_size": [512, 768],
    "num_hidden_layers": [1, 3, 4, 8],
    "num_attention_heads": [16, 8],
    "num_key_value_heads": [None, 4, 8],
    "max_position_embeddings": [128, 4096],
    "rms_norm_eps": [1e-6, 1e-5, 3e-4],
    "rope_theta": [5000.0, 1e6],
    "hidden_act": ["silu", "relu2"],
    "linear_num_value_heads": [16, 48],
    "linear_key_head_dim": [64, 128],
    "linear_conv_kernel_dim": [2, 4],
    "tie_word_embeddings": [True, False],
    "rope_scaling": [None, {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 3.0}],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 77.0}, {"rope_type": "linear", "factor": 4.0}],
}


def theirs(architecture: str, values: dict[str, Any]) -> Any:
    return getattr(transformers, CLASSES[architecture])(**json.loads(json.dumps(values)))


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_table(architecture: str) -> None:
    config = theirs(architecture, {}).to_dict()
    config |= config.pop("rope_parameters")
    config.setdefault(
        "rms_norm_eps", HF_CLASSES[architecture].defaults["rms_norm_eps"]
    )  # OLMo's has none, and none is read
    expected = HF_CLASSES[architecture].defaults
    derived = {"head_dim", "num_key_value_heads"}
    if "full_attention_interval" in expected:  # transformers turns it into a list
        config["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    assert {key: config[key] for key in expected if key not in derived} == {
        key: value for key, value in expected.items() if key not in derived
    }
    assert config["num_key_value_heads"] == (expected["num_key_value_heads"] or config["num_attention_heads"])


@pytest.mark.parametrize("architecture", CLASSES)
def test_any_keys(architecture: str, tmp_path: Path) -> None:
    """Any of the keys, each with any of some values: the same sizes and rotary parameters."""
    seen = set()
    for _ in range(300):
        keys = random.sample(list(VALUES), random.randrange(len(VALUES) + 1))
        values = {key: random.choice(VALUES[key]) for key in keys}
        quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
        text = json.dumps({"architectures": [architecture], "quantization_config": quantization, **values})
        (tmp_path / "config.json").write_text(text)
        if architecture == "Qwen3_5ForCausalLM" and values.get("num_key_value_heads", 1) is None:
            continue  # transformers refuses it
        oracle = theirs(architecture, values)
        heads = oracle.num_attention_heads
        if oracle.hidden_size % heads or heads % oracle.num_key_value_heads:
            continue  # no model
        if HF_CLASSES[architecture].architecture == "qwen35" and len(set(oracle.layer_types)) == 1:
            continue  # not one that bitnet reads
        ours = HFConfig(tmp_path)
        model, rope = ours.model, oracle.rope_parameters
        factors = ours.rope()[1].get("rope_freqs.weight")
        expected = {
            "vocab_size": oracle.vocab_size,
            "hidden_size": oracle.hidden_size,
            "layers": oracle.num_hidden_layers,
            "heads": oracle.num_attention_heads,
            "kv_heads": oracle.num_key_value_heads,
            "head_dim": getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads,
            "ffn_size": oracle.intermediate_size,
            "context_length": oracle.max_position_embeddings,
            "rms_eps": olmo.FAMILY.eps if architecture == "OlmoForCausalLM" else oracle.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
            "activation": oracle.hidden_act,
            "tied_embeddings": oracle.tie_word_embeddings,
        }
        assert {name: getattr(model, name) for name in expected} == expected, values
        if (net := model.delta_net) is not None:
            kinds = tuple(kind == "linear_attention" for kind in oracle.layer_types)
            sizes = [getattr(oracle, f"linear_{key}") for key in ("num_key_heads", "num_value_heads")]
            sizes += [getattr(oracle, f"linear_{key}") for key in ("key_head_dim", "value_head_dim", "conv_kernel_dim")]
            assert (net.recurrent, [net.k_heads, net.v_heads, net.k_dim, net.v_dim, net.taps]) == (kinds, sizes)
            assert model.rotated == int(oracle.head_dim * rope["partial_rotary_factor"])
        assert (1.0 if factors is None else factors[0]) == rope.get("factor", 1.0), values
        seen.add(rope["rope_type"])
    assert seen == {"default", "linear"}
