"""The family of published models that a file belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from bitnet.core.gguf import MetadataValue
from bitnet.core.model.config import ModelConfig

LLAMA = {"falcon3": "Falcon3 at 1.58 bits", "falcon_e": "Falcon-E", "olmo": "TriLM"}
"""Families with the Llama architecture, told apart by ``tokenizer.ggml.pre``."""


def family(config: ModelConfig, metadata: Mapping[str, MetadataValue]) -> str:
    """The family of a model, derived from its architecture, activation and tokenizer."""
    match config.architecture:
        case "llama":
            pre = metadata.get("tokenizer.ggml.pre")
            return LLAMA.get(pre, "Llama at 1.58 bits") if isinstance(pre, str) else "Llama at 1.58 bits"
        case "minicpm":
            return "MiniCPM (BitCPM4)"
        case "olmo":
            return "OLMo at 1.58 bits"
        case "qwen2":
            return "Qwen2 at 1.58 bits"
        case "qwen3":
            return "Qwen3 (Ternary-Bonsai)"
        case _:
            return "BitNet b1.58 (2B4T)" if config.activation == "relu2" else "bitnet_b1_58 (1bitLLM)"
