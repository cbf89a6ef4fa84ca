"""A text that an answer may resemble, such as the file that it changes: drafts the next tokens from it.

The draft goes on where the answer has followed the prediction so far. After a difference, the last tokens of the answer
are looked up in the prediction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

NGRAMS = (3, 2)
"""Lengths of the n-grams that are searched for, in order."""


class Prediction:
    """The tokens of a prediction, and how far an answer has followed them.

    Args:
        tokens: The prediction's tokens.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._next: int | None = 0  # position of the token that is to follow; None: the answer has left the prediction
        self._last = 0  # the position at which the answer left it
        self._after: dict[tuple[int, ...], list[int]] = {}
        for n in NGRAMS:
            for end in range(n, len(self._tokens)):
                self._after.setdefault(tuple(self._tokens[end - n : end]), []).append(end)

    def follow(self, tokens: Sequence[int]) -> None:
        """Compare the next tokens of the answer."""
        for token in tokens:
            if self._next is None:
                return
            if self._next < len(self._tokens) and self._tokens[self._next] == token:
                self._next += 1
            else:
                self._last, self._next = self._next, None

    def draft(self, text: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``text``, which ends with all that has been compared.

        After a difference, they come from the first place at or behind it that the last tokens match, or from the
        last place before it.
        """
        if self._next is None:
            places = next(filter(None, (self._after.get(tuple(text[-n:])) for n in NGRAMS)), None)
            if places is None:
                return []
            self._next = places[min(bisect_left(places, self._last), len(places) - 1)]
        return self._tokens[self._next : self._next + most]
