"""Maple's graph: a mixture of ternary experts in each layer; three of four layers attend to a window and rotate a part
of each head, the others attend to everything and have no positions."""

from __future__ import annotations

from typing import Any

from bitnet.core.model.architectures.base import Architecture, HFClass

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Sizes have none: no public class says them, so folders must."""

FAMILY = Architecture(
    gguf_names=("maple",),
    hf_classes=(HFClass("MapleForCausalLM", "maple", _DEFAULTS, "maple"),),
    title=lambda activation, pre: "Maple",
    rope_style="neox",
    floats="rows",
    head_norms=True,
    experts=True,
)
