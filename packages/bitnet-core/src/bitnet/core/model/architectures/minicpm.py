"""MiniCPM's graph: Llama's with scales of embeddings, residuals and logits (BitCPM4)."""

from __future__ import annotations

from bitnet.core.model.architectures.base import LLAMA_DEFAULTS, Architecture, HFClass

_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "tie_word_embeddings": True,
    "scale_emb": 1.0,
    "scale_depth": 1.0,
    "dim_model_base": 1.0,
}
"""The defaults of OpenBMB's class."""

FAMILY = Architecture(
    gguf_names=("minicpm",),
    hf_classes=(HFClass("MiniCPMForCausalLM", "minicpm", _DEFAULTS),),
    title=lambda activation, pre: "MiniCPM (BitCPM4)",
    rope_style="interleaved",  # converters reorder the rows of q and k
    floats="ternary",  # BitCPM4's
    stream_scales=True,
)
