"""Qwen2's graph: Llama's with biases of q, k and v."""

from __future__ import annotations

from bitnet.core.model.architectures.base import QWEN2_DEFAULTS, Architecture, HFClass

FAMILY = Architecture(
    gguf_names=("qwen2",),
    hf_classes=(HFClass("Qwen2ForCausalLM", "qwen2", QWEN2_DEFAULTS),),
    title=lambda activation, pre: "Qwen2 at 1.58 bits",
    rope_style="neox",
    qkv_biases=True,
)
