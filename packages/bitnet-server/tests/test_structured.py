"""Structured output: complete answers fit their schema, invalid schemas are refused, and failures give no answer."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from bitnet.core import Model
from bitnet.server.forms import structured
from bitnet.server.forms.matchers import Matcher

HERE = "packages/bitnet-server/src/bitnet/server/forms/structured.py"


ENDED = 0.86
"""Share of the answers that end within 200 tokens: 858 of 1,000 did."""
FORMATS = jsonschema.FormatChecker()
TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.IGNORECASE)


@FORMATS.checks("date")
def is_date(value: object) -> bool:
    """As RFC 3339 has it, the year 0 included, which Python's dates lack."""
    if not isinstance(value, str):
        return True
    try:
        date.fromisoformat(f"2000{value[4:]}" if value[:4] == "0000" else value)
    except ValueError:
        return False
    return len(value) == len("0000-00-00")


@FORMATS.checks("time")
def is_time(value: object) -> bool:
    """As RFC 3339 has it, leap seconds and a small z included, which ``jsonschema`` does not take."""
    return not isinstance(value, str) or TIME.fullmatch(value) is not None


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the kinds people use."""
    simple = ("string", "integer", "number", "boolean", "enum", "const", "pattern", "format", "null")
    kind = chance.choice(simple if depth >= 2 else (*simple, "object", "object", "object", "array", "anyOf", "ref"))
    low = chance.randrange(-50, 50)
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "string":
        return {"type": "string", "maxLength": chance.randrange(1, 12)}
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": low, "maximum": low + chance.randrange(1, 1000)}
    if kind == "enum":
        return {"enum": chance.sample(["red", "green", 1, 2.5, None, True, "naïve"], chance.randrange(1, 5))}
    if kind == "const":
        return {"const": chance.choice(["x", 7, False])}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[a-c]{2,4}$", "^\\d{3}-\\d{2}$", "^(yes|no)$"])}
    if kind == "format":
        return {"type": "string", "format": chance.choice(["date", "time", "uuid", "ipv4"])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth + 1) for _ in range(chance.randrange(1, 4))]}
    if kind == "array":
        least = chance.randrange(0, 3)
        items = random_schema(chance, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + chance.randrange(0, 3)}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    names = chance.sample(["name", "age", "tags", "a b", "größe", "id"], chance.randrange(1, 4))
    properties = {name: random_schema(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def check_schemas(server: Any, count: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    leaf = {"$defs": {"leaf": {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}}}
    schemas = [{**random_schema(chance), **leaf} for _ in range(count)]

    def ask(i: int) -> tuple[str, str]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schemas[i], "strict": True}}
        answer = server.chat("Give me some JSON.", temperature=1, seed=seed + i, max_tokens=200, response_format=form)
        assert answer.status_code == 200, (schemas[i], answer.text)
        choice = answer.json()["choices"][0]
        return choice["finish_reason"], choice["message"]["content"]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(count)))
    for schema, (reason, text) in zip(schemas, answers, strict=True):
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
        else:
            assert reason == "length", (schema, text)
    ended = sum(reason == "stop" for reason, _ in answers)
    print(f"{ended} of {count} ended")
    assert ended > count * ENDED - 5 * (count * ENDED * (1 - ENDED)) ** 0.5  # five standard deviations below


def test_answers_fit_random_schemas(demo: Any) -> None:
    check_schemas(demo, 40)


@pytest.mark.nightly(unless_changed=(HERE,))
def test_answers_fit_a_thousand_random_schemas(demo: Any) -> None:
    check_schemas(demo, 1000)


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


def test_the_openai_client_parses(script_model: Model, running: Any, scripted: Any) -> None:
    said = '{"name":"Ada","age":36,"tags":["x","y"]}'
    scripted(script_model, said)
    with running(script_model) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "Who?"}]
        answer = client.chat.completions.parse(model="bitnet-demo", messages=messages, response_format=Person)
        assert answer.choices[0].message.parsed == Person(name="Ada", age=36, tags=["x", "y"])
        response = client.responses.parse(model="bitnet-demo", input="Who?", text_format=Person)
        assert response.output_parsed == Person(name="Ada", age=36, tags=["x", "y"])


def test_other_forms(demo: Any) -> None:
    def text(**fields: Any) -> str:
        answer = demo.chat("Say it.", temperature=1, max_tokens=120, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    assert re.fullmatch(r"[abc]{3}-\d{2}", text(structured_outputs={"regex": r"[abc]{3}-\d{2}"}))
    assert text(structured_outputs={"choice": ["a+b", "c|d"]}) in ("a+b", "c|d")
    assert re.fullmatch("(ab)+!", text(structured_outputs={"grammar": 'start: ("ab")~1..9 "!"'}))
    assert text(structured_outputs={"grammar": 'root ::= ("ab"){2} [c-d]'}) in ("ababc", "ababd")
    assert text(structured_outputs={"json": '{"type": "array", "maxItems": 0}'}) == "[]"
    assert text(structured_outputs={"json_object": True, "disable_any_whitespace": True}).startswith("{")
    assert text(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert demo.chat(grammar="", max_tokens=1).status_code == 200
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema: dict[str, Any] = {"type": "object", "properties": {"n": digit}, "required": ["n"]}
    schema["additionalProperties"] = False
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": False, "format": schema}
    found = json.loads(demo.client.post("/api/chat", json=body).json()["message"]["content"])
    jsonschema.validate(found, schema)


BAD: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/none"}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1/x"}},
        }
    },
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "x" * 300_000}}}},
    {"structured_outputs": {"regex": "(unclosed"}},
    {"structured_outputs": {"grammar": "start: undefined_rule"}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
    {"guided_regex": "a"},
    {"grammar": 'root ::= "a" foo'},
    {"grammar": 'root ::= "a"', "json_schema": {"type": "null"}},
    {"structured_outputs": {"grammar": 'root ::= "a'}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"structural_tag": "{}"}},
]


@pytest.mark.parametrize("fields", BAD, ids=range(len(BAD)))
def test_what_cannot_be_held_to_is_refused(demo: Any, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = demo.chat("x", stream=stream, max_tokens=1, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"], answer.text


def test_a_matcher_that_fails_gives_no_answer(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Matcher.accept, iter(range(1000))

    def fail(self: Any, token: int) -> None:
        if next(calls) >= 3:
            raise ValueError("out of fuel")
        real(self, token)

    monkeypatch.setattr(Matcher, "accept", fail)
    answer = demo.chat("x", response_format={"type": "json_object"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "constraint_failed"
    streamed = demo.chat("x", response_format={"type": "json_object"}, stream=True)
    assert "out of fuel" in streamed.text
    assert '"finish_reason":"stop"' not in streamed.text
    assert demo.chat(max_tokens=4).status_code == 200  # the engine goes on


def test_without_llguidance_it_is_refused(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "available", lambda: False)
    answer = demo.chat("x", response_format={"type": "json_object"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
