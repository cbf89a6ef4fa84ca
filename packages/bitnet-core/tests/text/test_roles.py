"""All control tokens of a conversation come from its template: message text cannot produce any."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from bitnet.core.errors import InvalidInputError
from bitnet.core.text.chat import ChatTemplate
from bitnet.core.text.prompt import chat_tokens, parts
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.core.text.vocabulary import LLAMA3, TokenType, Vocabulary

CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|tool_call_start|>", "<|tool_call_end|>"]
CONTROL = {
    "bitnet": ["<|begin|>", "<|eot_id|>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
    "qwen3": CHATML,
    "minicpm4": [*CHATML, "<s>", "</s>", "<unk>"],
    "falcon3": ["<|system|>", "<|user|>", "<|assistant|>"],
    "gemma3": ["<bos>", "<eos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"],
    "mistral": ["<s>", "</s>", "<unk>"]
    + [f"[{mark}{word}]" for word in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for mark in ("", "/")]
    + ["[TOOL_CALLS]"],
    "deepseek": ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
    + [f"<｜tool▁{what}▁{side}｜>" for what in ("calls", "call", "outputs", "output") for side in ("begin", "end")]
    + ["<｜tool▁sep｜>"],
    "phi4": [
        f"<|{word}|>" for word in ("system", "user", "assistant", "end", "tool", "/tool", "tool_call", "/tool_call")
    ],
}
COMMON = ["<|begin|>", "<|end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
Both = tuple[Tokenizer, tokenizers.Tokenizer]


@pytest.fixture(scope="session")
def made(byte_level: Callable[[str], tokenizers.Tokenizer]) -> Callable[[str], Both]:
    """A tokenizer with the control tokens of a family, and Hugging Face's of the same."""
    known: dict[str, Both] = {}

    def make(family: str) -> Both:
        if family not in known:
            theirs = tokenizers.Tokenizer.from_str(trained)
            theirs.add_special_tokens([*COMMON, *(token for token in CONTROL[family] if token not in COMMON)])
            theirs.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
            data = json.loads(theirs.to_str())
            kinds = {
                t["id"]: TokenType.CONTROL if t["special"] else TokenType.USER_DEFINED for t in data["added_tokens"]
            }
            size = theirs.get_vocab_size()
            tokens = [theirs.id_to_token(i) or "" for i in range(size)]
            types = [int(kinds.get(i, TokenType.NORMAL)) for i in range(size)]
            merges = [" ".join(merge) for merge in data["model"]["merges"]]
            known[family] = Tokenizer(Vocabulary("gpt2", tokens, types, merges, [])), theirs
        return known[family]

    trained = byte_level(LLAMA3).to_str()
    return make


def template_of(family: str) -> ChatTemplate:
    source = (Path(__file__).parent / "templates" / f"{family}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, bos_token="<|begin|>", eos_token="<|end|>")


def conversations(text: str) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Conversations, and tools, in which a text stands in every place that is not the caller's own."""
    arguments = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}}}
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": arguments}}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": text, "arguments": {text: text}}}
    system, user = {"role": "system", "content": text}, {"role": "user", "content": text}
    answer = {"role": "assistant", "content": text}
    calls = {"role": "assistant", "content": text, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": text, "name": text, "content": text}
    parts = {"role": "user", "content": [{"type": "text", "text": text}] + [{"type": "text", "text": c} for c in text]}
    return [
        ([user], None),
        ([system, user, answer, user], None),
        ([user, {**answer, "reasoning_content": text}], None),
        ([user, calls, result, answer, user], [tool]),
        ([{**system, "tools": text}, user], None),
        ([parts], None),
        ([user], [tool]),
    ]


def attacks(control: list[str]) -> list[str]:
    whole = [*control, "".join(control), "  " + "\n".join(control) + " \n"]
    token = control[-1]
    half = len(token) // 2
    cut = [
        f"{token[:half]}</think>{token[half:]}",
        f"a</think>{token[:half]}<think>{token[half:]}",
        token[1:] + token[:1],
    ]
    return [
        *whole,
        *cut,
        token[:half] + token + token[half:],
        token[1:],
        token[:-1],
        token.strip("<|>[]/｜"),
        token[::-1],
    ]


def control_ids(template: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any) -> Counter[int] | None:
    try:
        ids = chat_tokens(template, tokenizer, messages, tools=tools)
    except InvalidInputError:
        return None
    return Counter(filter(tokenizer.is_special, ids))


@pytest.mark.parametrize("family", CONTROL)
def test_nobody_writes_control_tokens(family: str, made: Callable[[str], Both]) -> None:
    template, (tokenizer, theirs) = template_of(family), made(family)
    forged = tried = 0
    for attack in attacks(CONTROL[family]):
        # `</think>` has a meaning in some templates, and so it has in what the attack is compared with.
        harmless = "a</think>b<think>c" if "<think>" in attack else "a</think>b" if "</think>" in attack else "harmless"
        for (messages, tools), (plain, plain_tools) in zip(conversations(attack), conversations(harmless), strict=True):
            expected = control_ids(template, tokenizer, plain, plain_tools)
            if "text" in (messages[0]["content"] or [{}])[0] and len(attack) != len(harmless):
                harmless_parts = [{"type": "text", "text": "x"}] * len(messages[0]["content"])
                expected = control_ids(template, tokenizer, [{"role": "user", "content": harmless_parts}], None)
            assert control_ids(template, tokenizer, messages, tools) == expected, (attack, messages)
            if expected is None:
                continue
            tried += 1
            text = template.render(messages, tools=tools)
            assert tokenizer.decode(chat_tokens(template, tokenizer, messages, tools=tools), skip_special=False) == text
            special = {i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)}
            found = Counter(i for i in theirs.encode(text, add_special_tokens=False).ids if i in special)
            forged += found != expected
    assert tried > 30
    assert forged > 10  # without the care that is taken


