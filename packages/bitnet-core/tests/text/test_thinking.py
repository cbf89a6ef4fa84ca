"""Thoughts are split off answers, wherever the text is cut, and counted; templates are tried for what they do."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.engine.thought import ThoughtControl
from bitnet.core.text.chat import ChatTemplate
from bitnet.core.text.prompt import chat_tokens
from bitnet.core.text.thinking import MARKS, Marks, Piece, Thinking, ThoughtReader, ThoughtSplitter, marks_of
from bitnet.core.text.tokenizer import StreamDecoder, Tokenizer
from bitnet.core.text.vocabulary import TokenType, Vocabulary

QWEN, KIMI = Marks("<think>", "</think>"), Marks("◁think▷", "◁/think▷")
TEMPLATES = Path(__file__).parent / "templates"
ASKED = [{"role": "user", "content": "Why?"}]


@pytest.fixture
def chance() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def oracle(text: str, marks: Marks, opened: bool) -> Piece:
    """Thought and answer of a whole text, by a regular expression."""
    start, end = map(re.escape, marks)
    begun = rf"\s*(?:{start})?" if opened else rf"\s*{start}"
    found = re.fullmatch(rf"{begun}(.*?)(?:{end}\s*(.*))?", text, re.DOTALL)
    return Piece("", text) if found is None else Piece(found[1].strip(), found[2] or "")


def cut(text: str, chance: random.Random) -> list[str]:
    places = sorted(chance.sample(range(len(text) + 1), chance.randrange(min(len(text), 12) + 1)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def any_text(marks: Marks, chance: random.Random) -> str:
    """Text of words, white space, marks, and their parts."""
    parts = ["a", "Größe ", "\n", "  ", "\n\n", "<", "1 < 2", marks.start[:3], marks.end[:-1], *marks, "so 🎉"]
    begin = chance.choice(["", "", "\n", marks.start, f" {marks.start}\n"])
    return begin + "".join(chance.choice(parts) for _ in range(chance.randrange(12)))


def hidden_marks(kind: TokenType, marks: Marks) -> dict[int, str]:
    """The marks that are control tokens, which a text does not show, by their ids in :func:`bytes_tokenizer`."""
    return {258: marks.start, 259: marks.end} if kind is TokenType.CONTROL else {}


def test_a_cut_anywhere_gives_the_same_pieces(chance: random.Random) -> None:
    for _ in range(2000):
        marks, opened = chance.choice(MARKS), chance.random() < 0.5
        text = any_text(marks, chance)
        splitter = ThoughtSplitter(marks, opened=opened)
        pieces = [*map(splitter.push, cut(text, chance)), splitter.end()]
        found = Piece("".join(p.reasoning for p in pieces), "".join(p.text for p in pieces))
        assert found == oracle(text, marks, opened), (text, marks, opened)
        said = [i for i, p in enumerate(pieces) if p.text]
        after = pieces[said[0] + 1 :] if said else []
        assert not any(p.reasoning for p in after), "a thought after its answer"


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nSo.\n</think>\n\nYes.", False, "So.", "Yes."),
        ("So.\n</think>\n\nYes.", True, "So.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>\nSo", False, "So", ""),
        ("Use <think> and </think>.", False, "", "Use <think> and </think>."),
        ("<think>a</think>b<think>c</think>d", False, "a", "b<think>c</think>d"),
        ("<think>So.</think>", True, "So.", ""),
        ("<think>a <think> b</think>c", False, "a <think> b", "c"),
        ("\n\nYes.", False, "", "\n\nYes."),
        ("<thi", False, "", "<thi"),
        ("So </th", True, "So </th", ""),
        ("", True, "", ""),
    ],
)
def test_what_is_a_thought(text: str, opened: bool, reasoning: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        splitter = ThoughtSplitter(QWEN, opened=opened)
        found = [*map(splitter.push, pieces), splitter.end()]
        assert ("".join(p.reasoning for p in found), "".join(p.text for p in found)) == (reasoning, answer)


class Words:
    """Decodes token ``i`` to the i-th of some texts."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def push(self, *tokens: int) -> str:
        return "".join(self._words[token] for token in tokens)

    def lacks(self, character: str, tokens: Sequence[int]) -> bool:
        return not any(character in self._words[token] for token in tokens)

    def flush(self) -> str:
        return ""


