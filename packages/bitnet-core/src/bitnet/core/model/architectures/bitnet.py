"""BitNet b1.58: Microsoft's 2B4T (squared ReLU) and 1bitLLM's models (SiLU), with RMSNorms before the output
projections."""

from __future__ import annotations

from collections.abc import Mapping

from bitnet.core.gguf import MetadataValue
from bitnet.core.hal import Activation
from bitnet.core.model.architectures.base import LLAMA_DEFAULTS, Architecture, HFClass

_DEFAULTS = {
    "vocab_size": 128_256,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "head_dim": None,
    "hidden_act": "relu2",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
"""The defaults of transformers' ``BitNetConfig`` (5.23)."""


def _activation(metadata: Mapping[str, MetadataValue]) -> Activation:
    """llama.cpp's ``bitnet`` covers both families, and its files of 2B4T lack the key or ignore it. 1bitLLM's models
    are the only ones with a SentencePiece vocabulary."""
    tokenizer = metadata.get("tokenizer.ggml.model")
    sentencepiece = isinstance(tokenizer, str) and tokenizer == "llama"
    return "silu" if sentencepiece and metadata["general.architecture"] == "bitnet" else "relu2"


FAMILY = Architecture(
    gguf_names=("bitnet-b1.58", "bitnet-25", "bitnet"),  # the official file's, an early converter's, llama.cpp's
    hf_classes=(
        HFClass("BitNetForCausalLM", "bitnet-b1.58", _DEFAULTS),
        HFClass("BitnetForCausalLM", "bitnet", LLAMA_DEFAULTS),  # 1bitLLM's own class
    ),
    title=lambda activation, pre: "BitNet b1.58 (2B4T)" if activation == "relu2" else "bitnet_b1_58 (1bitLLM)",
    rope_style="neox",
    activation=_activation,
    floats="master",
    master_weights=True,
    sub_norms=True,
)
