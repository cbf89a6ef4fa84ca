"""Minimal valid models of any shape, from which bombs are made."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitnet.core.gguf import GGMLType, TensorSource, i2s_bytes, write_gguf
from bitnet.core.text.words import byte_characters

BYTE_TOKENS = list(byte_characters().values())
SPECIAL = ["<|bos|>", "<|eos|>"]
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1187801280\n"
"""What a clone without Git LFS holds in place of a large file."""


@dataclass
class Shape:
    """Sizes of a model; ``head_dim`` is a key of its own, so that heads need not fill the width."""

    hidden: int = 64
    ffn: int = 128
    layers: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    context: int = 64
    vocab: int = 300

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Ternary matrices of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }

    def norms(self) -> dict[str, int]:
        """Norms of a layer."""
        q = self.heads * self.head_dim
        return {"attn_norm": self.hidden, "attn_sub_norm": q, "ffn_norm": self.hidden, "ffn_sub_norm": self.ffn}


@dataclass
class GGUF:
    """Metadata and tensors of a model of zeros and ones, to be changed and written."""

    shape: Shape = field(default_factory=Shape)
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        tokens = [*BYTE_TOKENS, *SPECIAL]
        self.metadata = {
            "general.architecture": "bitnet-b1.58",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([1] * 256 + [3, 3], np.int32),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": 257,
        }
        for key, value in (
            ("block_count", shape.layers),
            ("context_length", shape.context),
            ("embedding_length", shape.hidden),
            ("feed_forward_length", shape.ffn),
            ("attention.head_count", shape.heads),
            ("attention.head_count_kv", shape.kv_heads),
            ("attention.key_length", shape.head_dim),
            ("attention.value_length", shape.head_dim),
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("rope.freq_base", 500_000.0),
        ):
            self.set(key, value)
        self.tensors = {
            "token_embd.weight": np.ones((shape.vocab, shape.hidden), np.float16),
            "output_norm.weight": np.ones(shape.hidden, np.float32),
        }
        matrices = {
            name: TensorSource(size, GGMLType.I2_S, i2s_bytes(np.zeros(size, np.int8), 1.0))
            for name, size in shape.matrices().items()
        }
        norms = {name: np.ones(size, np.float32) for name, size in shape.norms().items()}
        for layer in range(shape.layers):
            self.tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in (matrices | norms).items()}

    def set(self, key: str, value: Any) -> None:
        """Set a key of the architecture."""
        self.metadata[f"bitnet-b1.58.{key}"] = value

    def vocabulary(self, tokens: list[str], *, kind: int | list[int] = 1, model: str = "gpt2", **more: Any) -> None:
        """Append tokens of a type, and embed them."""
        all_tokens = [*BYTE_TOKENS, *SPECIAL, *tokens]
        types = [1] * 256 + [3, 3] + (kind if isinstance(kind, list) else [kind] * len(tokens))
        self.metadata |= {
            "tokenizer.ggml.model": model,
            "tokenizer.ggml.tokens": all_tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
        }
        if model == "llama":
            del self.metadata["tokenizer.ggml.merges"]
            self.metadata["tokenizer.ggml.scores"] = np.zeros(len(all_tokens), np.float32)
        self.metadata |= {f"tokenizer.ggml.{key}": value for key, value in more.items()}
        self.tensors["token_embd.weight"] = np.ones((len(all_tokens), self.shape.hidden), np.float16)

    def write(self, folder: Path) -> Path:
        """The model file."""
        write_gguf(folder / "bomb.gguf", self.metadata, self.tensors)
        return folder / "bomb.gguf"


HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
}


@dataclass
class Folder:
    """A Hugging Face folder: ``config.json``, a tokenizer and a checkpoint, to be changed and written."""

    shape: Shape = field(default_factory=Shape)
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        self.config = {
            "architectures": ["BitNetForCausalLM"],
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": shape.context,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": True,
            "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
        }
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        self.tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(BYTE_TOKENS)}, "merges": []},
        }
        self.tensors = {
            "model.embed_tokens.weight": np.ones((shape.vocab, shape.hidden), np.float16),
            "model.norm.weight": np.ones(shape.hidden, np.float16),
        }
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            for name, (n, k) in shape.matrices().items():
                self.tensors[f"{prefix}{HF_NAMES[name]}.weight"] = np.full((n // 4, k), 0x55, np.uint8)
                self.tensors[f"{prefix}{HF_NAMES[name]}.weight_scale"] = np.ones(1, np.float16)
            for name, size in shape.norms().items():
                self.tensors[f"{prefix}{HF_NAMES[name]}.weight"] = np.ones(size, np.float16)

    def mlx(self, group: int = 32) -> None:
        """Make it a Llama-shaped folder that MLX has quantised to 2 bits, the embedding too."""
        self.config["architectures"] = ["LlamaForCausalLM"]
        del self.config["quantization_config"]
        self.config["quantization"] = {"group_size": group, "bits": 2}
        for name in [name for name in self.tensors if "sub_norm" in name or name.endswith("weight_scale")]:
            del self.tensors[name]
        for name, tensor in list(self.tensors.items()):
            if tensor.ndim == 2:
                n, k = tensor.shape[0] * (4 if tensor.dtype == np.uint8 else 1), tensor.shape[1]
                self.tensors[name] = np.full((n, k // 16), 0x55555555, np.uint32)
                base = name.removesuffix(".weight")
                self.tensors[f"{base}.scales"] = np.ones((n, k // group), np.float16)
                self.tensors[f"{base}.biases"] = -np.ones((n, k // group), np.float16)

    def added(self, content: str, id: int, *, special: bool = False) -> dict[str, Any]:
        """An entry of ``added_tokens``."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        return {"id": id, "content": content, **flags}

    def write(self, folder: Path) -> Path:
        """The folder; what ``files`` names is written as it is there."""
        target = folder / "bomb"
        target.mkdir()
        contents = {
            "config.json": json.dumps(self.config).encode(),
            "tokenizer.json": json.dumps(self.tokenizer).encode(),
            "model.safetensors": safetensors(self.tensors),
        }
        for name, content in (contents | self.files).items():
            if content:
                (target / name).write_bytes(content)
        return target


def safetensors(tensors: Mapping[str, Any], header: Mapping[str, Any] | None = None) -> bytes:
    """A checkpoint; ``header`` replaces entries of the one that fits."""
    names = {"float16": "F16", "uint8": "U8", "uint32": "U32", "float32": "F32"}
    entries, parts, at = {}, [], 0
    for name, array in tensors.items():
        end = at + array.nbytes
        entries[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": [at, end]}
        parts.append(array.tobytes())
        at = end
    text = json.dumps(entries | dict(header or {})).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(parts)
