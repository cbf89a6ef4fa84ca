"""Tool calls in what a model writes: found while it is streamed, their arguments passed on as they come.

Two ways of writing them are read. *Tagged*, as Hermes and Qwen write, ``{"name": …, "arguments": {…}}`` stands
between ``<tool_call>`` and ``</tool_call>`` anywhere in a text. *Bare*, as Llama 3 writes, an answer is nothing but
such objects, one after another, with ``parameters`` for ``arguments`` if it likes, and ``<|python_tag|>`` before them.
What only looks like a call, or calls a tool that does not exist, is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Text that is part of no call."""

    text: str


class Begin(NamedTuple):
    """A call begins: number ``call`` of the answer, of the tool ``name``."""

    call: int
    id: str
    name: str


class Arguments(NamedTuple):
    """A piece of the JSON of a call's arguments."""

    call: int
    text: str


Event = Text | Begin | Arguments


@dataclass(slots=True)
class ToolCall:
    """A call that was found.

    Attributes:
        arguments: JSON, as the model wrote it.
    """

    id: str
    name: str
    arguments: str = ""

    def values(self) -> dict[str, Any] | None:
        """The arguments; None where they are no JSON object: the answer was cut off, or the model erred."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def _string(text: str) -> str | None:
    """What a JSON string says, with line breaks in it as models write them; None where it is none."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class _Value:
    """Finds the end of a JSON object, list or string that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._string, self._escaped = depth, False, False

    def feed(self, text: str) -> int | None:
        """How much of ``text`` belongs to the value; None: all of it, and more will come."""
        for i, c in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._string = False
                    if not self._depth:
                        return i + 1
            elif c == '"':
                self._string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
            elif not self._depth and not c.isspace():  # a number or a word, which no call has for arguments
                return i
        return None


class CallParser:
    """Takes an answer apart as it comes.

    Args:
        names: The tools that may be called.
        tagged: Whether calls stand in tags, else bare.
        parallel: Whether more than one call counts; else all after the first is dropped.
        prefix: Beginning of the calls' ids.

    Attributes:
        text: The text so far that is part of no call.
        calls: The calls so far.
    """

    def __init__(self, names: Collection[str], *, tagged: bool, parallel: bool = True, prefix: str = "call_") -> None:
        self._names, self._tagged, self._parallel, self._prefix = names, tagged, parallel, prefix
        self._held = ""
        self._state = self._between
        self._value = _Value()
        self._ended = False  # a call, and nothing came since
        self._skipped = ""  # what may be the beginning of a call, and is text if it is none
        self._name = ""  # of the call whose arguments are a string
        self._fresh = 0  # characters of what is held that the value has not seen
        self.text = ""
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[Event]:
        """What one more piece of the answer brings."""
        self._held += text
        self._fresh += len(text)
        return [*self._run()]

    def end(self) -> list[Event]:
        """What the end brings: text that could have become a call."""
        if self._state in (self._between, self._head, self._encoded, self._plain):
            rest = (self._skipped if self._state in (self._head, self._encoded) else "") + self._held
            self._held = ""
            return [*self._said(rest)]
        return []

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
        if self._ended:  # what parts two calls, or ends their list, is no text
            self._held = self._held.lstrip(WHITE + ("" if self._tagged else ";,]"))
        if self._tagged:
            text, opened, rest = self._held.partition(OPEN)
            if not opened:
                keep = next((k for k in range(min(len(text), len(OPEN) - 1), 0, -1) if OPEN.startswith(text[-k:])), 0)
                text, rest = text[: len(text) - keep], text[len(text) - keep :]
            self._held = rest
            yield from self._said(text)
            if opened:
                self._skipped = OPEN
                self._to(self._head)
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
        """A whole object that does not begin as calls do: its keys may stand in another order."""
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
        """What was skipped is text; in what is held there may be another call, where calls stand in tags."""
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
            if not self.calls[-1].arguments:  # null, or what is no object
                yield from self._argue("{}")
            self._to(self._rest, depth=1)

    def _encoded(self) -> Iterator[Event]:
        """Arguments written as a string that holds JSON."""
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
