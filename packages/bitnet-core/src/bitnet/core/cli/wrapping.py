"""Streamed text broken between words at a terminal's border, instead of in the middle of one."""

from __future__ import annotations

import re
import unicodedata

TAB = 8
"""Columns from one tab stop to the next."""
_PIECES = re.compile(r"\n|[ \t]+|[^ \t\n]+")


class Wrapping:
    """Breaks text into lines as it comes. The last word is held back until its end is known.

    Spaces at a break are dropped. A word is broken only if it is wider than the terminal, or between the wide
    characters of scripts without spaces.
    """

    def __init__(self) -> None:
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._width = 0

    def add(self, text: str, columns: int) -> str:
        """What to print now that ``text`` has come.

        Args:
            columns: Width of the terminal; at least 1.
        """
        out = []
        for piece in _PIECES.findall(text):
            if piece[0] not in " \t\n":
                out += self._add_to_word(piece, columns)
                continue
            out.append(self._end_word(columns))
            if piece == "\n":
                out.append(f"{self._spaces}\n")
                self._column, self._spaces = 0, ""
            else:
                self._spaces += piece
        return "".join(out)

    def rest(self, columns: int) -> str:
        """What was held back, at the end of the text."""
        last = self._end_word(columns) + self._spaces
        self._spaces = ""
        return last

    def _add_to_word(self, piece: str, columns: int) -> list[str]:
        out = []
        for character in piece:
            width = _width(character)
            if self._word and (width == 2 or self._width + width > columns):
                out.append(self._end_word(columns))
            self._word += character
            self._width += width
        return out

    def _end_word(self, columns: int) -> str:
        word, width, spaces = self._word, self._width, self._spaces
        if not word:
            return ""
        self._word, self._width, self._spaces = "", 0, ""
        start = self._column
        for space in spaces:
            start += TAB - start % TAB if space == "\t" else 1
        if start > 0 and start + width > columns:
            spaces, start = "\n", 0
        self._column = start + width
        return spaces + word


def _width(character: str) -> int:
    """Columns that a character takes."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
