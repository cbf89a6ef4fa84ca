"""Finds tool calls in a model's streamed output, and streams their arguments.

Two formats are recognised. *Tagged*, as Hermes and Qwen write: ``{"name": …, "arguments": {…}}`` between
``<tool_call>`` and ``</tool_call>`` anywhere in a text. *Bare*, as Llama 3 writes: the answer consists only of such
objects, optionally with ``parameters`` for ``arguments``, and ``<|python_tag|>`` before them. Anything that only looks
like a call, or calls an unknown tool, is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bitnet.core.text.thinking import overlap
from bitnet.server.chat.quotes import Quotes

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
WHITE = " \t\r\n"

_NAME = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*{_NAME}\s*,\s*)*"name"\s*:\s*({_NAME})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_FIRST_KEY = re.compile(rf"\s*\{{\s*({_NAME})\s*:")
_KEYS = frozenset({"name", "type", "id", "arguments", "parameters"})


class Text(NamedTuple):
    """Text that is not part of a call."""

    text: str


class Begin(NamedTuple):
    """The beginning of call number ``call`` in the answer, to the tool ``name``."""

    call: int
    id: str
    name: str


class Arguments(NamedTuple):
    """A piece of a call's arguments as JSON."""

    call: int
    text: str


Event = Text | Begin | Arguments


