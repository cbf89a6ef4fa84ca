"""``litellm``, which speaks three of the APIs, over the demo model and over scripted answers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bitnet.core import Model

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # its import takes seconds

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices from the net
QUESTION: Any = [{"role": "user", "content": "What is 17 + 25?"}]
PROVIDERS = {"openai": "/v1", "anthropic": "", "ollama_chat": ""}


def completion(server: Any, provider: str, model: str, **more: Any) -> Any:
    import litellm

    base = server.url + PROVIDERS[provider]
    return litellm.completion(f"{provider}/{model}", QUESTION, api_base=base, api_key="none", temperature=0, **more)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_answer_and_stream(demo: Any, provider: str) -> None:
    answer = completion(demo, provider, "demo", max_tokens=40)
    assert answer.choices[0].message.content == "17 + 25 = 42."
    assert answer.usage.completion_tokens == 11
    chunks = completion(demo, provider, "demo", max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "17 + 25 = 42."


def test_scripted_answer(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, "as the script has it")
    with running(script_model) as server:
        assert completion(server, "openai", "bitnet-demo").choices[0].message.content == "as the script has it"