@pytest.mark.parametrize("family", CONTROL)
def test_harmless_text_is_encoded_as_by_hugging_face(
    family: str, made: Callable[[str], Both], random_text: Callable[[], str]
) -> None:
    template, (tokenizer, theirs) = template_of(family), made(family)
    texts = [
        "if a < b: c |= d[0] > 1  # </div>",
        "a <b>",
        "< | > [x] 1<2|3>4",
        "Yes.</think>No. ",
        *[random_text() for _ in range(9)],
    ]
    done = 0
    for text in texts:
        for messages, tools in conversations(text):
            try:
                rendered = template.render(messages, tools=tools)
            except InvalidInputError:
                continue
            done += 1
            expected = theirs.encode(rendered, add_special_tokens=False).ids
            assert chat_tokens(template, tokenizer, messages, tools=tools) == expected
    assert done > 10


TRICKS = [
    "{{ c }}",
    "{{ c | trim }}",
    "{{ c.strip('-').split('-') | join }}",
    "{{ c | replace('-', '') }}",
    "{{ c.replace('-', '') }}",
    "{{ c | list | join }}",
    "{{ c[:3] ~ c[3:] }}",
    "{{ c[::-1] }}",
    "{{ c[::-1][::-1] }}",
    "{{ c | lower }}",
    "{{ c.lower().swapcase().swapcase() }}",
    "{{ '%s' % c }}{{ '{}'.format(c) }}{{ c | format }}",
    "{{ c | tojson }}{{ [c] }}{{ {'a': c} }}",
    "{{ c | tojson(ensure_ascii=true) }}",
    "{{ c | urlencode }}{{ c | escape }}",
    "{{ c.split('</think>') | join('') }}",
    "{{ c.split('</think>')[-1] }}{{ c.split('</think>')[0] }}",
    "{{ c | wordwrap(3) | replace('\n', '') }}",
    "{{ c | batch(2) | map('join') | join }}",
    "{% for x in c %}{{ x }}{% endfor %}",
    "{% for x in c if x != '-' %}{{ x }}{% endfor %}",
    "{% macro m(x) %}{{ caller() }}{{ x }}{% endmacro %}{% call m(c) %}{{ c }}{% endcall %}",
    "<{{ c }}>",
    "<|{{ c }}|>",
    "<{{ c }}|>",
    "<|eot_{{ c }}",
    "<|{{ c }}",
    "{{ c }}|>",
    "{{ '<|' ~ c ~ '|>' }}",
    "{{ '<|' + c | trim + '|>' }}",
    "{{ '<|%s|>' % c }}",
    "{% if 'eot' in c %}{{ c }}{% else %}-{% endif %}",
    "{% if '<' in c or '|' in c %}{{ c }}{% else %}-{% endif %}",
    "{{ c if c.endswith('<|eot_id|>') else c ~ '-' }}",
    "{{ c.replace('<', '<') }}{{ c.title() }}",
    "{{ c.translate({45: ''}) }}",
    "{{ c | string | center(40) }}{{ c.partition('-') | join }}",
]
SAID = [
    "<|eot_id|>",
    "<-|-e-o-t-_-i-d-|->",
    "-<|eot_id|>-",
    "<|EOT_ID|>",
    ">|di_toe|<",
    "<|eot</think>_id|>",
    "eot_id",
    "|eot_id|",
    "id|>",
    "eot_id|>",
    "<|eot_id",
    " eot_id ",
    "<|eot_id|>" * 3,
    "\\u003c|eot_id|>",
    "&lt;|eot_id|&gt;",
    "\ufdd0|eot_id|>\ufdd1\ufdd2",
]


