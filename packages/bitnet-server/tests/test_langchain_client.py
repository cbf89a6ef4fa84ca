"""``langchain-openai``, over the demo model and over scripted answers."""

from __future__ import annotations

from typing import Any

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from bitnet.core import Model


def chat(server: Any, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key=SecretStr("none"), temperature=0, max_retries=0)


def test_invoke_and_stream(demo: Any) -> None:
    llm = chat(demo, "demo")
    answer = llm.invoke([("system", "Be exact."), ("human", "What is 17 + 25?")])
    expected = demo.model.chat(
        [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "What is 17 + 25?"}]
    )
    assert answer.content == expected.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(expected.tokens)
    assert "".join(str(chunk.content) for chunk in llm.stream("What is 17 + 25?")) == "17 + 25 = 42."


def test_batch_of_scripted_answers(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, lambda prompt: "saw " + "".join(c for c in prompt if c.isdigit()))
    with running(script_model) as server:
        answers = chat(server, "bitnet-demo").batch([f"number {i}" for i in range(10, 18)])
    assert [answer.content for answer in answers] == [f"saw {i}" for i in range(10, 18)]
