"""The families of models that bitnet runs, one file each. A new family is one more file, named in ``FAMILIES``."""

from __future__ import annotations

from bitnet.core.hal import Activation
from bitnet.core.model.architectures import bitnet, gemma3, hunyuan, llama, maple, minicpm, olmo, qwen2, qwen3, qwen35
from bitnet.core.model.architectures.base import ACTIVATIONS, Architecture, HFClass, RopeStyle
from bitnet.core.model.architectures.refused import why_refused

FAMILIES = (
    bitnet.FAMILY,
    gemma3.FAMILY,
    hunyuan.FAMILY,
    llama.FAMILY,
    maple.FAMILY,
    minicpm.FAMILY,
    olmo.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen35.FAMILY,
)
BY_GGUF_NAME = {name: family for family in FAMILIES for name in family.gguf_names}
"""Families by ``general.architecture``."""
HF_CLASSES = {hf.name: hf for family in FAMILIES for hf in family.hf_classes}
"""Classes of Hugging Face folders by the name in ``architectures``."""
CLASSES_BY_TYPE = {hf.model_type: name for name, hf in HF_CLASSES.items() if hf.model_type is not None}
"""Names of classes by ``model_type``, for folders without ``architectures``."""

__all__ = [
    "ACTIVATIONS",
    "BY_GGUF_NAME",
    "CLASSES_BY_TYPE",
    "FAMILIES",
    "HF_CLASSES",
    "Activation",
    "Architecture",
    "HFClass",
    "RopeStyle",
    "why_refused",
]