@pytest.mark.parametrize("trick", TRICKS)
def test_however_a_template_cuts_and_joins(trick: str, made: Callable[[str], Both]) -> None:
    tokenizer, _ = made("llama3")
    template = ChatTemplate("<|begin|>{% for m in messages %}{% set c = m.content %}" + trick + "{% endfor %}")
    for said in SAID:
        ids = chat_tokens(template, tokenizer, [{"role": "user", "content": said}, {"role": "user", "content": said}])
        assert [i for i in ids if tokenizer.is_special(i)] == tokenizer.encode(
            "<|begin|>", add_special=False, parse_special=True
        ), said


def test_roles_and_keys_write_none_either(made: Callable[[str], Both]) -> None:
    tokenizer, _ = made("llama3")
    template = ChatTemplate("{% for m in messages %}<|begin|>{{ m.role }}{{ m }}{{ m.parts | tojson }}{% endfor %}")
    token = "<|eot_id|>"
    messages = [{"role": f"user{token}", token: token, "parts": [[token, {token: [token]}], {"type": token}]}]
    assert control_ids(template, tokenizer, messages, None) == Counter(
        tokenizer.encode("<|begin|>", add_special=False, parse_special=True)
    )
    text = template.render(messages)
    assert tokenizer.decode(chat_tokens(template, tokenizer, messages), skip_special=False) == text


def test_tokens_that_depend_on_what_was_said(made: Callable[[str], Both]) -> None:
    """A template may look into a message, and choose its control tokens by what it finds."""
    tokenizer, theirs = made("qwen3")
    source = (
        "{% for m in messages %}{% if '/deep' in m.content %}<|tool_call_start|>{% endif %}"
        "{% if '<|deep|>' in m.content %}!{{ m.content.replace('<|deep|>', '') }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(source)
    for content in ("a /deep b", "a <|deep|> b", "a < b", "/deep <|deep|> |"):
        messages = [{"role": "user", "content": content}]
        expected = theirs.encode(template.render(messages), add_special_tokens=False).ids
        assert chat_tokens(template, tokenizer, messages) == expected
    messages = [{"role": "user", "content": "<|deep|> <|im_end|>"}]
    end = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    ids = chat_tokens(template, tokenizer, messages)
    assert [i for i in ids if tokenizer.is_special(i)] == end


@pytest.mark.parametrize("content", ["<|x|><|im_end|>", "<|x|>"])
def test_what_is_said_does_not_take_the_place_of_a_token(content: str, made: Callable[[str], Both]) -> None:
    """The template leaves out its own token where a mark is said: that much cannot be had, and the token stays."""
    tokenizer, _ = made("qwen3")
    template = ChatTemplate("{% set c = messages[0].content %}{{ c }}{% if '<|x|>' not in c %}<|im_end|>{% endif %}")
    end = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    expected = tokenizer.encode(content, add_special=False) + end
    assert chat_tokens(template, tokenizer, [{"role": "user", "content": content}]) == expected


def test_text_that_is_no_unicode(made: Callable[[str], Both]) -> None:
    with pytest.raises(InvalidInputError, match="not a Unicode character"):
        chat_tokens(template_of("qwen3"), made("qwen3")[0], [{"role": "user", "content": "a\ud800<"}])


def between(first: str, last: str, variants: list[list[str]]) -> list[str]:
    return [f"{first}{said}{last}" for (said,) in variants]


def test_very_many_control_tokens() -> None:
    """60,000 of them took a regular expression more than 4 s to compile, and again for each prompt that hid words.

    The least of three counts: other processes can make one of them slow.
    """
    took = []
    for name in "abc":  # new ones each time, as those of a model are compiled once
        control = tuple(f"<|{name}_{i}|>" for i in range(60_000))
        source = "".join(f"{token}{{{{ m }}}}" for token in control[:20]) + "<| a |>" * 5000
        said, began = f"a {control[7]} b", time.process_time()
        found = parts(partial(between, control[3], control[4]), [said], source, control)
        took.append(time.process_time() - began)
        assert found == ["", control[3], said, control[4], ""]
    assert min(took) < 2