def test_tokens_of_the_thought_are_counted(chance: random.Random) -> None:
    """A token counts if it has a character between the marks."""
    for _ in range(1000):
        opened = chance.random() < 0.5
        text = any_text(QWEN, chance)
        words = cut(text, chance)
        first = re.match(r"\s*<think>", text)
        begin = first.end() if first else 0 if opened else None
        end = text.find("</think>", begin) if begin is not None else -1
        end = len(text) if end < 0 else end
        expected = at = 0
        for word in words:
            inside = begin is not None and at < end and (at + len(word) > begin if word else at >= begin)
            expected += inside
            at += len(word)
        if any(not word for word in words):
            continue  # an empty token beside a mark is in it or not
        reader = ThoughtReader(Thinking(QWEN, opened, (0,), None, {}), Words(words))
        places = sorted(chance.choices(range(len(words)), k=2))
        for begin, stop in zip([0, *places], [*places, len(words)], strict=True):
            reader.push(range(begin, stop))
        reader.end()
        assert reader.tokens == expected, (words, opened)


@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED])
def test_tokens_are_read_together_as_they_are_one_by_one(kind: TokenType, chance: random.Random) -> None:
    """Bytes of characters and of marks are spread over tokens, and tokens over batches."""
    tokenizer = bytes_tokenizer(kind, *QWEN)
    ids = byte_ids(tokenizer)
    parts = [ids[byte] for byte in "◁ ".encode()]
    hidden = hidden_marks(kind, QWEN)
    for _ in range(500):
        thinking = Thinking(QWEN, chance.random() < 0.7, (259,), 258, hidden)
        tokens = chance.choices([258], k=chance.randrange(2))
        for _ in range(chance.randrange(6)):
            tokens += tokenizer.encode(any_text(QWEN, chance), add_special=False)
            tokens += chance.choices([259, 256, *parts], k=chance.randrange(3))
        together, single = (ThoughtReader(thinking, StreamDecoder(tokenizer)) for _ in range(2))
        single.push_thought = lambda tokens: None  # type: ignore[method-assign]
        left = [*tokens]
        while left:
            size = chance.randrange(1, 17)
            some, left = left[:size], left[size:]
            pieces = [single.push([token]) for token in some]
            assert together.push(some) == joined(pieces), (tokens, thinking)
            assert (together.tokens, together.inside, together.over, together.before) == (
                (single.tokens, single.inside, single.over, single.before)
            ), (tokens, thinking)
        assert (together.end(), together.before) == (single.end(), single.before)


@pytest.mark.parametrize("marks", [QWEN, KIMI])
@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED])
def test_a_thought_ends_at_the_same_token_whether_or_not_its_text_is_decoded(
    marks: Marks, kind: TokenType, chance: random.Random
) -> None:
    tokenizer = bytes_tokenizer(kind, *marks)
    ids = byte_ids(tokenizer)
    parts = [ids[byte] for byte in f"{marks.end} a".encode()]
    hidden = hidden_marks(kind, marks)
    skipped = 0
    for _ in range(500):
        thinking = Thinking(marks, True, (259,), 258, hidden)
        tokens = chance.choices([258], k=chance.randrange(2))
        for _ in range(chance.randrange(6)):
            tokens += tokenizer.encode(any_text(marks, chance), add_special=False)
            tokens += chance.choices([259, 256, *parts], k=chance.randrange(3))
        skips, single = (ThoughtReader(thinking, StreamDecoder(tokenizer)) for _ in range(2))
        single.push_thought = lambda tokens: None  # type: ignore[method-assign]
        left = [*tokens]
        while left:
            size = chance.randrange(1, 9)
            some, left = left[:size], left[size:]
            if skips.skip_thought(some):
                skipped += 1
            else:
                skips.push(some)
            for token in some:
                single.push([token])
            assert (skips.inside, skips.over) == (single.inside, single.over), (tokens, thinking)
            assert not skips.inside or skips.tokens == single.tokens, (tokens, thinking)
    assert skipped > 100


