"""The tokens of a conversation: only the template's own text becomes control tokens, never the messages.

If messages contain characters that occur in control tokens, the template is rendered again with each of these
characters replaced by one that no text contains. All control tokens in that rendering are the template's, however it
cuts, trims and joins messages. Then the characters are restored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from bitnet.core.errors import InvalidInputError
from bitnet.core.text import sandbox
from bitnet.core.text.chat import ChatTemplate, Message
from bitnet.core.text.literals import Literals
from bitnet.core.text.thinking import Thinking, thinking_of
from bitnet.core.text.tokenizer import Tokenizer

STRUCTURE = frozenset({"role", "type"})
"""Keys whose values templates compare with fixed words and write next to the marks of control tokens."""

_WORD = re.compile(r"\w+")
_CODES = (range(0xFDD0, 0xFDF0), range(0x100000, 0x10FFFE))  # Unicode's noncharacters, then a private plane


class ChatTokens(list[int]):
    """Token ids of a conversation.

    Attributes:
        thinking: How a thought is marked in the answer; None: all of the answer is text.
    """

    def __init__(self, tokens: Iterable[int], thinking: Thinking | None = None) -> None:
        super().__init__(tokens)
        self.thinking = thinking


def chat_tokens(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    continued: bool = False,
    thinks: bool | None = None,
) -> ChatTokens:
    """Token ids of a conversation, up to where the assistant's answer begins.

    Args:
        messages: As for :meth:`~bitnet.core.text.chat.ChatTemplate.render`, like ``tools`` and ``variables``.
        continued: End with the text of the last message, for the model to continue it.
        thinks: Whether the model may think before its answer; None: as the template and ``variables`` have it. Where
            the template cannot be told not to, the prompt ends with an empty thought.

    Raises:
        InvalidInputError: The template refuses the messages, or a text contains a lone surrogate.
    """
    made, thinking = chat_parts(template, tokenizer, messages, tools, variables or {}, continued, thinks)
    return ChatTokens(tokenizer.encode_parts(made), thinking)


def chat_parts(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    continued: bool,
    thinks: bool | None,
) -> tuple[list[str], Thinking | None]:
    """A conversation's prompt as alternating text and control tokens, and how a thought is marked in the answer.

    For arguments and errors see :func:`chat_tokens`.
    """
    switch = template.thinking
    if switch is not None and thinks is not None:
        variables = {**variables, **switch.variables(thinks)}
    made = _prompt_parts(template, tokenizer, messages, tools, variables, continued)
    if switch is None:
        return made, None
    marks = switch.marks
    if continued:
        said = messages[-1]["content"]
        opened = said.rfind(marks.start) > said.rfind(marks.end)
        return made, thinking_of(marks, tokenizer, opened=True) if opened else None
    opened = switch.opened_by("".join(made[-5:]))
    if opened and not switch.opens and _text(messages[-1]).rstrip().endswith(marks.start):
        opened = False  # the mark is the message's, after which the template has written nothing
    if thinks is False and (opened or switch.variable is None):
        for text in ("\n",) if opened else (marks.start, "\n\n"):
            _write(made, text, tokenizer)
        for text in (marks.end, "\n\n"):
            _write(made, text, tokenizer)
        opened = False
    return made, thinking_of(marks, tokenizer, opened=opened)


def _write(made: list[str], text: str, tokenizer: Tokenizer) -> None:
    """Add a text or a control token to the parts of a prompt."""
    if text in tokenizer.control_tokens:
        made += [text, ""]
    else:
        made[-1] += text


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "".join(_texts(content))


def _prompt_parts(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    continued: bool,
) -> list[str]:
    """The prompt as alternating text and control tokens."""
    control = tokenizer.control_tokens
    if not continued:
        return parts(template.render_each, [messages, tools, variables], template.source, control)
    *before, last = messages
    written = sandbox.as_json([messages, tools, variables, template.source])
    end = next(c for c in map(chr, range(0x10FFFD, 0x100000, -1)) if c not in written and _escaped(c) not in written)
    said = [[*before, {**last, "content": last["content"] + end}], tools, variables]
    made = parts(lambda each: template.render_each(each, False), said, template.source, control)
    at = next((i for i in range(len(made) - 1, -1, -2) if end in made[i]), None)
    if at is None:
        raise InvalidInputError(
            "the chat template does not write the last message as it is, so it cannot be continued.",
            hint="End the conversation with the user's message.",
        )
    return [*made[:at], made[at].rpartition(end)[0]]


def parts(
    render: Callable[[Sequence[Any]], Sequence[str | None]], said: Any, source: str, control: tuple[str, ...]
) -> list[str]:
    """A template's output as alternating text and control tokens; the first and the last are text.

    Args:
        render: Returns the template's output for each of several variants of ``said``; None for a refused one.
        said: Mappings and lists of strings that, including keys, must not become control tokens.
        source: The template.
        control: The control tokens.
    """
    written = sandbox.as_json(said)
    said = json.loads(written)
    masks, split = _masks(control, source)
    hidings = [_Hiding(mask, source + written) for mask in masks]
    variants = [hiding.hide(said) for hiding in hidings]
    plain, *texts = render([said, *(variant for variant in variants if variant != said)])
    assert plain is not None
    left = iter(texts)
    found = []
    for hiding, variant in zip(hidings, variants, strict=True):
        text = plain if variant == said else next(left)
        if text is None:  # the template refuses the replaced text
            continue
        found.append(split(text))
        found[-1][::2] = map(hiding.show, found[-1][::2])
    if not found:
        raise InvalidInputError("the chat template fails for messages that contain text like its control tokens.")
    sound = [one for one in found if one[1::2] == found[0][1::2]]
    whole = split(plain)
    if whole[1::2] == found[0][1::2] and len(split("\n".join(_texts(said)))) == 1:
        sound.append(whole)
    return next((one for one in sound if "".join(one) == plain), sound[0])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from chain(value, *map(_texts, value.values()))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_texts, value))


class _Mask(NamedTuple):
    """What to hide in messages."""

    characters: frozenset[str]
    words: frozenset[str]


@lru_cache(maxsize=8)
def _masks(control: tuple[str, ...], source: str) -> tuple[list[_Mask], Callable[[str], list[str]]]:
    """Masks, from the one that hides most to the one that hides least, and a function that splits text at control
    tokens.

    Each mask hides a character of every control token, so that only the template can write one. Words are hidden if the
    template writes the marks around them separately, so that a word from a message could come between.
    """
    marks = {c for token in control for c in _WORD.sub("", token) if not c.isspace()}
    marks |= {c for token in control for c in token if marks.isdisjoint(token)}
    split = Literals(control).split
    rest = "".join(split(source)[::2])
    around = {token: [run for run in _WORD.split(token) if run] for token in control}
    written = {run for run in {run for runs in around.values() for run in runs} if run in rest}
    words = {
        word for token, runs in around.items() if runs and written.issuperset(runs) for word in _WORD.findall(token)
    }
    few: set[str] = set()
    for token in control:
        if few.isdisjoint(token):  # the mark character that most tokens share
            few.add(max(marks.intersection(token), key=lambda mark: (sum(mark in t for t in control), mark)))
    kinds = [(marks, words), (marks, set[str]()), (few, set[str]())]
    masks = list(dict.fromkeys(_Mask(frozenset(characters), frozenset(hidden)) for characters, hidden in kinds))
    return masks, split


class _Hiding:
    """Replaces characters, and the first characters of words, by characters that no text contains, and restores them.

    Args:
        mask: What to hide.
        text: All texts, concatenated.
    """

    def __init__(self, mask: _Mask, text: str) -> None:
        unused = (c for c in map(chr, chain(*_CODES)) if c not in text and _escaped(c) not in text)
        self._words = mask.words
        self._initials = {c: next(unused) for c in sorted({word[0] for word in mask.words})}
        self._characters = {c: next(unused) for c in sorted(mask.characters)}
        pairs = [*self._characters.items(), *self._initials.items()]
        self._back = [(written, c) for c, hidden in pairs for written in (hidden, _escaped(hidden))]

    def hide(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {self._marks(name): self.hide(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if not isinstance(value, str):
            return value
        if self._words and key not in STRUCTURE:
            value = _WORD.sub(self._hidden_word, value)
        return self._marks(value)

    def _hidden_word(self, match: re.Match[str]) -> str:
        word = match[0]
        return self._initials[word[0]] + word[1:] if word in self._words else word

    def _marks(self, text: str) -> str:
        for character, hidden in self._characters.items():
            text = text.replace(character, hidden)
        return text

    def show(self, text: str) -> str:
        for hidden, character in self._back:
            text = text.replace(hidden, character)
        return text


@lru_cache(maxsize=1024)
def _escaped(character: str) -> str:
    """A character as ASCII-only JSON escapes it."""
    return json.dumps(character)[1:-1]
