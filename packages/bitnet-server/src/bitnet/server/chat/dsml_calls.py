"""Calls in DSML, as DeepSeek's models write them since V3.2: tags with a mark of their own, and an element a parameter.

Texts are written as they are, other values as JSON::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

from bitnet.core.text.thinking import overlap
from bitnet.server.chat.tool_calls import WHITE, CallParser, Event
from bitnet.server.forms.dsml_rules import DSML, INVOKE, INVOKED, PARAMETER, PARAMETER_END

MAX_HEAD = 300
"""Maximum characters of a tag with a name."""


def as_json(written: str) -> str:
    """The value of a parameter that is no text, as JSON; a text where it is not JSON."""
    try:
        return json.dumps(json.loads(written, strict=False), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)


class DsmlCalls(CallParser):
    """Finds calls in DSML; arguments as for :class:`~bitnet.server.chat.tool_calls.CallParser`.

    Texts are streamed as they come, other values when they are complete.
    """

    _INVOKE = re.compile(rf'{INVOKE}([^"<>]*)"\s*>')
    _PARAMETER = re.compile(rf'{PARAMETER}([^"]*)"(?:\s+string="(true|false)")?\s*>')

    def __init__(self, names: Collection[str], wrapped: str, *, parallel: bool, prefix: str, required: bool) -> None:
        super().__init__(names, tagged=True, parallel=parallel, prefix=prefix, required=required)
        self._open, self._close = f"<{DSML}{wrapped}>", f"</{DSML}{wrapped}>"
        self._first = self._invoke
        self._undecided = (*self._undecided, self._invoke)

    def _invoke(self) -> Iterator[Event]:
        """Before a call, or after one."""
        text = self._held.lstrip(WHITE)
        if text.startswith(self._close):
            self._held = text[len(self._close) :]
            self._to(self._between)
        elif head := self._INVOKE.match(text):
            if head[1] not in self._names:
                yield from self._no_call()
                return
            self._held, self._skipped = text[head.end() :], ""
            yield from self._begin(head[1])
            self._to(self._parameter)
        elif not self._required and not _may_become(text, INVOKE, self._close):
            yield from self._no_call()

    def _parameter(self) -> Iterator[Event]:
        """In a call, between parameters. What is neither a parameter nor the call's end is passed over."""
        starts = [at for mark in (PARAMETER, INVOKED, self._close) if (at := self._held.find(mark)) >= 0]
        if not starts:
            kept = max(overlap(self._held, mark) for mark in (PARAMETER, INVOKED, self._close))
            self._held = self._held[len(self._held) - kept :]
            return
        self._held = self._held[min(starts) :]
        if head := self._PARAMETER.match(self._held):
            self._held = self._held[head.end() :]
            begun = self.calls[-1].arguments
            yield from self._argue(f"{', ' if begun else '{'}{json.dumps(head[1], ensure_ascii=False)}: ")
            if head[2] == "true":
                yield from self._argue('"')
                self._to(self._text)
            else:
                self._to(self._json)
        elif self._held.startswith(PARAMETER):
            if len(self._held) > MAX_HEAD:
                self._held = self._held[len(PARAMETER) :]
                self._to(self._parameter)
        else:
            self._held = self._held.removeprefix(INVOKED)
            yield from self._argue("}" if self.calls[-1].arguments else "{}")
            self._ended = True
            self._to(self._invoke if self._parallel else self._dropped)

    def _text(self) -> Iterator[Event]:
        """In a parameter that is a text."""
        text, ended, rest = self._held.partition(PARAMETER_END)
        kept = 0 if ended else overlap(text, PARAMETER_END)
        self._held = rest if ended else text[len(text) - kept :]
        text = text[: len(text) - kept]
        yield from self._argue(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if ended else ""))
        if ended:
            self._to(self._parameter)

    def _json(self) -> Iterator[Event]:
        """In a parameter of another type. A long one is searched once for its end."""
        since = max(0, len(self._held) - self._fresh - len(PARAMETER_END))
        self._fresh = 0
        if (end := self._held.find(PARAMETER_END, since)) >= 0:
            written, self._held = self._held[:end].strip(), self._held[end + len(PARAMETER_END) :]
            yield from self._argue(as_json(written))
            self._to(self._parameter)


def _may_become(text: str, *marks: str) -> bool:
    """Whether a text may begin with one of the marks once more of it has come."""
    return any(mark.startswith(text) or (text.startswith(mark) and len(text) <= MAX_HEAD) for mark in marks)