@pytest.mark.parametrize("thought_only", [False, True])
@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED])
def test_tokens_are_taken_in_together_up_to_the_budget_or_the_end(
    kind: TokenType, thought_only: bool, chance: random.Random
) -> None:
    tokenizer = bytes_tokenizer(kind, *QWEN)
    hidden = hidden_marks(kind, QWEN)
    thinking = Thinking(QWEN, True, (259,), 258, hidden)
    early = 0
    for _ in range(500):
        tokens = []
        for _ in range(chance.randrange(1, 6)):
            tokens += tokenizer.encode(any_text(QWEN, chance), add_special=False)
            tokens += chance.choices([259, 256], k=chance.randrange(2))
        budget = chance.randrange(2 * len(tokens) + 1)
        control = ThoughtControl(thinking, StreamDecoder(tokenizer), budget=budget, constrained=False)
        single, begun = ThoughtReader(thinking, StreamDecoder(tokenizer)), 0
        while begun < len(tokens) and not control.forced and (single.inside or not thought_only):
            some = tokens[begun : begun + chance.randrange(1, 10)]
            wanted = 0
            for token in some:
                wanted += 1
                was_over = single.over
                single.push([token])
                spent = single.inside and single.tokens >= budget
                if not was_over and (spent or (thought_only and not single.inside)):
                    break
            assert control.accept_some(some, thought_only=thought_only) == wanted, (tokens, budget)
            assert bool(control.forced) == (single.inside and single.tokens >= budget), (tokens, budget)
            assert control.over == single.over, (tokens, budget)
            begun += wanted
            early += wanted < len(some)
    assert early > 20


def test_a_decoder_knows_which_characters_cannot_come(chance: random.Random) -> None:
    tokenizer = bytes_tokenizer(TokenType.CONTROL, *KIMI)
    ids, lacked = byte_ids(tokenizer), 0
    for _ in range(1000):
        character = chance.choice("<[◁é😀")
        decoder, written = StreamDecoder(tokenizer), b""
        while len(written) < 40:
            data = bytes(chance.choice(b"a " + "<[◁é😀".encode()) for _ in range(chance.randrange(1, 6)))
            some = [ids[byte] for byte in data]
            some[chance.randrange(len(some)) : 0] = [258] * chance.randrange(2)  # a mark's token, which is hidden
            lacks = decoder.lacks(character, some)
            before = written.decode(errors="replace").count(character)
            written += data
            decoder.push(*some)
            lacked += lacks
            # Decoded at once, a character that is not complete yet is U+FFFD.
            assert not lacks or written.decode(errors="replace").count(character) == before, (written, some)
    assert lacked > 1000


def joined(pieces: Sequence[Piece]) -> Piece:
    return Piece("".join(p.reasoning for p in pieces), "".join(p.text for p in pieces))


def test_marks_that_are_control_tokens_are_seen() -> None:
    words = ["", "So.", "", "Yes."]  # decoders leave control tokens out
    reader = ThoughtReader(Thinking(QWEN, False, (2,), 0, {0: "<think>", 2: "</think>"}), Words(words))
    assert (reader.push([0, 1, 2, 3]), reader.tokens) == (Piece("So.", "Yes."), 1)


