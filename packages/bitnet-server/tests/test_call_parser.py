"""Tool calls in streamed text, and arguments that break off."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from jiter import from_json

from bitnet.core.text.chat import ChatTemplate
from bitnet.server.chat.call_forms import call_parser
from bitnet.server.chat.partial_json import complete_part
from bitnet.server.chat.tool_calls import CallParser, Text


def test_text_around_calls_and_what_only_looks_like_one() -> None:
    call = '{"name": "add", "arguments": {"a": "}\\"{", "b": [1]}}'
    cases: list[tuple[str, bool, str, list[tuple[str, str]]]] = [
        (f"Let me see.\n<tool_call>{call}</tool_call>\n", True, "Let me see.\n", [("add", '{"a": "}\\"{", "b": [1]}')]),
        (f"{call}\n{call}", False, "", [("add", '{"a": "}\\"{", "b": [1]}')] * 2),
        (f"<|python_tag|>{call}", False, "", [("add", '{"a": "}\\"{", "b": [1]}')]),
        ('[{"arguments": {"a": 1}, "name": "add"}, {"name":"get","arguments":null}]', False, "",
         [("add", '{"a": 1}'), ("get", "{}")]),
        ('{"type":"function","name":"get","parameters":"{\\"x\\":1}","more":[{}]}', False, "", [("get", '{"x":1}')]),
        ('[{"other": 1}] text', False, '[{"other": 1}] text', []),
        ('{"name": "nope", "arguments": {}} x', False, '{"name": "nope", "arguments": {}} x', []),
        (f"hello {call}", False, f"hello {call}", []),
        ("a <tool_call> b < c <tool", True, "a <tool_call> b < c <tool", []),
        ("<tool_call>{}</tool_call>", True, "<tool_call>{}</tool_call>", []),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', True, "", [("add", '{"a": 1')]),
        ("  \n", False, "  \n", []),
        (r'{"name": "get\_x", "arguments": {}}', False, r'{"name": "get\_x", "arguments": {}}', []),
        (r'{"a\_b": 1} x', False, r'{"a\_b": 1} x', []),
        ('{"arguments": {}, "name": ["add"]}', False, '{"arguments": {}, "name": ["add"]}', []),
        (r"""{"name":"add","arguments":"{\'a\': 1}"} x""", False,
         r"""{"name":"add","arguments":"{\'a\': 1}"} x""", []),
        (r'<tool_call>{"name":"add","arguments":"\_"}</tool_call>, ' f"<tool_call>{call}</tool_call>", True,
         r'<tool_call>{"name":"add","arguments":"\_"}</tool_call>, ', [("add", '{"a": "}\\"{", "b": [1]}')]),
        ('{"name":"get","arguments":"{', False, '{"name":"get","arguments":"{', []),
        ('<tool_call>{"name":"get","arguments":"{}"}</tool_call>', True, "", [("get", "{}")]),
    ]  # fmt: skip
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for written, tags, text, calls in cases:
        for most in [1, 2, 3, 5, 8, 100] * 5:
            parser = CallParser({"add", "get"}, tagged=tags)
            events, at = [], 0
            while at < len(written):
                size = chance.randint(1, most)
                events += parser.push(written[at : at + size])
                at += size
            events += parser.end()
            assert "".join(e.text for e in events if isinstance(e, Text)) == parser.text == text
            assert [(c.name, c.arguments) for c in parser.calls] == calls, written


CALLS: dict[str, dict[str, Any]] = {"add": {"a": '}")\\,(', "b": [1, {"c": None}]}, "get": {}}
MISTRAL = ChatTemplate("{{ tools }}[TOOL_CALLS]")
DEEPSEEK = ChatTemplate("{{ tools }}<｜tool▁call▁begin｜>")
PYTHON = ChatTemplate("{{ tools }}<|tool_call_start|>")
ALL, ONE, SEP, END, LAST = (f"<｜tool▁{m}｜>" for m in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
ADD = json.dumps(CALLS["add"])
WRITTEN: list[tuple[ChatTemplate, str, str, list[str]]] = [
    (MISTRAL, f'So: [TOOL_CALLS] [{{"name": "add", "arguments": {ADD}, "id": "123456789"}}]', "So: ", ["add"]),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "get", "arguments": {{}}}}, {{"arguments": {ADD}, "name": "add"}}] End', "End",
     ["get", "add"]),
    (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]get[CALL_ID]123456789[ARGS]{{}}", "", ["add", "get"]),
    (MISTRAL, f"[TOOL_CALLS]add{ADD}", "", ["add"]),
    (MISTRAL, "[TOOL_CALLS]other[ARGS]{} and [TOOL_", "[TOOL_CALLS]other[ARGS]{} and [TOOL_", []),
    (MISTRAL, "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    (DEEPSEEK, f"Hm{ALL}{ONE}function{SEP}add\n```json\n{ADD}\n```{END}\n{ONE}function{SEP}get\n```json\n{{}}\n```{END}"
     f"{LAST}", "Hm", ["add", "get"]),
    (DEEPSEEK, f"{ALL}{ONE}get{SEP}{{}}{END}{ONE}add{SEP}{ADD}{END}{LAST}", "", ["get", "add"]),
    (DEEPSEEK, f"{ALL}{ONE}other{SEP}{{}}{END}", f"{ALL}{ONE}other{SEP}{{}}{END}", []),
    (PYTHON, """Ok <|tool_call_start|>
