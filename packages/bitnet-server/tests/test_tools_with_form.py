"""Tools together with a form of the answer: the model writes either a call, or an answer of that form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import load_model
from bitnet.core.text.chat import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / "bitnet-core/tests/text/templates"
CITY = {"type": "object", "properties": {"city": {"enum": ["Zürich"]}}, "required": ["city"]}
PERSON = {"type": "object", "properties": {"name": {"const": "Ada"}}, "required": ["name"]}
CHAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
ASKED = [{"role": "user", "content": "Who is it?"}]
WEATHER: dict[str, Any] = {"name": "weather", "description": "", "parameters": CITY, "strict": True}
ARGUMENTS = {"city": "Zürich"}
SAID = '{"name":"Ada"}'
CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city":"Zürich"}}\n</tool_call>',
    "llama3": '{"name":"weather","parameters":{"city":"Zürich"}}',
    "minicpm4": '<|tool_call_start|>\n```python\nweather(city="Zürich")\n```\n<|tool_call_end|>',
    "gemma3": '{"name":"weather","arguments":{"city":"Zürich"}}',
}


@pytest.fixture(scope="module", params=CALLS)
def server(request: pytest.FixtureRequest, running: Any, scripted: Any) -> Iterator[Any]:
    name: str = request.param
    with load_model(device="cpu", max_seqs=2, threads=1) as model:
        source = (TEMPLATES / f"{name}.jinja").read_text("utf-8").replace("(indent=4)", "")
        model._file.__dict__["chat_template"] = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        engine = scripted(model, "")
        with running(model, names=("m",)) as found:
            found.engine, found.call = engine, CALLS[name]
            yield found


def chat(server: Any, **fields: Any) -> tuple[str, list[Any]]:
    """The text of an answer, and the arguments of its calls."""
    tools = [{"type": "function", "function": WEATHER}]
    body = {"messages": ASKED, "tools": tools, "response_format": CHAT, "temperature": 0, "max_tokens": 80, **fields}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    return message["content"] or "", [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", ())]


def response(server: Any) -> tuple[str, list[Any]]:
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    body = {"input": ASKED, "tools": [{"type": "function", **WEATHER}], "text": form, "temperature": 0}
    output = server.client.post("/v1/responses", json={**body, "max_output_tokens": 80}).json()["output"]
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    return "".join(texts), [json.loads(item["arguments"]) for item in output if item["type"] == "function_call"]


def message(server: Any) -> tuple[str, list[Any]]:
    form = {"format": {"type": "json_schema", "schema": PERSON}}
    tools = [{"name": "weather", "input_schema": CITY, "strict": True}]
    body = {"model": "m", "messages": ASKED, "tools": tools, "output_config": form, "temperature": 0, "max_tokens": 80}
    content = server.client.post("/v1/messages", json=body).json()["content"]
    texts = [block["text"] for block in content if block["type"] == "text"]
    return "".join(texts), [block["input"] for block in content if block["type"] == "tool_use"]


@pytest.mark.parametrize("ask", [chat, response, message])
def test_the_model_calls_or_answers_in_the_form(server: Any, ask: Any) -> None:
    server.engine.script = lambda _: server.call
    assert ask(server) == ("", [ARGUMENTS])
    server.engine.script = lambda _: SAID
    assert ask(server) == (SAID, [])
    server.engine.script = lambda _: "I do not know."  # held to one of them, whatever it would say
    text, calls = ask(server)
    assert (text, calls) in [(SAID, []), ("", [ARGUMENTS]), ("", [ARGUMENTS] * len(calls))]


def test_a_required_call_leaves_no_other_answer(server: Any) -> None:
    server.engine.script = lambda _: SAID
    text, calls = chat(server, tool_choice="required", parallel_tool_calls=False)
    assert (text, calls) == ("", [ARGUMENTS])
    server.engine.script = lambda _: server.call
    assert chat(server, tool_choice="none")[0] == SAID


def test_other_forms_exclude_tools(server: Any) -> None:
    body = {"messages": ASKED, "tools": [{"type": "function", "function": WEATHER}]}
    refused = server.client.post("/v1/chat/completions", json={**body, "structured_outputs": {"regex": "a+"}})
    assert refused.status_code == 400
    assert "structured_outputs.regex and tools cannot both be given" in refused.text
