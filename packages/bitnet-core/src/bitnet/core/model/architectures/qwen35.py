"""Qwen3.5's graph: three of four layers are recurrent (Gated DeltaNet), the others attend with an output gate (Bonsai
27B)."""

from __future__ import annotations

from typing import Any

from bitnet.core.model.architectures.base import QWEN2_DEFAULTS, Architecture, HFClass

_DEFAULTS: dict[str, Any] = {
    **QWEN2_DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
"""The defaults of transformers' ``Qwen3_5TextConfig`` (5.24)."""

FAMILY = Architecture(
    gguf_names=("qwen35",),
    hf_classes=(
        HFClass("Qwen3_5ForCausalLM", "qwen35", _DEFAULTS, "prism_hadamard_qwen35"),
        HFClass("Qwen3_5ForConditionalGeneration", "qwen35", _DEFAULTS, "qwen3_5"),  # its vision tower is not read
    ),
    title=lambda activation, pre: "Qwen3.5 (Bonsai 27B)",
    rope_style="neox",
    floats="groups",
    head_norms=True,
    ffn_norm="post_attention_norm",
    recurrent=True,
    output_gate=True,
)
