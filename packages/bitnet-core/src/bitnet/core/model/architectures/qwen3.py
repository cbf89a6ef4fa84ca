"""Qwen3's graph: Llama's with RMSNorms of q's and k's heads (Ternary-Bonsai), and perhaps of each product's input
(BitNet-embedding 0.6B)."""

from __future__ import annotations

from bitnet.core.model.architectures.base import QWEN2_DEFAULTS, Architecture, HFClass

FAMILY = Architecture(
    gguf_names=("qwen3",),
    hf_classes=(HFClass("Qwen3ForCausalLM", "qwen3", {**QWEN2_DEFAULTS, "head_dim": 128}),),
    title=lambda activation, pre: "Qwen3 (Ternary-Bonsai)",
    rope_style="neox",
    head_norms=True,
    input_norms=True,
)
