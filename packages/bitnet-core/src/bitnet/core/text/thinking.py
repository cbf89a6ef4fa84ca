"""Thoughts that a model writes before its answer, between two marks such as ``<think>`` and ``</think>``.

The marks are those that the chat template names. A thought begins where the prompt ends, if the template has opened it
there, or where the answer begins with the start mark. It ends at the first end mark. Everywhere else the marks are
text. White space around a thought belongs to neither the thought nor the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from bitnet.core.text.tokenizer import Tokenizer


class Marks(NamedTuple):
    """The texts around a thought."""

    start: str
    end: str


MARKS = (
    Marks("<think>", "</think>"),
    Marks("<thinking>", "</thinking>"),
    Marks("<thought>", "</thought>"),
    Marks("<reasoning>", "</reasoning>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|begin_of_thought|>", "<|end_of_thought|>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    Marks("◁think▷", "◁/think▷"),
)
"""Marks in use, as of Qwen, DeepSeek, Seed, Mistral, Cohere, OpenThoughts, Apertus and Kimi."""


def marks_of(source: str) -> Marks | None:
    """The marks that a chat template names; None: its model does not think apart from its answers.

    The end mark is enough: some templates only cut earlier thoughts off, and leave it to the model to open one.
    """
    return next((marks for marks in MARKS if marks.end in source), None)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a thought is marked in the text that continues a prompt.

    Attributes:
        marks: The texts around a thought.
        opened: Whether the prompt ends inside a thought.
        end_tokens: Token ids of the end mark.
        start_token: Id of the start mark if it is one token, else None.
        hidden: Marks that are control tokens, by id; decoders leave their text out.
    """

    marks: Marks
    opened: bool
    end_tokens: tuple[int, ...]
    start_token: int | None
    hidden: Mapping[int, str] = field(hash=False)


_KNOWN: WeakKeyDictionary[Tokenizer, dict[tuple[Marks, bool], Thinking]] = WeakKeyDictionary()
"""What :func:`thinking_of` has found: it encodes the marks, which takes as long as to encode a chat."""


def thinking_of(marks: Marks, tokenizer: Tokenizer, *, opened: bool) -> Thinking:
    """How thoughts between ``marks`` look in a tokenizer's tokens."""
    known = _KNOWN.setdefault(tokenizer, {})
    if (marks, opened) not in known:
        known[marks, opened] = _thinking_of(marks, tokenizer, opened)
    return known[marks, opened]


def _thinking_of(marks: Marks, tokenizer: Tokenizer, opened: bool) -> Thinking:
    starts, ends = (tokenizer.encode(mark, add_special=False, parse_special=True) for mark in marks)
    pairs = ((ids, mark) for ids, mark in ((starts, marks.start), (ends, marks.end)) if len(ids) == 1)
    hidden = {ids[0]: mark for ids, mark in pairs if tokenizer.is_special(ids[0])}
    return Thinking(marks, opened, tuple(ends), starts[0] if len(starts) == 1 else None, hidden)


class Piece(NamedTuple):
    """New text of a thought, and of the answer after it."""

    reasoning: str = ""
    text: str = ""


class _State(Enum):
    BEFORE = auto()
    """Nothing but white space, or the beginning of a start mark, has come."""
    OPENED = auto()
    """The same, in a thought that the prompt has opened."""
    THOUGHT = auto()
    GAP = auto()
    """White space after a thought."""
    ANSWER = auto()


_BEFORE, _OPENED, _THOUGHT, _GAP, _ANSWER = _State  # looked up once: splitters are asked thousands of times a second


