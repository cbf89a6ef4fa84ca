"""Calls that a model begins by itself: each fits its tool's schema, whatever the model would write."""

from __future__ import annotations

import importlib.util
import json
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from bitnet.core import Model
from bitnet.core.model import open_model
from bitnet.core.model.default import default_model_path
from bitnet.server.chat.call_forms import Tool, lazy_form
from bitnet.server.forms.lazy import LazyForm, LazyMatcher
from bitnet.server.forms.matchers import FormSource, Matchers


def beside(name: str) -> Any:
    """The test module of this name."""
    spec = importlib.util.spec_from_file_location(f"shared_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool_tests, json_tests = beside("test_tools"), beside("test_json_rules")
FAMILIES, SCHEMAS, TOOLS, templated = (
    tool_tests.FAMILIES,
    tool_tests.SCHEMAS,
    tool_tests.TOOLS,
    tool_tests.templated,
)
BEGINS = {
    "qwen": "<tool_call>\n",
    "falcon": "<tool_call>\n",
    "mistral": "[TOOL_CALLS]",
    "mistral-named": "[TOOL_CALLS]",
    "mistral-ids": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "deepseek-bare": "<｜tool▁calls▁begin｜>",
    "deepseek-v31": "<｜tool▁calls▁begin｜>",
    "deepseek-v32": "<｜DSML｜function_calls>",
    "minicpm": "<|tool_call_start|>",
    "llama": '"name": "weather"',
    "generic": '"name": "weather"',
}


LISTS = ("mistral", "deepseek", "deepseek-bare", "deepseek-v31", "deepseek-v32", "minicpm")
"""Families whose calls end with a mark of their own. A script that has gone wrong would go on calling until the limit,
so it may call once."""


def broken(text: str, begins: str, chance: random.Random) -> str:
    """A call that goes wrong after its beginning: a few characters are lost, changed or added."""
    start = text.index(begins) + len(begins)
    characters = list(text)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(start, len(characters))
        characters[at : at + chance.randrange(2)] = chance.choice(
            ["", "x", '"', "}", "{", ",", "7", "</tool_call>", "]"]
        )
    return "".join(characters)


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    message = answer.json()["choices"][0]["message"]
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_begun_is_well_formed(script_model: Model, running: Any, scripted: Any, family: str) -> None:
    name, write = FAMILIES[family]
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    scripts: list[str] = []
    scripted(script_model, lambda _: scripts[-1])
    with templated(script_model, name), running(script_model, names=("m",)) as server:
        for n in range(4):
            scripts.append(broken(write("weather"), BEGINS[family], chance))
            asked = {"tools": TOOLS, "max_tokens": 300, "parallel_tool_calls": family not in LISTS}
            answer = server.chat("x", **asked)
            assert answer.status_code == 200, (seed, answer.text)
            found = calls_of(answer)
            assert found, (seed, scripts[-1], answer.text)
            for tool, arguments in found:
                jsonschema.validate(arguments, SCHEMAS[tool])
            if n == 0:
                stream = server.chat("x", stream=True, **asked).text
                events = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
                deltas = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
                said = "".join(call["function"].get("arguments", "") for call in deltas if call["index"] == 0)
                assert json.loads(said) == found[0][1]


@pytest.mark.parametrize("family", ["qwen", "generic"])
def test_calls_stay_as_the_model_writes_them_where_they_are_sound(
    script_model: Model, running: Any, scripted: Any, family: str
) -> None:
    name, write = FAMILIES[family]
    said = write("weather", "add", "weather")
    text = f"I look.\n{said}\nDone, <b>really</b>." if family == "qwen" else said
    scripted(script_model, text)
    with templated(script_model, name), running(script_model, names=("m",)) as server:
        message = server.chat("x", tools=TOOLS).json()["choices"][0]["message"]
        wanted = [json.dumps(tool_tests.ARGUMENTS[n], ensure_ascii=False) for n in ("weather", "add", "weather")]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == wanted
        if family == "qwen":
            assert message["content"].split() == ["I", "look.", "Done,", "<b>really</b>."]
        tools = server.chat("x", tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]
        assert len(tools) == 1


def test_each_of_several_calls_is_held(script_model: Model, running: Any, scripted: Any) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "no"}}\n</tool_call>'
    scripted(script_model, f"First {call} then {call}")
    with templated(script_model, "qwen3"), running(script_model, names=("m",)) as server:
        assert calls_of(server.chat("x", tools=TOOLS, max_tokens=200))[0] == ("add", {"a": 1, "b": 2})


