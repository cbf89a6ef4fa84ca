"""Tool calls, with the official clients: scripted answers as each family writes, and the demo model held to a call.

Long, because each way to write calls goes through the same checks, which share the families' tables.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import ollama
import openai
import pytest

from bitnet.core import Model
from bitnet.core.text.chat import ChatTemplate
from bitnet.server.chat.rendering import as_template_reads
from bitnet.server.chat.tools import made_call

TEMPLATES = Path(__file__).parents[2] / "bitnet-core/tests/text/templates"
HERE = ("packages/bitnet-server",)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"const": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"const": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
SCHEMAS = {"weather": WEATHER, "add": ADD}
ARGUMENTS: dict[str, dict[str, Any]] = {"weather": {"city": 'Zürich "}{', "days": 3}, "add": {"a": 1, "b": 2}}
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]


def tool(name: str, **more: Any) -> Any:
    function = {"name": name, "parameters": SCHEMAS[name], **more}
    return {"type": "function", "function": function}


TOOLS = [tool("weather"), tool("add")]
FLAT: Any = [{"type": "function", **t["function"]} for t in TOOLS]
"""The tools for responses."""
THEIRS: Any = [{"name": n, "description": n, "input_schema": SCHEMAS[n]} for n in SCHEMAS]
"""The tools for Anthropic's API."""


def tagged(*names: str) -> str:
    calls = (json.dumps({"name": n, "arguments": ARGUMENTS[n]}, ensure_ascii=False) for n in names)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def bare(key: str, *names: str) -> str:
    return "; ".join(json.dumps({"name": n, key: ARGUMENTS[n]}, ensure_ascii=False) for n in names)


def listed(*names: str) -> str:
    calls = [{"name": n, "arguments": ARGUMENTS[n], "id": "abcdefghi"} for n in names]
    return "[TOOL_CALLS]" + json.dumps(calls, ensure_ascii=False)


def named(*names: str) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(ARGUMENTS[n], ensure_ascii=False)}" for n in names)


def named_with_ids(*names: str) -> str:
    """As Mistral Small 3.2's template writes them."""
    return named(*names).replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]")


def bare_marks(*names: str) -> str:
    """As DeepSeek V3.1's template writes them."""
    calls = (
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(ARGUMENTS[n], ensure_ascii=False)}<｜tool▁call▁end｜>"
        for n in names
    )
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def dsml(*names: str) -> str:
    """As DeepSeek documents the form of V3.2: texts as they are, other values as JSON."""
    calls = []
    for name in names:
        values = [
            f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>'
            if isinstance(value, str)
            else f'<｜DSML｜parameter name="{key}" string="false">{json.dumps(value)}</｜DSML｜parameter>'
            for key, value in ARGUMENTS[name].items()
        ]
        calls.append("\n".join([f'<｜DSML｜invoke name="{name}">', *values, "</｜DSML｜invoke>"]))
    return "\n".join(["<｜DSML｜function_calls>", *calls, "</｜DSML｜function_calls>"])


def fenced(*names: str) -> str:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    calls = (
        f"{begin}function<｜tool▁sep｜>{n}\n```json\n{json.dumps(ARGUMENTS[n], ensure_ascii=False)}\n```{end}"
        for n in names
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>"


def pythonic(*names: str) -> str:
    calls = (
        f"{n}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in ARGUMENTS[n].items())})"
        for n in names
    )
    return f"<|tool_call_start|>\n```python\n{chr(10).join(calls)}\n```\n<|tool_call_end|>"


FAMILIES: dict[str, tuple[str | None, Callable[..., str]]] = {
    "qwen": ("qwen3", tagged),
    "falcon": ("falcon3", tagged),
    "mistral": ("mistral", listed),
    "mistral-named": ("mistral-named", named),
    "mistral-ids": ("mistral-named", named_with_ids),
    "deepseek": ("deepseek", fenced),
    "deepseek-bare": ("deepseek-bare", bare_marks),
    "deepseek-v31": ("deepseek31", bare_marks),
    "deepseek-v32": ("deepseek32", dsml),
    "minicpm": ("minicpm4", pythonic),
    "llama": ("llama3", lambda *names: bare("parameters", *names)),
    "generic": (None, lambda *names: bare("arguments", *names)),
}


@contextmanager
def templated(model: Model, name: str | None) -> Iterator[None]:
    """The model with a family's chat template."""
    if name is not None:
        file = TEMPLATES / f"{name.removesuffix('-named').removesuffix('-bare')}.jinja"
        source = file.read_text("utf-8").replace("(indent=4)", "")  # short, for the demo's context
        source = source.replace("<think>\\n", "")  # the scripts do not think
        source += "{# [ARGS] #}" if name.endswith("-named") else ""
        source = source.replace("```json", "") if name.endswith("-bare") else source
        tokens = model.tokenizer
        template = ChatTemplate(source, bos_token=tokens.bos_token, eos_token=tokens.eos_token)
        model._file.__dict__["chat_template"] = template
    try:
        yield
    finally:
        model._file.__dict__.pop("chat_template", None)


def clients(url: str) -> tuple[openai.OpenAI, anthropic.Anthropic, ollama.Client]:
    return (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0),
        ollama.Client(host=url),
    )


