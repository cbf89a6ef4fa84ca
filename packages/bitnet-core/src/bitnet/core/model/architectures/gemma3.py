"""Gemma 3's graph: Qwen3's with norms of sub-layers' results, scaled embeddings and GELU (BitNet-embedding 270M)."""

from __future__ import annotations

from bitnet.core.model.architectures.base import Architecture

FAMILY = Architecture(
    gguf_names=("gemma3",),
    hf_classes=(),
    title=lambda activation, pre: "Gemma 3 (BitNet-embedding)",
    rope_style="neox",
    activation=lambda metadata: "gelu_tanh",
    head_norms=True,
    input_norms=True,
    sandwiched=True,
)
