"""The first OLMo's graph: Llama's with LayerNorms that have no weights."""

from __future__ import annotations

from bitnet.core.model.architectures.base import LLAMA_DEFAULTS, Architecture, HFClass

FAMILY = Architecture(
    gguf_names=("olmo",),
    hf_classes=(
        HFClass(
            "OlmoForCausalLM",
            "olmo",
            {**LLAMA_DEFAULTS, "vocab_size": 50_304, "bos_token_id": None, "eos_token_id": 50_279},
        ),
    ),
    title=lambda activation, pre: "OLMo at 1.58 bits",
    rope_style="interleaved",  # converters reorder the rows of q and k
    layer_norms=True,
    eps=1e-5,
)
