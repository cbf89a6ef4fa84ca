"""``langchain-openai``, over the demo model and over scripted answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from bitnet.core import Model


class Person(BaseModel):
    """Somebody in the text."""

    name: str
    age: int = Field(ge=0, le=130, description="in years")
    tags: list[str] = []


ADA = Person(name="Ada", age=36, tags=["x", "y"])
WITHOUT_END = ADA.model_dump_json()[:-1] + "".join(f',"key{i}":{i}' for i in range(1000))


def weather(city: str) -> str:
    """The weather of a city."""
    return f"27 degrees in {city}"


def chat(server: Any, model: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model, base_url=f"{server.url}/v1", api_key=SecretStr("none"), temperature=0, max_retries=0, **more
    )


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


def test_the_page(script_model: Model, running: Any, scripted: Any, shown: Callable[[str, str], str]) -> None:
    scripted(script_model, lambda prompt: "42" if "17 + 25" in prompt else "8" if "20 - 8" in prompt else "")
    with running(script_model, api_keys=("KEY",), names=("model",)) as server:
        code = shown("langchain", server.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "42\n8"), done.stderr


def test_batch_of_scripted_answers(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, lambda prompt: "saw " + "".join(c for c in prompt if c.isdigit()))
    with running(script_model) as server:
        answers = chat(server, "bitnet-demo").batch([f"number {i}" for i in range(10, 18)])
    assert [answer.content for answer in answers] == [f"saw {i}" for i in range(10, 18)]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_tools_and_objects(script_model: Model, running: Any, scripted: Any, responses: bool) -> None:
    def said(prompt: str) -> str:
        if "27 degrees" in prompt:
            return "It is warm."
        for name, arguments in (("weather", '{"city":"Zürich"}'), ("Person", WITHOUT_END)):
            if f'"name": "{name}"' in prompt:
                return f'{{"name": "{name}", "arguments": {arguments}}}'
        return ADA.model_dump_json()

    scripted(script_model, said)
    with running(script_model) as server:
        llm = chat(server, "bitnet-demo", use_responses_api=responses)
        for method in ("json_schema", "function_calling"):
            reads = llm.with_structured_output(Person, method=method)
            assert reads.invoke("Who?") == ADA, method
            *_, last = reads.stream("Who?")
            assert last == ADA, method
        tooled = llm.bind_tools([weather])
        asked = HumanMessage("How is it in Zürich?")
        streamed: Any = AIMessageChunk(content="")
        for chunk in tooled.stream([asked]):
            streamed += chunk
        for answer in (tooled.invoke([asked]), streamed):
            assert isinstance(answer, (AIMessage, AIMessageChunk))
            (call,) = answer.tool_calls
            assert (call["name"], call["args"]) == ("weather", {"city": "Zürich"})
            result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
            assert tooled.invoke([asked, answer, result]).text == "It is warm."
        forced = llm.bind_tools([weather], tool_choice="any").invoke("Do it.")
        assert [call["name"] for call in forced.tool_calls] == ["weather"]
