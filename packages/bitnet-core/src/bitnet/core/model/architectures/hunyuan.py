"""HunYuan's dense graph: Llama's with RMSNorms of q's and k's heads after the rotary embedding (Hy-MT 1.8B)."""

from __future__ import annotations

from bitnet.core.model.architectures.base import LLAMA_DEFAULTS, Architecture, HFClass

_DEFAULTS = {**LLAMA_DEFAULTS, "vocab_size": 290_943, "rms_norm_eps": 1e-5}
"""The defaults of transformers' ``HunYuanDenseV1Config`` (5.24)."""

FAMILY = Architecture(
    gguf_names=("hunyuan-dense",),
    hf_classes=(HFClass("HunYuanDenseV1ForCausalLM", "hunyuan-dense", _DEFAULTS),),
    title=lambda activation, pre: "HunYuan (Hy-MT)",
    rope_style="neox",
    head_norms=True,
    norms_last=True,
    ntk_alpha=True,
)
