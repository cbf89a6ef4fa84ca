"""Llama's graph: Falcon3, Falcon-E, TriLM and Llama 3 at 1.58 bits."""

from __future__ import annotations

from bitnet.core.model.architectures.base import LLAMA_DEFAULTS, Architecture, HFClass

_TITLES = {"falcon3": "Falcon3 at 1.58 bits", "falcon_e": "Falcon-E", "olmo": "TriLM"}
"""Published models by ``tokenizer.ggml.pre``."""

FAMILY = Architecture(
    gguf_names=("llama",),
    hf_classes=(HFClass("LlamaForCausalLM", "llama", LLAMA_DEFAULTS),),
    title=lambda activation, pre: _TITLES.get(pre, "Llama at 1.58 bits"),
    rope_style="interleaved",  # converters reorder the rows of q and k
)