@dataclass(slots=True)
class ToolCall:
    """A call in an answer.

    Attributes:
        arguments: JSON, as the model wrote it.
    """

    id: str
    name: str
    arguments: str = ""

    def values(self) -> dict[str, Any] | None:
        """The arguments; None if they are not a JSON object, because the answer was cut off or the model erred."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def _string(text: str) -> str | None:
    """The value of a JSON string, which may contain raw line breaks as models write them; None if it is not a
    string."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class _Value:
    """Finds the end of a JSON object, list or string that arrives in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quotes = depth, Quotes('"')

    def feed(self, text: str) -> int | None:
        """How many characters of ``text`` belong to the value; None: all, and the value continues."""
        for i, c in enumerate(text):
            if self._quotes.take(c):
                if not self._quotes and not self._depth:
                    return i + 1
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
            elif not self._depth and not c.isspace():  # a number or a word, which is never a call's arguments
                return i
        return None


class CallParser:
    """Splits a streamed answer into text and calls.

    Args:
        names: The tools that may be called.
        tagged: Whether calls are tagged; if not, they are bare.
        parallel: Whether several calls are allowed; if not, everything after the first is dropped.
        prefix: Prefix of the calls' ids.
        required: Whether the answer has been held to calls, so that whatever is not one yet at its end is a call that
            was cut off.

    Attributes:
        text: The text so far, without calls.
        calls: The calls so far.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        tagged: bool,
        parallel: bool = True,
        prefix: str = "call_",
        required: bool = False,
    ) -> None:
        self._names, self._tagged, self._parallel, self._prefix = names, tagged, parallel, prefix
        self._required = required
        self._open = OPEN
        self._first: Any = self._head  # the state after an opening mark
        self._undecided: tuple[Any, ...] = (self._head, self._encoded)  # states in which there may be no call yet
        self._held = ""
        self._state = self._between
        self._value = _Value()
        self._ended = False  # whether a call has ended and nothing has followed
        self._skipped = ""  # possible beginning of a call; it becomes text if it is not one
        self._name = ""  # name of the call whose arguments are a string
        self._fresh = 0  # characters of the held text not yet fed to the value
        self.text = ""
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[Event]:
        """The events for one more piece of the answer."""
        if self._passes(text):
            return [*self._said(text)]
        self._held += text
        self._fresh += len(text)
        return [*self._run()]

    def end(self) -> list[Event]:
        """The events at the end: held text that could have become a call, unless it was to become one."""
        if self._required:
            self._held = ""
        elif self._state in (self._between, self._plain, *self._undecided):
            rest = (self._skipped if self._state in self._undecided else "") + self._held
            self._held = ""
            return [*self._said(rest)]
        return []

    def _passes(self, text: str) -> bool:
        """Whether no call can begin in a piece, which follows text."""
        waits = self._tagged and not (self._held or self._ended or self._required)
        return waits and self._open[0] not in text and self._state == self._between

    def _run(self) -> Iterator[Event]:
        while self._held:
            before = self._state
            yield from self._state()
            if self._state == before:
                return

    def _said(self, text: str) -> Iterator[Event]:
        if text:
            self._ended = False
            self.text += text
            yield Text(text)

    def _to(self, state: Any, *, depth: int = 0) -> None:
        self._state, self._value, self._fresh = state, _Value(depth), len(self._held)

    def _plain(self) -> Iterator[Event]:
        text, self._held = self._held, ""
        yield from self._said(text)

    def _dropped(self) -> Iterator[Event]:
        self._held = ""
        yield from ()

    def _between(self) -> Iterator[Event]:
        """Before a call, or after one."""
        if self._ended:  # separators of calls, and the end of their list, are not text
            self._held = self._held.lstrip(WHITE + ("" if self._tagged else ";,]"))
        if self._tagged:
            text, opened, rest = self._held.partition(self._open)
            if not opened:
                keep = len(text) if self._required else overlap(text, self._open)
                text, rest = text[: len(text) - keep], text[len(text) - keep :]
            self._held = rest
            yield from self._said(text)
            if opened:
                self._skipped = self._open
                self._to(self._first)
            return
        start = self._held.lstrip(WHITE + "[")
        start = start.removeprefix(PYTHON_TAG).lstrip()
        if start.startswith("{"):
            self._skipped, self._held = self._held.removesuffix(start), start
            self._to(self._head)
        elif start and not PYTHON_TAG.startswith(start):
            self._to(self._plain)

    def _head(self) -> Iterator[Event]:
        """In a call, before its arguments."""
        if head := _HEAD.match(self._held):
            name = _string(head[1])
            if name is None or name not in self._names:
                yield from self._no_call()
                return
            self._held = self._held[head.end() :]
            if self._held[0] == '"':  # it is a call if this string is one
                self._skipped, self._name = self._skipped + head[0], name
                self._to(self._encoded)
            else:
                yield from self._begin(name)
                self._to(self._arguments)
            return
        key = _FIRST_KEY.match(self._held)
        fresh, self._fresh = self._held[len(self._held) - self._fresh :], 0
        end = self._value.feed(fresh)
        if key and _string(key[1]) not in _KEYS:
            yield from self._no_call()
        elif end is not None:
            yield from self._object(len(self._held) - len(fresh) + end)

    def _object(self, end: int) -> Iterator[Event]:
        """A complete object that does not begin like a call: its keys may be in another order."""
        try:
            found = json.loads(self._held[:end])
        except (ValueError, RecursionError):
            found = None
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or name not in self._names:
            yield from self._no_call()
            return
        self._held = self._held[end:]
        yield from self._begin(name)
        given = found.get("arguments", found.get("parameters")) or {}
        yield from self._argue(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        self._after()

    def _no_call(self) -> Iterator[Event]:
        """The skipped part is text; with tagged calls, the held part may contain another call."""
        self._to(self._between if self._tagged else self._plain)
        yield from self._said(self._skipped)

    def _begin(self, name: str) -> Iterator[Event]:
        self.calls.append(ToolCall(self._prefix + secrets.token_hex(12), name))
        yield Begin(len(self.calls) - 1, self.calls[-1].id, name)

    def _argue(self, text: str) -> Iterator[Event]:
        if text:
            self.calls[-1].arguments += text
            yield Arguments(len(self.calls) - 1, text)

    def _arguments(self) -> Iterator[Event]:
        end = self._value.feed(self._held)
        text, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        yield from self._argue(text)
        if end is not None:
            if not self.calls[-1].arguments:  # null, or not an object
                yield from self._argue("{}")
            self._argued()

    def _argued(self) -> None:
        """The arguments have ended."""
        self._to(self._rest, depth=1)

    def _encoded(self) -> Iterator[Event]:
        """Arguments written as a JSON string that contains JSON."""
        fresh, self._fresh = self._held[len(self._held) - self._fresh :], 0
        end = self._value.feed(fresh)
        if end is not None:
            end += len(self._held) - len(fresh)
            arguments = _string(self._held[:end])
            if arguments is None:
                yield from self._no_call()
                return
            self._held = self._held[end:]
            yield from self._begin(self._name)
            yield from self._argue(arguments)
            self._to(self._rest, depth=1)

    def _rest(self) -> Iterator[Event]:
        """In a call, after its arguments."""
        end = self._value.feed(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._after()
        yield from ()

    def _after(self) -> None:
        self._ended = True
        self._to(self._dropped if not self._parallel else self._closing if self._tagged else self._between)

    def _closing(self) -> Iterator[Event]:
        text = self._held.lstrip()
        if text.startswith(CLOSE):
            self._held = text[len(CLOSE) :]
            self._to(self._between)
        elif not CLOSE.startswith(text):
            self._to(self._between)
        yield from ()
