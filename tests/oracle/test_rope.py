"""Rotary frequencies and their attention factor against transformers' ``ROPE_INIT_FUNCTIONS``, to f32's accuracy.

Any configuration that transformers takes goes through ``config.json`` and a GGUF file, as ``bitnet convert`` does it.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.gguf import GGUFFile, write_gguf
from bitnet.core.model.config import ModelConfig, read_config
from bitnet.core.model.hf_config import HFConfig
from bitnet.core.model.rope import rope_frequencies, rope_tables

torch = pytest.importorskip("torch", reason="torch is not installed; tox -e oracle has it")
transformers = pytest.importorskip("transformers", reason="transformers is not installed; tox -e oracle has it")

ULP = 2.0**-23
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def parameters(kind: str, pairs: int, rng: np.random.Generator) -> dict[str, Any]:
    """Rotary parameters of some kind, with or without the optional ones."""

    def some(**optional: float) -> dict[str, float]:
        return {key: value for key, value in optional.items() if rng.random() < 0.5}

    found: dict[str, Any] = {"rope_type": kind, "rope_theta": float(np.float32(10 ** rng.uniform(3.5, 7)))}
    factor, original = float(rng.uniform(1, 40)), int(rng.integers(64, 20_000))
    if kind != "default":
        found["factor"] = factor
    if kind == "llama3":
        low = float(rng.uniform(0.5, 2))
        found |= {"low_freq_factor": low, "high_freq_factor": low + float(rng.uniform(1, 4))}
    if kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = original
    if kind == "yarn":
        found |= some(attention_factor=float(rng.uniform(0.5, 2)))
        found |= some(beta_fast=float(rng.uniform(16, 64)), beta_slow=float(rng.uniform(0.5, 4)))
        found |= {"mscale": 0.707, "mscale_all_dim": float(rng.uniform(0.5, 2))} if rng.random() < 0.5 else {}
    if kind == "longrope":
        found["short_factor"], found["long_factor"] = rng.uniform(1, 60, (2, pairs)).tolist()
        found |= some(attention_factor=float(rng.uniform(0.5, 2)))
        if rng.random() < 0.5:
            del found["factor"]
    return found


def through_files(values: dict[str, Any], folder: Path) -> ModelConfig:
    """The configuration of a file made of a ``config.json``."""
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    text = json.dumps({"architectures": ["Qwen3ForCausalLM"], "quantization_config": quantization, **values})
    (folder / "config.json").write_text(text)
    ours = HFConfig(folder)
    keys, tensors = ours.rope()
    table = np.zeros((values["vocab_size"], values["hidden_size"]), np.float32)
    metadata = ours.metadata() | {f"qwen3.{key}": value for key, value in keys.items()}
    write_gguf(folder / "model.gguf", metadata, {"token_embd.weight": table, **tensors})
    return read_config(GGUFFile(folder / "model.gguf"))


def bound(rope: dict[str, Any], config: ModelConfig) -> Any:
    """How far the frequencies of each pair may differ: PyTorch rounds a power to either neighbouring number.

    Llama 3's rule is computed in f32 there, in f64 here: it divides a difference of numbers up to ``high`` by another.
    """
    if rope["rope_type"] != "llama3":
        return 3 * ULP
    high, low = rope["high_freq_factor"], rope["low_freq_factor"]
    return ULP * (4 + 4 * high / (high - low) * config.rope_freq_factors)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies(kind: str, tmp_path: Path) -> None:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in range(40):
        head_dim = 2 * int(rng.integers(8, 65))
        rope, context = parameters(kind, head_dim // 2, rng), int(rng.integers(2048, 131_073))
        values = {
            "vocab_size": 8,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rope_parameters": rope,
        }
        config = through_files(values, tmp_path)
        theirs = transformers.Qwen3Config(**json.loads(json.dumps(values)))
        for positions in {min(context, 2048), context}:
            if kind == "default":
                rotary = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(theirs)
                expected, attention = rotary.inv_freq, rotary.attention_scaling
            else:
                init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
                expected, attention = init(theirs, "cpu", seq_len=positions)
            found = rope_frequencies(config, positions)
            error = abs(found / expected.numpy() - 1) / bound(rope, config)
            worst = max(worst, error.max())
            assert (error <= 1).all(), (rope, positions)
            assert config.rope_attention_factor == pytest.approx(attention, rel=2e-7), rope
        cos, sin = rope_tables(config, 300)
        angles = np.outer(np.arange(300, dtype=np.float32), rope_frequencies(config, 300)).astype(np.float64)
        np.testing.assert_allclose(cos, np.cos(angles) * config.rope_attention_factor, atol=3e-7)
        np.testing.assert_allclose(sin, np.sin(angles) * config.rope_attention_factor, atol=3e-7)
    print(f"{kind}: {worst:.2f} of the bound at most")