```python
add(a='}")\\\\,(', b=[1, {"c": None}])
get()
```
<|tool_call_end|>""", "Ok ", ["add", "get"]),
    (PYTHON, """<|tool_call_start|>[get(), add(a="}\\")\\\\,(", b=[1, {'c': None}])]<|tool_call_end|>""", "",
     ["get", "add"]),
    (PYTHON, "<|tool_call_start|>other(x=1)", "<|tool_call_start|>other(x=1)", []),
]  # fmt: skip


def test_calls_after_marks_are_read_however_they_are_cut() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for template, written, text, names in WRITTEN:
        for most in [1, 2, 3, 5, 8, 100] * 5:
            parser = call_parser(template, {"add", "get"}, parallel=True, prefix="call_", required=False)
            at = 0
            while at < len(written):
                size = chance.randint(1, most)
                parser.push(written[at : at + size])
                at += size
            parser.end()
            assert parser.text == text, (written, most)
            assert [(c.name, json.loads(c.arguments)) for c in parser.calls] == [(n, CALLS[n]) for n in names], written
        alone = call_parser(template, {"add", "get"}, parallel=False, prefix="call_", required=False)
        alone.push(written)
        assert len(alone.calls) == min(1, len(names))


def test_a_long_argument_takes_time_in_proportion() -> None:
    """Each piece is looked at once: 20,000 of them take a second or so, not minutes."""
    parser = call_parser(PYTHON, {"add"}, parallel=True, prefix="", required=False)
    parser.push('<|tool_call_start|>add(a="')
    begun = time.process_time()
    for _ in range(20_000):
        parser.push("0123456789 (,")
    assert time.process_time() - begun < 10
    parser.push('")')
    assert json.loads(parser.calls[0].arguments) == {"a": "0123456789 (," * 20_000}


@pytest.mark.parametrize("written", ["1+2", "f(x)", "{1, 2}", "b'x'", "1e999", "[" * 5000 + "]" * 5000, "2" * 5000])
def test_what_is_no_json_becomes_a_text(written: str) -> None:
    parser = call_parser(PYTHON, {"add"}, parallel=True, prefix="", required=False)
    parser.push(f"<|tool_call_start|>add(a={written})")
    assert json.loads(parser.calls[0].arguments) == {"a": written}


def random_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 3 else 5)
    if kind < 5:
        text = "".join(chance.choices('a"\\{}[]:,é\n ', k=chance.randrange(6)))
        return [None, True, chance.randrange(-200, 200), chance.random() * 1e-9, text][kind]
    if kind == 5:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {f"k{i}": random_value(chance, depth + 1) for i in range(chance.randrange(4))}


def test_the_complete_part_of_an_object_is_what_clients_read() -> None:
    """``jiter`` is what the official clients read unfinished arguments with."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(300):
        made = {f"k{i}": random_value(chance) for i in range(chance.randrange(1, 4))}
        written = json.dumps(made, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1]))
        assert complete_part(written) == made
        for _ in range(20):
            cut = written[: chance.randrange(1, len(written))]
            try:
                expected: Any = from_json(cut.encode(), partial_mode=True)
            except ValueError:
                expected = {}
            assert complete_part(cut) == expected, cut
    for wrong in ("", "[1", "7", "x", '{"a" 1', "{]", "{" * 5000, '{"a": ' * 5000):
        assert complete_part(wrong) == {}