class ThoughtSplitter:
    """Splits a streamed text into thought and answer. The pieces do not depend on where the text is cut.

    Args:
        opened: Whether the text begins inside a thought. A start mark that is repeated there is left out.

    Attributes:
        begin: Index of the thought's first character in the text; None: no thought has begun.
        mark: Index of the end mark; None: it has not come.
    """

    def __init__(self, marks: Marks, *, opened: bool = False) -> None:
        self._marks = marks
        self._state = _OPENED if opened else _BEFORE
        self._held = ""
        self._seen = 0  # characters that are no longer held
        self._blank = True  # whether the thought has nothing but white space so far
        self.begin: int | None = 0 if opened else None
        self.mark: int | None = None

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._state in (_OPENED, _THOUGHT)

    @property
    def over(self) -> bool:
        """Whether the thought has ended, or the answer has begun without one."""
        return self._state in (_GAP, _ANSWER)

    @property
    def in_answer(self) -> bool:
        """Whether all further text is the answer's."""
        return self._state is _ANSWER

    @property
    def goes_on(self) -> bool:
        """Whether all further text is the thought's as long as no end mark begins in it."""
        return self._state is _THOUGHT and (not self._held or self._marks.end[0] not in self._held)

    def push(self, text: str) -> Piece:
        """What further text adds to the thought and to the answer."""
        if self._state is _ANSWER:
            return Piece("", text)
        self._held += text
        if self._state in (_BEFORE, _OPENED) and not self._begun():
            return Piece()
        reasoning = self._thought() if self._state is _THOUGHT else ""
        return Piece(reasoning, self._answer() if self.over else "")

    def push_thought(self, text: str) -> Piece:
        """:meth:`push`, where :attr:`goes_on`, for text without the end mark's first character."""
        held = self._held + text
        self._held = held
        if self._blank:
            self._take(len(held) - len(held.lstrip()))
        said = self._take(len(self._held.rstrip()))
        self._blank = self._blank and not said
        return Piece(said)

    def end(self) -> Piece:
        """What was held back. Call it after the last text."""
        held, self._held = self._held, ""
        if self.inside:
            return Piece(held.strip() if self._blank else held.rstrip())
        return Piece("", held if self._state is _BEFORE else "")

    def _take(self, length: int) -> str:
        """Remove the first characters of what is held."""
        taken, self._held = self._held[:length], self._held[length:]
        self._seen += length
        return taken

    def _begun(self) -> bool:
        """Whether it is known what the text begins with."""
        start, text = self._marks.start, self._held.lstrip()
        if text.startswith(start):
            self._take(len(self._held) - len(text) + len(start))
            self.begin, self._state = self._seen, _THOUGHT
        elif start.startswith(text):
            return False
        else:
            self._state = _THOUGHT if self._state is _OPENED else _ANSWER
        return True

    def _thought(self) -> str:
        """The thought's text up to its end mark, or up to what may become white space before one."""
        if self._blank:
            self._take(len(self._held) - len(self._held.lstrip()))
        at = self._held.find(self._marks.end)
        until = at if at >= 0 else len(self._held) - overlap(self._held, self._marks.end)
        said = self._take(len(self._held[:until].rstrip()))
        self._blank = self._blank and not said
        if at >= 0:
            self._take(len(self._held) - len(self._held.lstrip()))
            self.mark, self._state = self._seen, _GAP
            self._take(len(self._marks.end))
        return said

    def _answer(self) -> str:
        if self._state is _GAP:
            self._take(len(self._held) - len(self._held.lstrip()))
            if not self._held:
                return ""
            self._state = _ANSWER
        return self._take(len(self._held))