ANSWERS = ['{"name": "Ada", "age": 36}', '{"a": 1}', '[{"name": "other"}]', "A <tool> is not a call.", "<tool_cal"]


@pytest.mark.parametrize("family", ["qwen", "llama", "generic"])
def test_an_answer_that_only_looks_like_a_call_is_left_alone(
    script_model: Model, running: Any, scripted: Any, family: str
) -> None:
    said: list[str] = []
    scripted(script_model, lambda _: said[-1])
    with templated(script_model, FAMILIES[family][0]), running(script_model, names=("m",)) as server:
        for text in ANSWERS:
            said.append(text)
            message = server.chat("x", tools=TOOLS).json()["choices"][0]["message"]
            assert (message["content"], message.get("tool_calls")) == (text, None)


def test_a_schema_that_cannot_be_enforced_leaves_any_object(script_model: Model, running: Any, scripted: Any) -> None:
    """A strict tool with it is refused."""
    scripted(script_model, '{"name": "odd", "arguments": {"x": [1, 2]}} and more')
    refused: list[Any] = [{"not": {"type": "null"}}, {"properties": {"x": {"pattern": "("}}}]
    for schema in refused:
        function = {"name": "odd", "parameters": {"type": "object", **schema}}
        tool = {"type": "function", "function": function}
        with running(script_model, names=("m",)) as server:
            answer = server.chat("x", tools=[tool], max_tokens=40)
            assert answer.status_code == 200, answer.text
            assert calls_of(answer) == [("odd", {"x": [1, 2]})]
            strict = {"type": "function", "function": {**function, "strict": True}}
            assert server.chat("x", tools=[strict]).status_code == 400


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_takes_what_a_family_writes(script_model: Model, family: str) -> None:
    """Byte by byte: a token that the grammar does not know would end it, and hide that it is wrong."""
    name, write = FAMILIES[family]
    tools = [Tool(tool, tool, schema, strict=False, field="tools") for tool, schema in SCHEMAS.items()]
    with templated(script_model, name):
        form = lazy_form(tools, script_model.chat_template, parallel=True)
    called = ("weather",) if form.mark == "<tool_call>" else ("weather", "add")  # each tag begins the grammar anew
    text = list(write(*called).encode())
    for grammar in form.grammars:
        matcher = LLMatcher(json_tests.TOKENIZER, LLMatcher.grammar_from_lark(grammar))
        assert matcher.try_consume_tokens(text) == len(text), grammar
        assert matcher.is_accepting()


class NoMatchers(Matchers):
    """Compiles nothing, ever."""

    def compile(self, source: FormSource) -> Future[None]:
        return Future()


