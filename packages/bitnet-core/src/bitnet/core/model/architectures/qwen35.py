"""Qwen3.5's graph: three of four layers are recurrent (Gated DeltaNet), the others attend with an output gate (Bonsai
27B)."""

from __future__ import annotations

from bitnet.core.model.architectures.base import Architecture

FAMILY = Architecture(
    gguf_names=("qwen35",),
    hf_classes=(),
    title=lambda activation, pre: "Qwen3.5 (Bonsai 27B)",
    rope_style="neox",
    head_norms=True,
    ffn_norm="post_attention_norm",
    recurrent=True,
    output_gate=True,
)