def overlap(text: str, literal: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``literal``, but not all of it."""
    most = min(len(text), len(literal) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(literal[:n])), 0)


class TextStream(Protocol):
    """Decodes token ids to whole characters, as :class:`~bitnet.core.text.tokenizer.StreamDecoder` does."""

    def push(self, *tokens: int) -> str: ...

    def lacks(self, character: str, tokens: Sequence[int]) -> bool:
        """Whether :meth:`push` would surely return no such character, and no token is named with one."""
        ...

    def flush(self) -> str: ...


class ThoughtReader:
    """Splits streamed tokens into thought and answer, and counts the tokens of the thought.

    Attributes:
        tokens: Tokens of the thought, from its start mark on. Tokens that have text of a mark alone do not count.
        before: Number of tokens before the answer's first one; None: it has not come. Without a thought it is 0.
    """

    def __init__(self, thinking: Thinking, decoder: TextStream) -> None:
        self._splitter = ThoughtSplitter(thinking.marks, opened=thinking.opened)
        self._hidden, self._decoder, self._first = thinking.hidden, decoder, thinking.marks.end[0]
        self._longest = max(map(len, thinking.marks))
        self._at = 0  # characters so far
        self._last: list[int] = []  # where the last tokens begin that were counted
        self._seen = self._textless = 0  # tokens so far, and the last of them that complete no character
        self.tokens = 0
        self.before: int | None = None

    @property
    def inside(self) -> bool:
        """Whether the tokens so far end inside a thought."""
        return self._splitter.inside

    @property
    def over(self) -> bool:
        """Whether the thought has ended, or the answer has begun without one."""
        return self._splitter.over

    @property
    def in_answer(self) -> bool:
        """Whether all further text is the answer's."""
        return self._splitter.in_answer

    def push(self, tokens: Sequence[int]) -> Piece:
        """What further tokens add to the thought and to the answer."""
        if self._splitter.in_answer:
            return Piece("", self._decoder.push(*tokens))
        if (piece := self.push_thought(tokens)) is not None:
            return piece
        if len(tokens) <= 1:
            return self._noted(tokens[0]) if tokens else Piece()
        half = len(tokens) // 2  # one of them may still be taken in at once
        first, second = self.push(tokens[:half]), self.push(tokens[half:])
        return Piece(first.reasoning + second.reasoning, first.text + second.text)

    def push_thought(self, tokens: Sequence[int]) -> Piece | None:
        """:meth:`push` at once, if all of the tokens' text is surely the thought's; else None, and nothing changes."""
        if not self._surely_thought(tokens):
            return None
        text = self._decoder.push(*tokens)
        self._at += len(text)
        self._count(tokens)
        return self._splitter.push_thought(text)

    def skip_thought(self, tokens: Sequence[int]) -> bool:
        """As :meth:`push_thought`, but without decoding them, so their text is lost; False if it would return None.

        The bytes of a character of which others were skipped are read as U+FFFD. No mark is read otherwise for that, as
        an end mark's first character begins in none of the tokens.
        """
        if not self._surely_thought(tokens):
            return False
        self._count(tokens)
        return True

    def _surely_thought(self, tokens: Sequence[int]) -> bool:
        hidden = self._hidden
        return (
            self._splitter.goes_on
            and not (hidden and not hidden.keys().isdisjoint(tokens))
            and self._decoder.lacks(self._first, tokens)
        )

    def _count(self, tokens: Sequence[int]) -> None:
        """Count tokens that are surely the thought's."""
        self._seen += len(tokens)
        self.tokens += len(tokens)
        self._last, self._textless = [], 0  # an end mark comes after all of them, and has text

    def end(self) -> Piece:
        """What was held back. Call it after the last token."""
        reasoning, text = self._splitter.push(self._decoder.flush())
        more = self._splitter.end()
        if self.before is None:
            self.before = self._seen if self._splitter.begin is not None else 0
        return Piece(reasoning + more.reasoning, text + more.text)

    def _noted(self, token: int) -> Piece:
        """What a token adds; the one that begins the answer is noted."""
        at, piece = self._at, self._one(token)
        if self.before is None and self._splitter.in_answer:
            self.before = self._seen - self._textless if self._splitter.begin is not None else 0
        self._seen += 1
        self._textless = self._textless + 1 if self._at == at else 0
        return piece

    def _one(self, token: int) -> Piece:
        mark = self._hidden.get(token)
        if mark is None or self._splitter.in_answer:  # decoders leave control tokens out of answers
            return self._counted(self._decoder.push(token))
        # Bytes of a character that the mark cuts off belong to the tokens before
        unfinished = self._decoder.flush()
        self._at += len(unfinished)
        before = self._splitter.push(unfinished)
        piece = self._counted(mark)
        return Piece(before.reasoning + piece.reasoning, before.text + piece.text)

    def _counted(self, text: str) -> Piece:
        """What a token with this text adds."""
        splitter, begins, was_over = self._splitter, self._at, self._splitter.over
        piece = splitter.push(text)
        self._at += len(text)
        if kept := text.lstrip("\ufffd"):  # what stands before it are bytes of the tokens before
            begins += len(text) - len(kept)
        if splitter.begin is None or was_over:
            return piece
        if begins < splitter.begin:  # it completes a start mark, before which nothing counts
            self.tokens, self._last = 0, []
        if self._at > splitter.begin or begins >= splitter.begin:
            self.tokens += 1
            if text:  # a token without any cannot belong to an end mark
                self._last = [*(at for at in self._last if at + self._longest >= begins), begins]
        if splitter.mark is not None:
            until = splitter.mark
            self.tokens -= sum(at >= until for at in self._last)
        return piece
