"""Maple's graph: a mixture of ternary experts in each layer; three of four layers attend to a window and rotate a part
of each head, the others attend to everything and have no positions."""

from __future__ import annotations

from bitnet.core.model.architectures.base import Architecture

FAMILY = Architecture(
    gguf_names=("maple",),
    hf_classes=(),
    title=lambda activation, pre: "Maple",
    rope_style="neox",
    head_norms=True,
    experts=True,
)
