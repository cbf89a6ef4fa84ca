"""Hugging Face model folders of random weights, made by numpy alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from bitnet.core.text.words import LLAMA3_WORDS

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HEAD_DIM * KV_HEADS, HIDDEN),
    "self_attn.v_proj": (HEAD_DIM * KV_HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
NORMS = {
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
    "self_attn.attn_sub_norm": HIDDEN,
    "mlp.ffn_sub_norm": FFN,
}


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as its two bytes."""
    rounded = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.BF16)
    return rounded.view(np.uint16).reshape(values.shape)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """The format as its description has it; two-byte integers stand for bfloat16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8", "uint32": "U32"}
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def train_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the rat ate the cat"] * 9, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|eot_id|>"])
    return tokenizer


class Folder:
    """A model folder; change ``config`` and ``tensors``, then ``write``."""

    def __init__(self, path: Path, architecture: str = "BitNetForCausalLM") -> None:
        rng = np.random.default_rng()
        self.path = path
        self.tokenizer = train_tokenizer()
        self.size = self.tokenizer.get_vocab_size() + 5  # padded, as some are
        self.codes: dict[str, np.ndarray] = {}
        llama = architecture == "LlamaForCausalLM"
        self.config: dict[str, Any] = {
            "architectures": [architecture],
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 128,
            "vocab_size": self.size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu" if llama else "relu2",
            "tie_word_embeddings": True,
            "bos_token_id": self.size - 8,
            "eos_token_id": [self.size - 7, self.size - 6],
        }
        self.settings: dict[str, Any] = {
            "bos_token": "<|begin|>",
            "eos_token": {"content": "<|end|>"},
            "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
        }
        self.tensors: dict[str, np.ndarray] = {
            "model.embed_tokens.weight": bf16(rng.normal(size=(self.size, HIDDEN))),
            "model.norm.weight": bf16(rng.normal(size=HIDDEN)),
        }
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            for name, size in NORMS.items():
                if not (llama and "sub_norm" in name):
                    self.tensors[f"{prefix}{name}.weight"] = bf16(rng.normal(size=size))
            for name, shape in PROJECTIONS.items():
                self.codes[prefix + name] = rng.integers(-1, 2, shape, dtype=np.int8)

    def pack(self, linear_class: str, scale: float = 1.5) -> None:
        """Store every projection as packed codes with a scale."""
        for name, codes in self.codes.items():
            quarters = (codes + 1).astype(np.uint8).reshape(4, -1, codes.shape[1])
            self.tensors[f"{name}.weight"] = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
            self.tensors[f"{name}.weight_scale"] = bf16(np.array([scale]))
        self.config["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": linear_class,
            "quantization_mode": "offline",
        }

    def write(self, shards: int = 1) -> Path:
        self.path.mkdir(exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config))
        (self.path / "tokenizer_config.json").write_text(json.dumps(self.settings))
        self.tokenizer.save(str(self.path / "tokenizer.json"))
        names = list(self.tensors)
        if shards == 1:
            write_safetensors(self.path / "model.safetensors", self.tensors)
            return self.path
        places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(places.values()):
            write_safetensors(self.path / file, {name: self.tensors[name] for name in names if places[name] == file})
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return self.path


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Folder]:
    return lambda architecture="BitNetForCausalLM": Folder(tmp_path / "model", architecture)
