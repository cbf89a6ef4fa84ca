"""Chat templates of the families in use, written anew with their constructs: rendered as plain Jinja2 renders them."""

from __future__ import annotations

import datetime
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.text.chat import ChatTemplate

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where: \"<quoted>\" & 'so'"},
        "unit": {"type": "string", "enum": ["°C", "°F"]},
        "days": {"type": ["integer", "null"]},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Says\nhow it is.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"properties": {}}}},
]
SYSTEM = {"role": "system", "content": " Be brief; 1 < 2 & 'x'. "}
USER = {"role": "user", "content": "Größe 😀\n\n<b>bold</b> {{ not.a.template }} {% raw %}"}
ANSWER = {"role": "assistant", "content": "<think>\nwell…\n</think>\n\nYes.\n"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}},
}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"°C": 21.5}'}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "many turns": [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "No."}, USER],
    "ends with an answer": [USER, ANSWER],
    "thoughts of their own": [USER, {**ANSWER, "content": "Yes.", "reasoning_content": "Hm.\n"}],
    "call": [SYSTEM, USER, CALLS],
    "call and result": [USER, CALLS, RESULT],
    "two calls, two results, an answer": [SYSTEM, USER, {**CALLS, "tool_calls": [CALL, CALL]}, RESULT, RESULT, ANSWER],
    "call and a word": [
        USER,
        {**CALLS, "content": "Let me look."},
        RESULT,
        {"role": "assistant", "content": "21.5"},
        USER,
    ],
    "call with a text of JSON": [
        USER,
        {**CALLS, "tool_calls": [{**CALL, "function": {"name": "now", "arguments": "{}"}}]},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": "b"}]}
    ],
    "tools in the system message": [{**SYSTEM, "tools": json.dumps(TOOLS)}, USER],
    "empty": [],
    "empty content": [{"role": "user", "content": ""}],
    "no content": [{"role": "user"}],
    "none": [{"role": "assistant", "content": None}],
    "odd role": [{"role": "x y", "content": "z"}],
    "surrounded by space": [{"role": "user", "content": "\u2028\u00a0 \t a \x1c\u3000\n"}],
}


class Generation(jinja2.ext.Extension):
    """The tag that marks answers, in an environment of the test's own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("same"), [], [], body).set_lineno(line)

    def same(self, caller: Any) -> Any:
        return caller()


@cache
def compiled(source: str) -> jinja2.Template:
    """A template, set up as Hugging Face does."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(source)


def oracle(source: str, values: dict[str, Any]) -> str | None:
    """The text that Jinja2 renders from a template; None where it fails."""
    try:
        return compiled(source).render(values)
    except Exception:
        return None


@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["plain", "empty", "tools"])
@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_the_text_is_jinjas(path: Path, tools: list[dict[str, Any]] | None) -> None:
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, bos_token="<|begin|>", eos_token="<|end|>")
    rendered = 0
    for name, messages in CONVERSATIONS.items():
        for prompt in (True, False):
            values: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None}
            values |= {"add_generation_prompt": prompt, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
            expected = oracle(source, values)
            if expected is None:
                with pytest.raises(InvalidInputError, match="the chat template fails: "):
                    template.render(messages, prompt, tools=tools)
            else:
                rendered += 1
                assert template.render(messages, prompt, tools=tools) == expected, name
    assert rendered >= 10


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}",
        "{% set x = 1 %}{% generation %}{{ x }}{% endgeneration %}",
        "{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=true, sort_keys=true) }}",
        "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ x is defined }}{{ x }}",
        "{{ [1.0, 1e16, 10 ** 20, true, none, 'a', ('b',)] }}{{ 7 // 2 }}{{ -7 % 3 }}{{ 1 / 3 }}",
        "{{ 'aBc' | title }}{{ 'a-b' | upper }}{{ 'x<y' | escape }}{{ [3, 1] | sort }}{{ {'b': 1} | dictsort }}",
        "{{ messages | map(attribute='role') | unique | join(',') }}{{ messages | groupby('role') | length }}",
        "{{ lipsum is defined }}{{ cycler(1, 2).next() }}{{ dict(a=1) }}{{ '%-5s|' | format('a') }}",
        "  {%- set a -%} x {%- endset -%} {{ a }}\n  {# c #}\n  {% if a %}\n  y\n  {% endif %}\n",
        "{% for m in messages recursive %}{{ loop.depth }}{{ m.role }}{% endfor %}",
        "{{ '\ud83d\ude00\u2028'|length }}{{ messages[0].content[::-1] }}",
        "{{ messages[0].get('absent', 'd') }}{{ messages[0].items() | list }}{{ messages[0] | items | list }}",
    ],
)
def test_constructs(source: str) -> None:
    values = {"messages": [SYSTEM, USER], "tools": None, "documents": None, "add_generation_prompt": True}
    expected = oracle(source, {**values, "bos_token": "", "eos_token": ""})
    assert expected is not None
    assert ChatTemplate(source).render([SYSTEM, USER]) == expected
