"""The first prompts of a server take as long as later ones."""

from __future__ import annotations

from typing import Any

import pytest

from bitnet.core import Model
from bitnet.core.text import bpe_rust


def test_the_first_prompt_is_encoded_with_the_whole_vocabulary(
    script_model: Model, running: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the vocabulary is built anew for each text: 20 ms for one of 128,000 tokens, in which no other thread
    runs."""
    encoder = script_model.tokenizer._backend
    assert isinstance(encoder, bpe_rust.BytePairs)
    monkeypatch.setattr(encoder, "_whole", None)
    monkeypatch.setattr(encoder, "_encoded", 0)
    parts = list[Any]()
    part = encoder._part

    def noted(texts: Any) -> Any:
        parts.append(texts)
        return part(texts)

    monkeypatch.setattr(encoder, "_part", noted)
    scripted(script_model, "Yes.")
    with running(script_model, names=("m",)) as server:
        parts.clear()
        assert server.chat("Well?").json()["choices"][0]["message"]["content"] == "Yes."
    assert parts == []
