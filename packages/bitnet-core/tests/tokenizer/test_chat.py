"""Chat templates: Hugging Face's conventions, and templates that mean harm."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from bitnet.core.chat import ChatTemplate
from bitnet.core.errors import InvalidInputError

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


GROW = "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = EXPRESSION %}{% endfor %}"
HARM = {
    "attribute": "{{ ''.__class__.__mro__ }}",
    "attribute by name": "{{ messages['__class__'].mro() }}",
    "attribute filter": "{{ (messages | attr('__class__')).__base__ }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "change of the messages": "{{ messages.append(1) }}",
    "import": "{% import 'os' as os %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop that writes": "{% for i in range(99999) %}" + "x" * 50_000 + "{% endfor %}",
    "loop in a block": "{% set x %}{% for i in range(99999) %}" + "x" * 50_000 + "{% endfor %}{% endset %}",
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for i in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "multiplied text": "{{ 'x' * 10 ** 10 }}",
    "multiplied text in a variable": "{% set a = 'x' * 10 ** 10 %}",
    "multiplied list": "{{ [1] * 10 ** 10 }}",
    "multiplied by method": "{{ 'x'.__mul__(10 ** 10) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "repeated squares": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "centre": "{{ 'x' | center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "star width": "{{ '%*d' % (9999999999, 1) }}",
    "format width": "{{ '{:9999999999}'.format(1) }}",
    "nested format width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format_map": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "indent": "{{ ('x\n' * 9999) | indent(10 ** 9) }}",
    "replace": "{{ ('x' * 9999999) | replace('x', 'y' * 9999999) }}",
    "join": "{{ ('x' * 9999999) | join('y' * 9999999) }}",
    "join method": "{{ ('y' * 9999999).join('x' * 9999999) }}",
    "expandtabs": "{{ ('\t' * 9999).expandtabs(10 ** 9) }}",
    "bytes of a number": "{{ (5).to_bytes(10 ** 10, 'big') }}",
    "json indent": "{{ [[1]] | tojson(indent=10 ** 10) }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 10, 'x') | list }}",
    "lorem ipsum": "{{ lipsum(n=10 ** 9) }}",
    "text doubled by +": GROW.replace("EXPRESSION", "ns.s + ns.s"),
    "text doubled by ~": GROW.replace("EXPRESSION", "ns.s ~ ns.s"),
    "text doubled by blocks": "{% set s = 'xx' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 99,
    "text doubled by format": "{% set s = 'xx' %}" + "{% set s = '%s%s' % (s, s) %}" * 99,
    "list doubled": "{% set l = [1] %}" + "{% set l = l + l %}" * 99,
    "lists in lists": "{% set l = [1] %}" + "{% set l = [l, l] %}" * 99 + "{{ l }}",
    "lists in lists as JSON": "{% set l = [1] %}" + "{% set l = [l, l] %}" * 99 + "{{ l | tojson }}",
    "lists in lists as text": "{% set l = [1] %}" + "{% set l = [l, l] %}" * 99 + "{{ l ~ 'x' }}",
    "mappings in mappings": "{% set l = 1 %}" + "{% set l = {'a': l, 'b': l} %}" * 99 + "{{ l | string }}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long source": "x" * 200_000,
}


@pytest.mark.parametrize("source", HARM.values(), ids=HARM.keys())
def test_harm(source: str) -> None:
    """Each ends in one typed error, and soon."""
    begin = time.perf_counter()
    with pytest.raises(InvalidInputError, match="the chat template"):
        render(source)
    assert time.perf_counter() - begin < 20  # on a busy machine; without the bounds it takes hours


@pytest.mark.skipif(sys.platform == "win32", reason="peak memory is not measured on Windows")
def test_harm_takes_little_memory() -> None:
    program = """
import json, resource, sys
from bitnet.core.chat import ChatTemplate
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
for source in json.load(sys.stdin):
    try:
        ChatTemplate(source).render([])
    except ValueError:
        pass
print(peak() - before)
"""
    sources = json.dumps([source.replace("messages", "[1]") for source in HARM.values()])
    done = subprocess.run([sys.executable, "-c", program], input=sources, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 700e6


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
