"""Families that ternary models may have and that are not supported."""

from __future__ import annotations

_REASONS = {
    "Gemma3": "folders of this family are not read; GGUF files are",
    "clip": "it is a vision encoder (mmproj), and bitnet reads no images: open the language model's own file",
    "OLMo": "folders for OLMo's own code are not read, and OLMo-BitNet's linear layers normalise their own inputs",
}
"""Why, by the beginning of a GGUF architecture's or a Hugging Face class's name."""


def why_refused(name: str) -> str:
    """How the error about an unsupported name goes on: ``: `` and the reason, or nothing."""
    return next((f": {why}" for begin, why in _REASONS.items() if name.startswith(begin)), "")
