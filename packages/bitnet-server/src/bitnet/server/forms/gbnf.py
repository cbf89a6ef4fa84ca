"""Translates grammars in llama.cpp's format, GBNF, to llguidance's Lark.

Each character of a literal becomes a terminal of its own. llguidance's lexer takes the longest terminal that could
match, so longer ones would exclude texts that the grammar allows.
"""

from __future__ import annotations

import re

ROOT = "root"
MAX_REPETITIONS = 2000
"""Maximum number in ``{m,n}``, as in llama.cpp."""
MAX_DEPTH = 128
"""Maximum groups in each other."""

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNTS = re.compile(r"\{\s*(\d{1,9})\s*(,?)\s*(\d{1,9})?\s*\}")
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}
_ANY = "/(?s:.)/"


class GrammarError(Exception):
    """A grammar is wrong. The message names the place."""


def to_lark(source: str) -> str:
    """A grammar as llguidance's Lark; its texts are those of the rule ``root``.

    Raises:
        GrammarError: It is no grammar, or has something that is not supported.
    """
    return _Translator(source).translated()


class _Translator:
    """Reads a grammar from its first character to its last."""

    def __init__(self, source: str) -> None:
        self._source, self._at, self._depth = source, 0, 0
        self._names: dict[str, str] = {}  # by the grammar's name, the name of the rule in Lark
        self._used: dict[str, int] = {}  # by name, where it is used first
        self._rules: dict[str, str] = {}

    def translated(self) -> str:
        self._skip(lines=True)
        while self._at < len(self._source):
            self._rule()
        for name, at in self._used.items():
            if name not in self._rules:
                raise self._error(f"the rule {name} is used, but there is none", at)
        if ROOT not in self._rules:
            raise GrammarError(f"it has no rule {ROOT}, with which it would begin.")
        return "\n".join([f"start: {self._lark(ROOT)}", *self._rules.values()])

    def _error(self, what: str, at: int | None = None) -> GrammarError:
        before = self._source[: self._at if at is None else at]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return GrammarError(f"line {line}, column {column}: {what}.")

    def _skip(self, *, lines: bool) -> None:
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self._source, self._at)
        assert found is not None
        self._at = found.end()

    def _next(self, text: str) -> bool:
        """Whether ``text`` comes next; it is then taken."""
        found = self._source.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _lark(self, name: str) -> str:
        return self._names.setdefault(name, f"rule_{len(self._names)}")

    def _rule(self) -> None:
        begin, name = self._at, _NAME.match(self._source, self._at)
        if name is None:
            raise self._error("a rule's name is expected")
        self._at = name.end()
        self._skip(lines=False)
        if not self._next("::="):
            raise self._error("::= is expected")
        if name[0] in self._rules:
            raise self._error(f"the rule {name[0]} has been defined above", begin)
        self._skip(lines=True)
        self._rules[name[0]] = f"{self._lark(name[0])}: {self._alternatives(nested=False)}"
        if self._at < len(self._source) and self._source[self._at] not in "\r\n":
            raise self._error("a new line or the end is expected")
        self._skip(lines=True)

    def _alternatives(self, *, nested: bool) -> str:
        found = [self._sequence(nested)]
        while self._next("|"):
            self._skip(lines=True)
            found.append(self._sequence(nested))
        return " | ".join(found)

    def _sequence(self, nested: bool) -> str:
        parts: list[str] = []
        while (part := self._part()) is not None:
            self._skip(lines=nested)
            for _ in range(MAX_DEPTH):
                if (counted := self._repeated(part)) is None:
                    break
                part = counted
                self._skip(lines=nested)
            parts.append(part)
        return " ".join(filter(None, parts)) or '""'

    def _part(self) -> str | None:
        """One part of a sequence, as something that a repetition may follow; None: the sequence has ended."""
        if name := _NAME.match(self._source, self._at):
            self._used.setdefault(name[0], self._at)
            self._at = name.end()
            return self._lark(name[0])
        if self._next('"'):
            return self._literal()
        if self._next("["):
            return self._characters()
        if self._next("."):
            return _ANY
        if self._next("("):
            return self._group()
        if self._source.startswith(("<", "!"), self._at):
            raise self._error("tokens, as in <…>, are not supported; write their text")
        return None

    def _group(self) -> str:
        begin = self._at - 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} groups are in each other", begin)
        self._skip(lines=True)
        found = self._alternatives(nested=True)
        if not self._next(")"):
            raise self._error(") is expected" if self._at < len(self._source) else "this ( is not closed", begin)
        self._depth -= 1
        return f"({found})"

    def _repeated(self, part: str) -> str | None:
        """A part with the repetition that follows it; None: none does."""
        begin = self._at
        for sign in "*+?":
            if self._next(sign):
                return f"({part}){sign}"
        if not self._source.startswith("{", begin):
            return None
        counts = _COUNTS.match(self._source, begin)
        if counts is None or (counts[3] and not counts[2]):
            raise self._error("a repetition as {2}, {2,} or {2,5} is expected")
        least, most = int(counts[1]), int(counts[3] or counts[1])
        if most < least:
            raise self._error("the second number of a repetition must not be less than the first", begin)
        if most > MAX_REPETITIONS:
            raise self._error(f"at most {MAX_REPETITIONS} repetitions are allowed", begin)
        self._at = counts.end()
        if counts[2] and not counts[3]:
            return f"({part}){{{least},}}"
        return f"({part}){{{least},{most}}}" if most else '""'

    def _literal(self) -> str:
        begin, found = self._at - 1, []
        while not self._next('"'):
            found.append(f"/{_escaped(self._character(begin))}/")
        return f"({' '.join(found)})" if found else '""'

    def _characters(self) -> str:
        begin = self._at - 1
        sign = "^" if self._next("^") else ""
        found = []
        while not self._next("]"):
            first_at, first = self._at, self._character(begin)
            ranged = self._source.startswith("-", self._at) and not self._source.startswith("-]", self._at)
            self._at += ranged
            last = self._character(begin) if ranged else first
            if last < first:
                raise self._error("the range's second character comes before the first", first_at)
            found.append(_escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}")
        if not found:
            if sign:
                return _ANY
            raise self._error("[] allows no character", begin)
        return f"/[{sign}{''.join(found)}]/"

    def _character(self, begin: int) -> str:
        """The next character of a literal or of characters in brackets, which began at ``begin``."""
        source, at = self._source, self._at
        if at >= len(source):
            raise self._error(f"this {source[begin]} is not closed", begin)
        self._at += 1
        if source[at] != "\\":
            return source[at]
        kind = source[at + 1 : at + 2]
        self._at += 1
        if kind in _HEX:
            digits = source[at + 2 : at + 2 + _HEX[kind]]
            self._at += len(digits)
            if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX[kind]}}}", digits):
                raise self._error(f"\\{kind} needs {_HEX[kind]} hexadecimal digits", at)
            if (code := int(digits, 16)) > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error(f"\\{kind}{digits} is no Unicode character", at)
            return chr(code)
        if kind not in _ESCAPED or not kind:
            raise self._error(f"\\{kind} is no escape", at)
        return _ESCAPED[kind]


def _escaped(character: str) -> str:
    """A character in a regular expression, within brackets or outside."""
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\u{{{ord(character):x}}}"