@pytest.mark.parametrize("lead", [0, 1, 7, 300, 3000])
def test_a_mark_is_found_however_long_the_answer_before_it(lead: int) -> None:
    """The grammar begins with the token that completes half of the mark. What is kept of a long answer is little."""
    tokenizer = open_model(default_model_path()).tokenizer
    mark, seed = "<tool_call>", random.randrange(2**32)
    chance = random.Random(seed)
    words = ["a<b", "<too", "<", "ool_call>", "<<to", "é", " so", "\n"]
    text = "".join(chance.choice(words) for _ in range(lead))
    tokens = tokenizer.encode(text + mark + "{}", add_special=False)
    lengths = [len(tokenizer.decode(tokens[: n + 1])) for n in range(max(0, len(tokens) - 40), len(tokens))]
    whole = tokenizer.decode(tokens)
    begins = whole.index(mark)
    wanted = len(tokens) - len(lengths) + next(i for i, n in enumerate(lengths) if n >= begins + len(mark) // 2)
    lazy = LazyMatcher(NoMatchers(tokenizer), LazyForm(mark, "", ("start: /x/",)), tokenizer)
    for n, token in enumerate(tokens):
        lazy.accept(token)
        assert len(lazy._text) < 4096
        assert lazy.waiting == (n < wanted), seed
        if n == wanted:
            break


def test_a_mark_is_found_in_tokens_that_come_together() -> None:
    """Those up to the one that completes half of the mark are taken in, however they are divided."""
    tokenizer = open_model(default_model_path()).tokenizer
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    form = LazyForm("<tool_call>", "", ("start: /x/",))
    words = ["a<b", "<too", "<", "ool_call>", "<<to", "é", " so", "\n", *["word "] * chance.randrange(40)]
    for _ in range(40):
        text = "".join(chance.choice(words) for _ in range(chance.randrange(200)))
        tokens = tokenizer.encode(text + "<tool_call>{}", add_special=False)
        tokens[chance.randrange(len(tokens)) : 0] = chance.choices([*tokenizer.eos_ids], k=chance.randrange(3))
        single, together = (LazyMatcher(NoMatchers(tokenizer), form, tokenizer) for _ in range(2))
        wanted = 0
        while single.waiting:
            single.accept(tokens[wanted])
            wanted += 1
        taken = 0
        while together.waiting:
            some = tokens[taken : taken + chance.randrange(1, 17)]
            count = together.watch(some)
            assert count == len(some) or not together.waiting, seed
            taken += count
        assert taken == wanted, (seed, text)
        held = [
            matcher._tokens[next(i for i, end in enumerate(matcher._ends) if end > matcher._at) :]
            for matcher in (single, together)
        ]
        assert held[0] == held[1], (seed, text)


def test_a_thought_may_speak_of_calls(script_model: Model, running: Any, scripted: Any) -> None:
    thought = 'I could write <tool_call> {"name": nothing}.'
    scripted(script_model, f"<think>\n{thought}\n</think>\n\nNo call.")
    with templated(script_model, "qwen3"), running(script_model, names=("m",)) as server:
        message = server.chat("x", tools=TOOLS).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (thought, "No call.")


def test_a_form_without_the_package_holds_nothing(
    script_model: Model, running: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitnet.server.chat import tools

    monkeypatch.setattr(tools, "available", lambda: False)
    scripted(script_model, '{"name": "add", "arguments": {"a": "no number"}}')
    with running(script_model, names=("m",)) as server:
        assert calls_of(server.chat("x", tools=TOOLS)) == [("add", {"a": "no number"})]


@pytest.mark.nightly(unless_changed=("packages/bitnet-server/src/bitnet/server/forms",))
@pytest.mark.parametrize("family", FAMILIES)
def test_figures(
    script_model: Model, running: Any, scripted: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prints how many of 100 calls that go wrong reach the client as a call that fits, without the grammar and with
    it."""
    from bitnet.server.chat import tools

    name, write = FAMILIES[family]
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    said = [broken(write("weather"), BEGINS[family], chance) for _ in range(100)]
    scripts: list[str] = []
    scripted(script_model, lambda _: scripts[-1])
    fitting = [0, 0]
    with templated(script_model, name), running(script_model, names=("m",)) as server:
        for held in (False, True):
            monkeypatch.setattr(tools, "available", lambda held=held: held)
            for text in said:
                scripts.append(text)
                asked = {"tools": TOOLS, "max_tokens": 300, "parallel_tool_calls": family not in LISTS}
                message = server.chat("x", **asked).json()["choices"][0]["message"]
                fitting[held] += all_fit(message.get("tool_calls") or ())
    print(f"{family}: {fitting[0]} of 100 fit without the grammar, {fitting[1]} with it (seed {seed})")
    assert fitting[1] == 100 > fitting[0], seed


def all_fit(calls: Any) -> bool:
    """Whether there are calls, and the arguments of each fit its tool's schema."""
    try:
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    except (ValueError, jsonschema.ValidationError):
        return False
    return bool(calls)