def bytes_tokenizer(kind: TokenType, *names: str) -> Tokenizer:
    """A byte-level tokenizer without merges, and with more tokens of a kind."""
    from bitnet.core.text.words import byte_characters

    tokens = [*byte_characters().values(), "<|im_start|>", "<|im_end|>", *names]
    kinds = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2 + [kind] * len(names)
    return Tokenizer(Vocabulary("gpt2", tokens, [int(k) for k in kinds], [], [], pre="qwen2", eos_id=257))


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte. Their order is not that of the bytes."""
    return {tokenizer.token_bytes(id)[0]: id for id in range(256)}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is defined and not loop.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
OPENS = CHATML + "<think>\n{% endif %}"
SWITCHED = CHATML + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
SILENT = CHATML + "{% endif %}"


@pytest.mark.parametrize("kind", [TokenType.USER_DEFINED, TokenType.CONTROL, None])
@pytest.mark.parametrize(
    ("source", "opened", "off"),
    [
        (OPENS, True, "<think>\n\n</think>\n\n"),
        (SWITCHED, True, "<think>\n\n</think>\n\n"),
        (SILENT, False, "<think>\n\n</think>\n\n"),
        ((TEMPLATES / "qwen3.jinja").read_text(), False, "<think>\n\n</think>\n\n"),
    ],
    ids=["opens", "switched", "silent", "qwen3"],
)
def test_a_prompt_opens_a_thought_or_closes_it(source: str, opened: bool, off: str, kind: TokenType | None) -> None:
    tokenizer = bytes_tokenizer(kind, *QWEN) if kind else bytes_tokenizer(TokenType.NORMAL)
    template = ChatTemplate(source)
    assert template.thinking is not None
    for thinks in (None, True):
        made = chat_tokens(template, tokenizer, ASKED, thinks=thinks)
        assert made.thinking is not None
        assert made.thinking.opened == opened
        text = tokenizer.decode(made, skip_special=False)
        assert text.endswith("assistant\n<think>\n" if opened else "assistant\n")
    made = chat_tokens(template, tokenizer, ASKED, thinks=False)
    assert tokenizer.decode(made, skip_special=False).endswith(f"<|im_start|>assistant\n{off}")
    assert made.thinking is not None
    assert not made.thinking.opened
    assert (made.thinking.start_token is None) == (kind is None)
    if kind:
        assert list(made.thinking.end_tokens) == [259]
        assert 259 in made  # not spelled out


def test_a_mark_in_a_message_opens_nothing() -> None:
    template = ChatTemplate("{{ messages[-1].content }}{# </think> #}")
    tokenizer = bytes_tokenizer(TokenType.USER_DEFINED, *QWEN)
    made = chat_tokens(template, tokenizer, [{"role": "user", "content": "What is <think>"}])
    assert made.thinking is not None
    assert not made.thinking.opened


def test_an_answer_that_is_continued_is_text_unless_its_thought_is_open() -> None:
    template, tokenizer = ChatTemplate(SILENT), bytes_tokenizer(TokenType.USER_DEFINED, *QWEN)

    def continued(text: str) -> Any:
        said = [*ASKED, {"role": "assistant", "content": text}]
        return chat_tokens(template, tokenizer, said, continued=True).thinking

    assert continued("Because") is None
    assert continued("<think>So.</think>Because") is None
    assert continued("<think>So").opened


def test_a_template_without_marks_has_no_thoughts() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.thinking is None
    assert chat_tokens(template, bytes_tokenizer(TokenType.NORMAL), ASKED).thinking is None
    assert [marks_of(f"… {marks.end} …") for marks in MARKS] == list(MARKS)


@pytest.mark.parametrize(
    ("check", "efforts"),
    [
        ("{{ reasoning_effort }}", {effort: effort for effort in ("minimal", "low", "medium", "high", "xhigh", "max")}),
        (
            "{% if reasoning_effort|default('xhigh') not in ['xhigh', 'medium', 'low'] %}{{ raise_exception('no') }}"
            "{% endif %}{{ 'Think ' + reasoning_effort if reasoning_effort == 'low' }}",
            {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh"},
        ),
        ("", {}),
    ],
    ids=["any", "qwen3.8", "none"],
)
def test_efforts_are_those_that_the_template_takes(check: str, efforts: dict[str, str]) -> None:
    template = ChatTemplate(f"{check}{{{{ messages[0].content }}}}{{# </think> #}}")
    assert template.thinking is not None
    assert template.thinking.efforts == efforts


def test_deepseeks_switch_is_found() -> None:
    source = "{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}"
    switch = ChatTemplate(source).thinking
    assert switch is not None
    assert (switch.variable, switch.opens) == ("thinking", False)


def test_a_template_that_refuses_one_message_still_has_its_marks() -> None:
    refuses = "{% if messages|length < 2 %}{{ raise_exception('two') }}{% endif %}"
    source = refuses + "{{ messages[1].content }}<think>{# </think> #}"
    template = ChatTemplate(source)
    made = chat_tokens(template, bytes_tokenizer(TokenType.NORMAL), [*ASKED, *ASKED])
    assert made.thinking is not None
    assert made.thinking.opened
