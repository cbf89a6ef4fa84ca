"""Chat templates: Hugging Face's conventions, and malicious templates."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.text.chat import ChatTemplate

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What is 1 < 2 & 'x'?"},
    {"role": "assistant", "content": "True."},
    {"role": "user", "content": "Größe 😀"},
]


def test_bitnets_own_template() -> None:
    source = (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = message['role'] | capitalize + ': '+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    )
    template = ChatTemplate(source, bos_token="<|begin|>", eos_token="<|end|>")
    expected = (
        "<|begin|>System: Be brief.<|eot_id|>User: What is 1 < 2 & 'x'?<|eot_id|>"
        "Assistant: True.<|eot_id|>User: Größe 😀<|eot_id|>"
    )
    assert template.render(MESSAGES) == expected + "Assistant: "
    assert template.render(MESSAGES, add_generation_prompt=False) == expected


def render(source: str, **message: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render([{"role": "user", "content": "c", **message}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),  # trim_blocks
        ("  {% if true %}x{% endif %}", "x"),  # lstrip_blocks
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),  # loop controls
        ("{{ {'b': 'ä<', 'a': [1, none]} | tojson }}", '{"b": "ä<", "a": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ bos_token ~ messages[0].content ~ 1 ~ eos_token }}", "<s>c1</s>"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') + m('b') }}", "[a][b]"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}", "1True1"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=c;"),
        ("{% for m in messages if m.role == 'x' %}a{% else %}none{% endfor %}", "none"),
        ("{% for m in absent %}a{% else %}none{% endfor %}", "none"),
        ("{{ 'a,b'.split(',')[1] }}{{ ' x '.strip() }}{{ 'abc'[::-1] }}{{ 'x' * 3 }}", "bxcbaxxx"),
        ("{{ 'a' if messages[0]['role'] == 'user' else 'b' }}{{ messages[0].absent is defined }}", "aFalse"),
        ("{{ '%s-%d' % ('a', 3) }}{{ '{}{:>3}'.format('b', 1) }}{{ 2 ** 10 }}", "a-3b  11024"),
        ("{{ messages | map(attribute='role') | join(', ') }}{{ messages | length }}", "user1"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a b' | replace(' ', '_') | upper | default('z') }}", "A_B"),
        ("{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}", "c!"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_time_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidInputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' ", "{% nothing %}", "{{ a | nothing }}", "{% include 'x' %}"])
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(InvalidInputError, match="the chat template"):
        render(source)


def test_text_that_looks_like_a_format() -> None:
    assert render("{{ messages[0].content | trim | replace('x', 'y') }}", content="100% * 12345 {a:99999} ") == (
        "100% * 12345 {a:99999}"
    )


def test_long_conversations_are_no_harm() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content | trim }}\n"
        "{% else %}{{ 'A: ' ~ m['content'].split('</think>')[-1].strip() + eos_token }}\n{% endif %}{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 400} for i in range(300)]
    assert len(ChatTemplate(source).render(messages)) > 500_000


def test_many_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    results: dict[int, bool] = {}

    def work(n: int) -> None:
        text = str(n) * 50
        results[n] = all(template.render([{"role": "user", "content": text}]) == text for _ in range(50))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(8), True)