EXPECTED = [("weather", ARGUMENTS["weather"]), ("add", ARGUMENTS["add"])]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_reach_every_client(script_model: Model, running: Any, scripted: Any, family: str) -> None:
    name, write = FAMILIES[family]
    seen = scripted(script_model, lambda prompt: write("weather", "add")).prompts
    with templated(script_model, name), running(script_model, names=("m",)) as server:
        chats, messages, lines = clients(server.url)
        answer = chats.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)
        assert {"minicpm4": "def weather(", "deepseek": "weather: ", "deepseek-bare": "weather: "}.get(
            str(name), '"maxLength"'
        ) in seen[0]
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        assert message.content is None
        assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == EXPECTED  # type: ignore[union-attr]
        assert len({c.id for c in message.tool_calls or ()}) == 2
        with chats.chat.completions.stream(model="m", messages=QUESTION, tools=TOOLS) as stream:
            deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0]
        assert len(deltas) > 2, "the arguments came in one piece"
        found = final.message.tool_calls or ()
        assert [(c.function.name, json.loads(c.function.arguments)) for c in found] == EXPECTED
        assert final.finish_reason == "tool_calls"

        flat: Any = [{"type": "function", **t["function"]} for t in TOOLS]
        response = chats.responses.create(model="m", input=QUESTION, tools=flat)
        assert [(i.name, json.loads(i.arguments)) for i in response.output if i.type == "function_call"] == EXPECTED
        with chats.responses.stream(model="m", input=QUESTION, tools=flat) as events:
            parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            last = events.get_final_response()
        assert len(parts) > 2
        assert [(i.name, json.loads(i.arguments)) for i in last.output if i.type == "function_call"] == EXPECTED

        theirs: Any = [{"name": n, "description": n, "input_schema": SCHEMAS[n]} for n in SCHEMAS]
        said = messages.messages.create(model="m", max_tokens=400, messages=QUESTION, tools=theirs)
        assert [(b.name, b.input) for b in said.content if b.type == "tool_use"] == EXPECTED
        assert said.stop_reason == "tool_use"
        with messages.messages.stream(model="m", max_tokens=400, messages=QUESTION, tools=theirs) as blocks:
            pieces = [e.partial_json for e in blocks if e.type == "input_json"]
            whole = blocks.get_final_message()
        assert len(pieces) > 2
        assert [(b.name, b.input) for b in whole.content if b.type == "tool_use"] == EXPECTED
        assert whole.stop_reason == "tool_use"

        local = lines.chat(model="m", messages=QUESTION, tools=TOOLS)
        calls = local.message.tool_calls or ()
        assert [(c.function.name, c.function.arguments) for c in calls] == EXPECTED
        streamed = [*lines.chat(model="m", messages=QUESTION, tools=TOOLS, stream=True)]
        calls = [c for line in streamed for c in line.message.tool_calls or ()]
        assert [(c.function.name, c.function.arguments) for c in calls] == EXPECTED
        assert not any(line.message.content for line in streamed)

        one = chats.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS, parallel_tool_calls=False)
        assert [c.function.name for c in one.choices[0].message.tool_calls or ()] == ["weather"]  # type: ignore[union-attr]
        none = chats.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS, tool_choice="none")
        assert none.choices[0].message.tool_calls is None
        assert none.choices[0].message.content == write("weather", "add")
        assert "maxLength" not in seen[-1]


