"""A small model as metadata and tensors, which a test changes and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.devices import registry
from bitnet.core.gguf import GGMLType, TensorSource, i2s_bytes, write_gguf
from bitnet.core.hal import DeviceInfo
from bitnet.core.model import ModelFile, open_model
from bitnet.core.text.words import byte_characters

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 128, 256, 2, 4, 2, 300


class Tiny:
    """Metadata and tensors of a model, and the ternary weights in them."""

    def __init__(self, path: Path, architecture: str = "bitnet-b1.58") -> None:
        rng = np.random.default_rng()
        self.path = path
        self.architecture = architecture
        self.codes: dict[str, np.ndarray] = {}
        self.scales: dict[str, float] = {}
        self.metadata: dict[str, Any] = {
            "general.architecture": architecture,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": [*byte_characters().values(), "<|bos|>", "<|eos|>", "<|eot_id|>", "ab"],
            "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * 3 + [1], np.int32),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": 257,
        }
        for key, value in (
            ("block_count", LAYERS),
            ("context_length", 64),
            ("embedding_length", HIDDEN),
            ("feed_forward_length", FFN),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("rope.freq_base", 500_000.0),
            ("rope.dimension_count", HIDDEN // HEADS),
        ):
            self.metadata[f"{architecture}.{key}"] = value
        keys = HIDDEN // HEADS * KV_HEADS
        self.tensors: dict[str, Any] = {
            "token_embd.weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float16),
            "output_norm.weight": rng.normal(size=HIDDEN).astype(np.float32),
        }
        for layer in range(LAYERS):
            block = f"blk.{layer}."
            norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_sub_norm": HIDDEN, "ffn_sub_norm": FFN}
            for name, size in norms.items():
                self.tensors[f"{block}{name}.weight"] = rng.normal(size=size).astype(np.float32)
            for name, shape in {
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (keys, HIDDEN),
                "attn_v": (keys, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_gate": (FFN, HIDDEN),
                "ffn_up": (FFN, HIDDEN),
                "ffn_down": (HIDDEN, FFN),
            }.items():
                self.codes[block + name] = rng.integers(-1, 2, shape, dtype=np.int8)
                self.scales[block + name] = float(np.float16(rng.uniform(0.5, 2)))
        for name in self.codes:
            self.i2s(name)

    def i2s(self, name: str) -> None:
        """Store a ternary matrix as I2_S."""
        codes = self.codes[name]
        self.tensors[f"{name}.weight"] = TensorSource(codes.shape, GGMLType.I2_S, i2s_bytes(codes, self.scales[name]))

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def write(self) -> Path:
        write_gguf(self.path, self.metadata, self.tensors)
        return self.path

    def open(self, **options: Any) -> ModelFile:
        return open_model(self.write(), **options)


@pytest.fixture(scope="session")
def gpus() -> Sequence[DeviceInfo]:
    """Devices of the other backends; none: the test is skipped."""
    found = [info for report in registry.list_devices() if report.name != "cpu" for info in report.probe.devices]
    if not found:
        pytest.skip("no other backend has a device")
    return found


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Tiny]:
    return lambda architecture="bitnet-b1.58": Tiny(tmp_path / "tiny.gguf", architecture)
