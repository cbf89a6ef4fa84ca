"""Calls in DSML: read however they are cut, and held to their schema, in random calls written as DeepSeek documents."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from bitnet.core.text.chat import ChatTemplate
from bitnet.server.chat.call_forms import call_parser
from bitnet.server.forms.dsml_rules import DSML_TERMINALS, DsmlRules
from bitnet.server.forms.json_rules import TERMINALS

_SPEC = importlib.util.spec_from_file_location("json_rules", Path(__file__).with_name("test_json_rules.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
json_tests = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(json_tests)

OPEN, CLOSE = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
TEMPLATE = ChatTemplate("{{ tools }}" + OPEN)
END = "</｜DSML｜parameter>"


def parameter(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f'<｜DSML｜parameter name="{name}" string="{str(isinstance(value, str)).lower()}">{text}{END}'


def invoked(name: str, arguments: dict[str, Any]) -> str:
    written = "\n".join(parameter(*pair) for pair in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{written}\n</｜DSML｜invoke>'


def random_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 3 else 5)
    if kind < 5:
        text = "".join(chance.choices('a"\\{}[],é\n <>/｜DSML', k=chance.randrange(12)))
        return [None, True, chance.randrange(-200, 200), chance.random(), text][kind]
    if kind == 5:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {f"k{i}": random_value(chance, depth + 1) for i in range(chance.randrange(4))}


def read(written: str, chance: random.Random, most: int, **how: bool) -> Any:
    """A parser that got a text in random pieces."""
    parser = call_parser(TEMPLATE, {"add", "get"}, prefix="", **{"parallel": True, "required": False, **how})
    at = 0
    while at < len(written):
        size = chance.randint(1, most)
        parser.push(written[at : at + size])
        at += size
    parser.end()
    return parser


def test_random_calls_are_read_however_they_are_cut() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        calls = [
            (chance.choice(["add", "get"]), {f"p{i}": random_value(chance) for i in range(chance.randrange(4))})
            for _ in range(chance.randrange(1, 4))
        ]
        said = chance.choice(["", "Hm, <b> ", "a < b｜DSML｜"])
        written = "\n".join([said + OPEN, *(invoked(*call) for call in calls), CLOSE])
        parser = read(written, chance, chance.choice([1, 3, 9, 50]))
        assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == calls, written
        assert parser.text == said
        alone = read(written, chance, 50, parallel=False)
        assert [(call.name, json.loads(call.arguments)) for call in alone.calls] == calls[:1]


@pytest.mark.parametrize(
    ("written", "text", "calls"),
    [
        (f"{OPEN}\n{invoked('other', {'a': 1})}\n{CLOSE}", None, []),
        (f"{OPEN} no call", None, []),
        ("<｜DSML｜func", None, []),
        (f"{OPEN}{invoked('get', {})}{CLOSE} Done.", "Done.", [("get", "{}")]),
        (f'{OPEN}<｜DSML｜invoke name="add"><｜DSML｜parameter name="a">no JSON{END}</｜DSML｜invoke>', "",
         [("add", '{"a": "no JSON"}')]),
        (f'{OPEN}<｜DSML｜invoke name="add">junk{parameter("a", 1)}junk</｜DSML｜invoke>', "", [("add", '{"a": 1}')]),
        (f'{OPEN}<｜DSML｜invoke name="add">{parameter("a", "x")[:-3]}', "", [("add", '{"a": "x')]),
        (f'{OPEN}<｜DSML｜invoke name="add">{parameter("a", 1)}{CLOSE}', "", [("add", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_what_is_broken_or_no_call(written: str, text: str | None, calls: list[tuple[str, str]]) -> None:
    for most in (1, 4, 100):
        parser = read(written, random.Random(0), most)
        assert parser.text == (written if text is None else text)
        assert [(call.name, call.arguments) for call in parser.calls] == calls


def test_a_later_models_tag() -> None:
    written = f"{OPEN}\n{invoked('get', {'a': 'b'})}\n{CLOSE}".replace("function_calls", "tool_calls")
    parser = call_parser(
        ChatTemplate("{{ tools }}<｜DSML｜tool_calls>"), {"get"}, parallel=True, prefix="", required=False
    )
    parser.push(written)
    assert [(call.name, call.arguments) for call in parser.calls] == [("get", '{"a": "b"}')]


class Rules:
    """The grammar of one schema's parameters."""

    def __init__(self, schema: Any) -> None:
        made = DsmlRules()
        start = made.parameters(schema)
        text = "\n".join(["%llguidance {}", f"start: {start}", *made.rules, TERMINALS, DSML_TERMINALS])
        self._matcher = LLMatcher(json_tests.TOKENIZER, LLMatcher.grammar_from_lark(text))
        assert not self._matcher.is_error(), self._matcher.get_error()

    def allow(self, text: str) -> bool:
        matcher, wanted = self._matcher.deep_copy(), list(text.encode())
        return bool(matcher.try_consume_tokens(wanted) == len(wanted) and matcher.is_accepting())


def written(values: dict[str, Any]) -> str:
    return "\n".join([*(parameter(*pair) for pair in values.items()), "</｜DSML｜invoke>"])


def test_values_that_fit_random_schemas_are_allowed_and_others_are_not() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    maker, refused = json_tests.Maker(seed), 0
    for _ in range(60):
        schema = maker.whole()
        schema["properties"].pop('q"x', None)  # DSML cannot write it
        schema["required"] = [name for name in schema["required"] if name in schema["properties"]]
        rules = Rules(schema)
        for _ in range(4):
            value = maker.value(schema, schema)
            jsonschema.validate(value, schema)
            assert rules.allow(written(value)), (seed, schema, value)
            for name in value:
                left = {key: given for key, given in value.items() if key != name}
                if not jsonschema.Draft202012Validator(schema).is_valid(left):
                    assert not rules.allow(written(left)), (seed, schema, left)
                    refused += 1
    assert refused > 20


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 3},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
    },
    "required": ["text"],
}


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"text": "ab<"}, True),
        ({"text": "abcd"}, False),
        ({"text": 3}, False),
        ({"text": "", "unit": "C", "days": -2}, True),
        ({"text": "", "unit": "K"}, False),
        ({"text": "", "days": "2"}, False),
        ({"text": "", "days": 2.5}, False),
        ({"text": "", "more": 1}, False),
        ({"unit": "F"}, False),
    ],
)
def test_what_a_schema_says_about_parameters(values: dict[str, Any], fits: bool) -> None:
    assert Rules(SCHEMA).allow(written(values)) == fits


def test_a_parameter_comes_once() -> None:
    twice = written({"text": "a", "days": 1}).replace("</｜DSML｜invoke>", written({"days": 2}))
    assert not Rules(SCHEMA).allow(twice)