@pytest.mark.nightly(unless_changed=HERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_go_back_to_the_model(script_model: Model, running: Any, scripted: Any, family: str) -> None:
    name, write = FAMILIES[family]
    first = write("weather", "add")
    seen = scripted(script_model, lambda prompt: "Sunny." if "27 degrees" in prompt else first).prompts
    with templated(script_model, name), running(script_model, names=("m",)) as server:
        chats, messages, lines = clients(server.url)
        asked = chats.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS).choices[0].message
        ids = [call.id for call in asked.tool_calls or ()]
        results: Any = [{"role": "tool", "tool_call_id": i, "content": f"27 degrees {i}"} for i in ids]
        conversation: Any = [*QUESTION, asked.model_dump(exclude_none=True), *results]
        answer = chats.chat.completions.create(model="m", messages=conversation, tools=TOOLS)
        assert answer.choices[0].message.content == "Sunny."
        assert all(i in seen[-1] for i in ids)
        assert "Zürich" in seen[-1] or "Z\\u00fcrich" in seen[-1]

        flat: Any = [{"type": "function", **t["function"]} for t in TOOLS]
        response = chats.responses.create(model="m", input=QUESTION, tools=flat)
        items: Any = [*QUESTION, *(i.model_dump(exclude_none=True) for i in response.output)]
        for item in response.output:
            assert item.type == "function_call"
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "27 degrees"})
        assert chats.responses.create(model="m", input=items, tools=flat).output_text == "Sunny."

        theirs: Any = [{"name": n, "description": n, "input_schema": SCHEMAS[n]} for n in SCHEMAS]
        said = messages.messages.create(model="m", max_tokens=400, messages=QUESTION, tools=theirs)
        back: Any = [
            {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "27 degrees"}]}
            for b in said.content
            if b.type == "tool_use"
        ]
        turns: Any = [*QUESTION, {"role": "assistant", "content": said.content}, {"role": "user", "content": back}]
        after = messages.messages.create(model="m", max_tokens=400, messages=turns, tools=theirs)
        assert [b.text for b in after.content if b.type == "text"] == ["Sunny."]

        local = lines.chat(model="m", messages=QUESTION, tools=TOOLS).message
        outputs = [{"role": "tool", "tool_name": "weather", "content": "27 degrees"}]
        assert lines.chat(model="m", messages=[*QUESTION, local, *outputs], tools=TOOLS).message.content == "Sunny."


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_looks_like_a_call_reaches_the_client(
    script_model: Model, running: Any, scripted: Any, stream: bool
) -> None:
    written = r'{"name": "weather\_x", "arguments": {}}'
    scripted(script_model, written)
    with running(script_model) as server:
        answer = server.chat(tools=TOOLS, stream=stream)
    assert answer.status_code == 200
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == written
    else:
        assert answer.json()["choices"][0]["message"]["content"] == written


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_fits_its_schema(demo: Any, family: str) -> None:
    """The demo model knows no tools: whatever it says is the constraint's doing."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    with templated(demo.model, FAMILIES[family][0]):
        for i, choice in enumerate(["required", {"type": "function", "function": {"name": "add"}}]):
            more = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 1, "max_tokens": 300}
            answer = demo.chat("Do it.", tools=TOOLS, seed=seed + i, **more)
            assert answer.status_code == 200, answer.text
            (found,) = answer.json()["choices"]
            assert found["finish_reason"] == "tool_calls"
            (call,) = found["message"]["tool_calls"]
            assert i == 0 or call["function"]["name"] == "add"
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


def test_strict_tools_and_choices_of_other_apis(demo: Any) -> None:
    theirs: Any = [{"name": n, "input_schema": SCHEMAS[n]} for n in SCHEMAS]
    chats, messages, _ = clients(demo.url)
    once: Any = {"type": "any", "disable_parallel_tool_use": True}
    said = messages.messages.create(model="demo", max_tokens=200, messages=QUESTION, tools=theirs, tool_choice=once)
    (block,) = said.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMAS[block.name])
    flat: Any = [{"type": "function", **tool("add", strict=True, parameters=REFERRING)["function"]}]
    response = chats.responses.create(
        model="demo", input="x", tools=flat, tool_choice={"type": "function", "name": "add"}
    )
    (item,) = response.output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), REFERRING)
    free = demo.chat("What is 17 + 25?", tools=[tool("add", strict=True)], max_tokens=40)
    assert free.json()["choices"][0]["finish_reason"] in ("stop", "tool_calls", "length")


def test_a_strict_call_that_is_begun_is_held_to(script_model: Model, running: Any, scripted: Any) -> None:
    """The script writes arguments that the schema forbids; each constrained token is the likeliest allowed one."""
    scripted(script_model, lambda _: '{"name": "add", "arguments": {"a": "no number"}}')
    with running(script_model, names=("m",)) as server:
        strict = server.chat("x", tools=[tool("add", strict=True)], max_tokens=100).json()["choices"][0]
        for call in strict["message"].get("tool_calls", ()):
            if strict["finish_reason"] == "tool_calls":
                jsonschema.validate(json.loads(call["function"]["arguments"]), ADD)
        assert "no number" not in json.dumps(strict)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_held_to_its_schema_keeps_the_spaces_of_the_model(
    script_model: Model, running: Any, scripted: Any, family: str
) -> None:
    """Where a space that the model would write is forbidden, its next token is one that it would not write there."""
    name, write = FAMILIES[family]
    scripted(script_model, write("add"))
    with templated(script_model, name), running(script_model, names=("m",)) as server:
        for how in ({"tools": [tool("add", strict=True)]}, {"tools": [tool("add")], "tool_choice": "required"}):
            (call,) = server.chat("x", max_tokens=200, **how).json()["choices"][0]["message"]["tool_calls"]
            assert call["function"]["arguments"] == json.dumps(ARGUMENTS["add"])


def cut(chance: random.Random) -> str:
    """Arguments that break off, or that are no object, as models and other servers leave them in conversations."""
    whole = json.dumps(ARGUMENTS["weather"], ensure_ascii=False)
    return chance.choice([whole[: chance.randrange(1, len(whole))], '{"city": Zürich}', "[1]", "null x", '"text"', "7"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_call_is_part_of_the_conversation(
    script_model: Model, running: Any, scripted: Any, family: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    seen = scripted(script_model, "Go on.").prompts
    with templated(script_model, FAMILIES[family][0]), running(script_model, names=("m",)) as server:
        for _ in range(3):
            broken, sound = cut(chance), json.dumps(ARGUMENTS["add"])
            calls = [("c1", "weather", broken), ("c2", "add", sound)][: chance.choice([1, 2])]
            asked = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
            results = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i, *_ in calls]
            chat = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": asked}, *results]
            items = [
                *QUESTION,
                *({"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in calls),
            ]
            items += [{"type": "function_call_output", "call_id": i, "output": f"result {i}"} for i, *_ in calls]
            used = [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls]
            outputs = [{"type": "tool_result", "tool_use_id": i, "content": f"result {i}"} for i, *_ in calls]
            turns = [*QUESTION, {"role": "assistant", "content": used}, {"role": "user", "content": outputs}]
            bodies: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": {"messages": chat, "tools": TOOLS},
                "/v1/responses": {"input": items, "tools": FLAT},
                "/v1/messages": {"messages": turns, "max_tokens": 50, "tools": THEIRS},
                "/api/chat": {"messages": chat, "stream": False, "tools": TOOLS},
            }
            for path, body in bodies.items():
                answer = server.client.post(path, json={"model": "m", **body})
                assert answer.status_code == 200, (path, broken, answer.text)
                assert "Go on." in answer.text
                assert "weather" in seen[-1]
                assert broken.rstrip() in seen[-1], path  # templates trim messages
                assert "result c1" in seen[-1]
                sound_one = {"minicpm": "a=1", "deepseek-v32": 'name="a" string="false">1<'}.get(family, '"a": 1')
                assert len(calls) == 1 or sound_one in seen[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_cut_off_can_be_sent_back(script_model: Model, running: Any, scripted: Any, family: str) -> None:
    """Answers that end at the limit, whole and streamed, and the turn after them."""
    name, write = FAMILIES[family]
    script = scripted(script_model, lambda prompt: "Sunny." if "again" in prompt else write("weather", "add"))
    with templated(script_model, name), running(script_model, names=("m",)) as server:
        chats, messages, _ = clients(server.url)
        again: Any = {"role": "user", "content": "Try again."}
        lengths = len(script.tokenizer.encode(write("weather", "add"), add_special=False))
        for most in random.sample(range(1, lengths + 2), 5):
            said = chats.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS, max_tokens=most)
            turns: Any = [*QUESTION, said.choices[0].message.model_dump(exclude_none=True), again]
            next_ = chats.chat.completions.create(model="m", messages=turns, tools=TOOLS)
            assert next_.choices[0].message.content == "Sunny."
            response = chats.responses.create(model="m", input=QUESTION, tools=FLAT, max_output_tokens=most)
            items: Any = [*QUESTION, *(i.model_dump(exclude_none=True) for i in response.output), again]
            assert chats.responses.create(model="m", input=items, tools=FLAT).output_text == "Sunny."
            after: Any = {"model": "m", "previous_response_id": response.id, "input": [again], "tools": FLAT}
            assert chats.responses.create(**after).output_text == "Sunny."

            options: Any = {"model": "m", "max_tokens": most, "messages": QUESTION, "tools": THEIRS}
            whole = messages.messages.create(**options)
            with messages.messages.stream(**options) as stream:
                streamed = stream.get_final_message()
            assert (whole.stop_reason, whole.usage.output_tokens) == (
                streamed.stop_reason,
                streamed.usage.output_tokens,
            )
            shape = [b.model_dump(include={"type", "text", "name", "input"}) for b in whole.content]
            assert shape == [b.model_dump(include={"type", "text", "name", "input"}) for b in streamed.content]
            assert whole.stop_reason == ("max_tokens" if most <= lengths else "tool_use")
            back: Any = [*QUESTION, {"role": "assistant", "content": whole.content or "-"}, again]
            assert (
                messages.messages.create(**{**options, "max_tokens": 20, "messages": back}).content[0].text == "Sunny."
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_that_is_cut_off_leaks_no_markup(demo: Any, family: str) -> None:
    """The demo model is held to a call, which the limit ends early."""
    with templated(demo.model, FAMILIES[family][0]):
        for most in random.sample(range(1, 24), 4):
            more: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": most, "temperature": 1}
            (choice,) = demo.chat("Do it.", **more).json()["choices"]
            assert not choice["message"]["content"], choice
            events = demo.chat("Do it.", stream=True, **more).text.split("\n\n")
            deltas = [json.loads(e[6:])["choices"][0]["delta"] for e in events if e.startswith("data: {")]
            assert not "".join(delta.get("content") or "" for delta in deltas)
            body = {"model": "demo", "max_tokens": most, "messages": QUESTION, "tools": THEIRS}
            said = demo.client.post("/v1/messages", json={**body, "tool_choice": {"type": "any"}}).json()
            assert all(block["type"] == "tool_use" for block in said["content"]), said
            asked = {"input": "x", "tools": FLAT, "tool_choice": "required", "max_output_tokens": most}
            output = demo.client.post("/v1/responses", json=asked).json()["output"]
            assert not any(part["text"] for item in output for part in item.get("content", ())), output


BAD: list[dict[str, Any]] = [
    {"tools": [{"type": "retrieval"}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
    {"tools": [TOOLS[0], TOOLS[0]]},
    {"tools": [], "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": "sometimes"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
    {"tools": TOOLS, "structured_outputs": {"regex": "a+"}},
    {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
    {"tools": [tool("add", parameters={"type": "object", "properties": {"a": {"not": {}}}}, strict=True)]},
    {"tools": [tool("add", parameters={"type": "object", "properties": {"a": {"$ref": "#/no"}}})],
     "tool_choice": "required"},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD, ids=range(len(BAD)))
def test_what_cannot_be_followed_is_refused(demo: Any, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = demo.chat("x", stream=stream, max_tokens=1, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"], answer.text


@pytest.mark.parametrize("source", ["<tool_call>", "<|python_tag|>", ""], ids=["tagged", "llama", "generic"])
def test_a_thought_stays_with_its_message_and_is_written_once(source: str) -> None:
    """Whatever a template makes of calls: those that are broken, several at once, and calls in plain words."""
    whole = made_call("1", "weather", {"place": "Rome"})
    broken = made_call("2", "weather", '{"place": "Ro')
    for calls in ([whole], [broken], [whole, whole], [whole, broken, whole]):
        said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls}
        messages, _ = as_template_reads([*QUESTION, said], None, ChatTemplate(source))
        assert [m["reasoning_content"] for m in messages if "reasoning_content" in m] == ["Hm."]
        assert messages[1]["reasoning_content"] == "Hm."
        assert said["tool_calls"] == calls, "the message itself is not changed"
