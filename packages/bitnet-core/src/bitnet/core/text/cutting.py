"""Cuts text into words with Python's ``re``, which has no classes of Unicode characters.

The patterns of :mod:`bitnet.core.text.words` name such classes (``\\p{L}``). They are matched with the outline of a
text: each character that is not ASCII is replaced by one that stands for its class.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from bitnet.core.text.words import PATTERNS, byte_characters

_STANDS_FOR = {"L": "\u00e9", "N": "\u00b2", "M": "\u0300", "P": "\u00a1", "S": "\u00a9"}
"""By the first letter of a Unicode category, the character of an outline."""
_SPACE, _OTHER = "\u00a0", "\u00ad"
_LONG_S = "\u017f"
"""The only character that is not ASCII but equals an ASCII letter of a pattern, where case is ignored."""
_MEMBERS = {
    "L": "A-Za-z\u00e9\u017f",
    "N": "0-9\u00b2",
    "M": "\u0300",
    **{
        kind: re.escape("".join(c for c in map(chr, range(128)) if unicodedata.category(c)[0] == kind))
        + _STANDS_FOR[kind]
        for kind in "PS"
    },
}
"""The characters of a class in outlines, as part of a set in brackets."""
_SEPARATORS = range(0x1C, 0x20)
"""Characters that are spaces to Python, but not to Unicode."""
_PARTS = re.compile(r"\\p\{(\w)\}|\\.|[\[\]]")


class _Outline(dict[int, str]):
    """What stands for each character in an outline, looked up as ``str.translate`` does."""

    def __missing__(self, code: int) -> str:
        found = _outlined(chr(code))
        if code < 0x10000:  # bounds the memory
            self[code] = found
        return found


def _outlined(character: str) -> str:
    code = ord(character)
    if code in _SEPARATORS:
        return _OTHER
    if code < 128 or character == _LONG_S:
        return character
    if character.isspace():
        return _SPACE
    return _STANDS_FOR.get(unicodedata.category(character)[0], _OTHER)


_OUTLINE = _Outline()


def outline_pattern(pattern: str) -> str:
    """The pattern for outlines that corresponds to a pattern for text."""
    inside = False

    def replaced(part: re.Match[str]) -> str:
        nonlocal inside
        if part[0] in "[]":
            inside = part[0] == "["
        if part[1] is None:
            return part[0]
        return _MEMBERS[part[1]] if inside else f"[{_MEMBERS[part[1]]}]"

    return _PARTS.sub(replaced, pattern)


def word_cutter(pre: str) -> Callable[[str], list[str]]:
    """A function that splits text into words, with characters for bytes, as the pre-tokenizer ``pre`` does."""
    patterns = [(re.compile(outline_pattern(pattern)), "\\" in pattern) for pattern in PATTERNS[pre]]
    characters = [byte_characters()[byte] for byte in range(256)]

    def cut(text: str) -> list[str]:
        outline = text.translate(_OUTLINE)
        pieces = [(0, len(text))]
        for pattern, has_classes in patterns:  # one without classes names characters of the text
            matched = outline if has_classes else text
            pieces = [part for piece in pieces for part in _isolated(pattern, matched, *piece)]
        words = [text[begin:end] for begin, end in pieces]
        return ["".join([characters[byte] for byte in word.encode()]) for word in words]

    return cut


def _isolated(pattern: re.Pattern[str], text: str, begin: int, end: int) -> list[tuple[int, int]]:
    """Where the matches of a pattern in a piece of a text or an outline are, and what lies between them."""
    found, at = [], begin
    for match in pattern.finditer(text[begin:end]):
        first, last = begin + match.start(), begin + match.end()
        if first > at:
            found.append((at, first))
        found.append((first, last))
        at = last
    if at < end:
        found.append((at, end))
    return found
