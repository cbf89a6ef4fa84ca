"""Quoted texts in calls that arrive in pieces."""

from __future__ import annotations


class Quotes:
    """Tells which characters belong to quoted texts, in which a backslash escapes the next character.

    Args:
        marks: The characters that begin a quoted text; the same one ends it.
    """

    def __init__(self, marks: str) -> None:
        self._marks, self._mark, self._escaped = marks, "", False

    def __bool__(self) -> bool:
        """Whether a quoted text has begun and not ended."""
        return bool(self._mark)

    def take(self, character: str) -> bool:
        """Whether the next character belongs to a quoted text, its marks included."""
        if not self._mark:
            self._mark = character if character in self._marks else ""
            return bool(self._mark)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == self._mark:
            self._mark = ""
        return True
