"""Finds tokens that are spelled out in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable

FEW = 64
"""Maximum distinct first characters of tokens for a search by regular expression; with more, every place is checked."""


class Literals:
    """Splits text at tokens, preferring the longest.

    A regular expression of all tokens would be shorter code, but takes half a minute to compile for 128,000 tokens with
    a common prefix. Here each token takes just one set entry.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(filter(None, tokens))
        lengths: dict[str, set[int]] = {}
        for token in self._tokens:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        heads = "".join(map(re.escape, lengths)) if len(lengths) <= FEW else ""
        self._head = re.compile(f"[{heads}]" if heads else "(?s:.)")

    def split(self, text: str) -> list[str]:
        """Parts of the text; those with odd index are tokens."""
        parts: list[str] = []
        begin = at = 0
        while self._tokens and (head := self._head.search(text, at)):
            at = head.start()
            for length in self._lengths.get(text[at], ()):
                if text[at : at + length] in self._tokens:
                    parts += [text[begin:at], text[at : at + length]]
                    begin = at = at + length
                    break
            else:
                at += 1
        return [*parts, text[begin:]]
