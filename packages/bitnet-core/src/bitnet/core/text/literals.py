"""Finding tokens that are written out in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable

FEW = 64
"""First characters of tokens up to which a regular expression looks for them; of more, each place is looked at."""


class Literals:
    """Cuts text at tokens, the longest first.

    A regular expression of all of them would be shorter, but takes half a minute to compile for 128,000 tokens with a
    common beginning. Here a token costs an entry of a set.
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
        """Parts of the text, the odd ones tokens."""
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
