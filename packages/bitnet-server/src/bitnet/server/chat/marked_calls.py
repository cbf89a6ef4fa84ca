"""Calls after marks of their own, as the models of Mistral, DeepSeek and MiniCPM write them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bitnet.server.chat.quotes import Quotes
from bitnet.server.chat.tool_calls import WHITE, CallParser, Event

MAX_HEAD = 300
"""Maximum characters between a mark and the arguments of the call."""
NAME = r"([\w.:/-]+)"

TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
"""Mistral's marks: of a list of calls or of one call, of its arguments, and of its id."""
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
"""DeepSeek's marks: of all calls, and of one of them."""
PYTHON_OPEN, PYTHON_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
"""MiniCPM's marks, between which calls are written as in Python."""


@dataclass(frozen=True, slots=True)
class NamedForm:
    """Calls that are a name and then arguments as JSON.

    Attributes:
        open: The mark before the calls.
        head: What is between that mark, or ``more``, and the arguments; its group is the tool's name.
        skipped: What may follow the arguments and says nothing.
        more: The mark of a further call; empty: it begins with ``open``.
        close: The mark after the calls; empty: there is none.
    """

    open: str
    head: re.Pattern[str]
    skipped: tuple[str, ...] = ()
    more: str = ""
    close: str = ""


MISTRAL = NamedForm(TOOL_CALLS, re.compile(rf"\s*{NAME}\s*(?:{re.escape(CALL_ID)}\s*\w+\s*)?(?:{re.escape(ARGS)})?\s*"))
DEEPSEEK = NamedForm(
    CALLS_BEGIN,
    re.compile(rf"\s*(?:{CALL_BEGIN})?\s*(?:function\s*{CALL_SEP})?\s*{NAME}\s*(?:{CALL_SEP})?\s*(?:```(?:json)?)?\s*"),
    ("```", CALL_END),
    CALL_BEGIN,
    CALLS_END,
)
LIST = NamedForm("", MISTRAL.head, (",",), "{", "]")
"""What follows an object in a list of calls."""


class NamedCalls(CallParser):
    """Finds calls of a :class:`NamedForm`, or lists of objects after its mark; arguments as for
    :class:`~bitnet.server.chat.tool_calls.CallParser`."""

    def __init__(self, names: Collection[str], form: NamedForm, *, parallel: bool, prefix: str, required: bool) -> None:
        super().__init__(names, tagged=True, parallel=parallel, prefix=prefix, required=required)
        self._form = self._around = form
        self._open, self._first = form.open, self._named
        self._undecided = (*self._undecided, self._named)

    def _named(self) -> Iterator[Event]:
        """Before a call's name, or before a list of objects."""
        text = self._held.lstrip(WHITE)
        if text[:1] in ("[", "{"):
            start = text.removeprefix("[").lstrip(WHITE)
            if start.startswith("{"):
                self._around = LIST
                self._skipped, self._held = self._skipped + self._held.removesuffix(start), start
                self._to(self._head)
            elif start:
                yield from self._no_call()
            return
        at = self._held.find("{")
        if at < 0:
            if len(self._held) > MAX_HEAD:
                yield from self._no_call()
            return
        head = self._form.head.fullmatch(self._held, 0, at)
        if head is None or head[1] not in self._names:
            yield from self._no_call()
            return
        self._around, self._held = self._form, self._held[at:]
        yield from self._begin(head[1])
        self._to(self._arguments)

    def _argued(self) -> None:
        if self._around is LIST:
            super()._argued()
        else:
            self._after()

    def _closing(self) -> Iterator[Event]:
        around, text = self._around, self._held.lstrip(WHITE)
        while mark := next((mark for mark in around.skipped if text.startswith(mark)), None):
            text = text[len(mark) :].lstrip(WHITE)
        self._held = text
        if around.more and text.startswith(around.more):
            self._skipped = ""
            self._to(self._named)
        elif around.close and text.startswith(around.close):
            self._held = text[len(around.close) :]
            self._to(self._between)
        elif text and not any(mark.startswith(text) for mark in (*around.skipped, around.more, around.close)):
            self._to(self._between)
        yield from ()


class PythonCalls(CallParser):
    """Finds calls such as ``f(city="Rome", days=3)`` between MiniCPM's marks, perhaps in a fence or a list."""

    _KEYWORD = re.compile(r"(\w+)\s*=\s*")
    _HEAD = re.compile(rf"{NAME}\s*\(")
    _AROUND = re.compile(r"(?:```(?:python|py)?(?=\s|$)|```|[\[\],;\s])*")

    def __init__(self, names: Collection[str], *, parallel: bool, prefix: str, required: bool) -> None:
        super().__init__(names, tagged=True, parallel=parallel, prefix=prefix, required=required)
        self._open, self._first = PYTHON_OPEN, self._call
        self._undecided = (*self._undecided, self._call)
        self._value_of = _Argument()

    def _call(self) -> Iterator[Event]:
        """Before a call, or after one."""
        around = self._AROUND.match(self._held)
        text = self._held[around.end() if around else 0 :]
        if text.startswith(PYTHON_CLOSE):
            self._held = text[len(PYTHON_CLOSE) :]
            self._to(self._between)
        elif head := self._HEAD.match(text):
            if head[1] not in self._names:
                yield from self._no_call()
                return
            self._held, self._skipped = text[head.end() :], ""
            yield from self._begin(head[1])
            self._value_of = _Argument()
            self._to(self._keywords)
        elif not (PYTHON_CLOSE.startswith(text) or re.fullmatch(rf"(?:{NAME}\s*)?`*", text)):
            yield from self._no_call()

    def _keywords(self) -> Iterator[Event]:
        """In a call's parentheses. Each argument is passed on when it is complete."""
        while (end := self._value_of.feed(self._held[len(self._held) - self._fresh :])) is not None:
            at = len(self._held) - self._fresh + end
            written, ending, self._held = self._held[:at].strip(), self._held[at], self._held[at + 1 :]
            self._value_of, self._fresh = _Argument(), len(self._held)
            if keyword := self._KEYWORD.match(written):
                start = ", " if self.calls[-1].arguments else "{"
                yield from self._argue(f"{start}{json.dumps(keyword[1])}: {_as_json(written[keyword.end() :])}")
            if ending == ")":
                yield from self._argue("}" if self.calls[-1].arguments else "{}")
                self._ended = True
                self._to(self._call if self._parallel else self._dropped)
                return
        self._fresh = 0


class _Argument:
    """Finds the end of an argument that arrives in pieces: a comma or a parenthesis outside of texts and brackets."""

    def __init__(self) -> None:
        self._depth, self._quotes = 0, Quotes("\"'")

    def feed(self, text: str) -> int | None:
        """The index of the character that ends the argument; None: it continues."""
        for i, c in enumerate(text):
            if self._quotes.take(c):
                continue
            if c in "([{":
                self._depth += 1
            elif not self._depth and c in ",)":
                return i
            elif c in ")]}":
                self._depth -= 1
        return None


def _as_json(written: str) -> str:
    """A value of Python, or of JSON, as JSON; anything else as a text."""
    try:
        return json.dumps(json.loads(written, strict=False), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes, which models write
            return json.dumps(ast.literal_eval(written), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(written, ensure_ascii=False)
