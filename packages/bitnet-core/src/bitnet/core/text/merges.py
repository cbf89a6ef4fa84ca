"""The merges of byte-pair encoding: listed one by one, or ranked by the scores of the tokens that they make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError, brief

MAX_WHOLE = 1 << 19
"""Maximum tokens plus merges of a vocabulary whose merges are listed as a whole: Llama 3 has 408,512. Building an
encoder of so many cannot be interrupted with Ctrl-C."""
MAX_CHARACTERS = 1 << 24
"""Maximum characters of all merges of such a vocabulary: three times those of the largest known."""

Rank: TypeAlias = "tuple[int, int]"
"""The priority of a merge: the smallest is merged first."""


class Merges(Protocol):
    """Which neighbours are merged into one token, and in which order."""

    def among(self, tokens: Collection[str]) -> list[tuple[str, str]] | None:
        """The merges that make any of the given tokens, in order of priority; None if there are too many."""

    def rank(self, left: str, right: str) -> Rank | None:
        """The priority of merging two neighbours; None: they are not merged."""


class ListedMerges:
    """Merges written as ``left right``, in order of priority.

    Args:
        ids: The id of each token.
        made: What :func:`made_tokens` returned for them, if it has been called.

    Raises:
        InvalidInputError: A merge does not have that form, or a part or the result is not a token.
    """

    def __init__(
        self, merges: Sequence[str], ids: Mapping[str, int], made: npt.NDArray[np.int32] | None = None
    ) -> None:
        self._merges, self._ids = merges, ids
        self._made = made_tokens(merges, ids) if made is None else made

    def among(self, tokens: Collection[str]) -> list[tuple[str, str]] | None:
        """The merges that make any of the tokens; None if all are wanted and they are too many."""
        merges = self._merges
        if tokens is not self._ids:
            wanted = np.zeros(int(self._made.max(initial=-1)) + 1, np.bool_)
            ids = np.array([self._ids[token] for token in tokens], np.intp)
            wanted[ids[ids < len(wanted)]] = True
            merges = [merges[place] for place in np.flatnonzero(wanted[self._made]).tolist()]
        elif len(tokens) + len(merges) > MAX_WHOLE:
            return None
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The place of each merge; the last one, if it is listed twice."""
        return {merge: place for place, merge in enumerate(self._merges)}

    def rank(self, left: str, right: str) -> Rank | None:
        """The place of a merge in the list."""
        place = self._ranks.get(f"{left} {right}")
        return None if place is None else (place, 0)


class ScoredMerges:
    """SentencePiece's merges: the neighbours whose joint token has the highest score are merged first.

    Every split of a token into two tokens is a merge. It is ranked by the token's score, then by its place in
    ``scores``, then by the length of its left part.
    """

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._scores = scores
        self._lengths = set(map(len, scores))

    def among(self, tokens: Collection[str]) -> list[tuple[str, str]] | None:
        """The merges that make any of the tokens; None if they, and the tokens, are too many."""
        scores = self._scores
        chosen = [token for token in scores if token in tokens]
        ways = _ways(chosen, scores, self._lengths)
        if ways is None or len(tokens) + sum(map(len, ways.values())) > MAX_WHOLE:
            return None
        made = sorted(filter(ways.__contains__, chosen), key=lambda token: -scores[token])
        return [pair for token in made for pair in ways[token]]

    @cached_property
    def _places(self) -> dict[str, int]:
        """The place of each token in the order of scores."""
        scores = self._scores
        return {token: place for place, token in enumerate(sorted(scores, key=lambda token: -scores[token]))}

    def rank(self, left: str, right: str) -> Rank | None:
        """The place of the joint token in the order of scores, and the length of the left part."""
        place = self._places.get(left + right)
        if place is None or left not in self._scores or right not in self._scores:
            return None
        return place, len(left)


def _ways(
    tokens: Collection[str], known: Collection[str], lengths: Collection[int]
) -> dict[str, list[tuple[str, str]]] | None:
    """For each token, its splits into one of the tokens and a known rest, shortest first.

    Args:
        lengths: Lengths of the known tokens.

    Returns:
        None if there are too many splits to try.
    """
    ways: dict[str, list[tuple[str, str]]] = {}
    open_ones: list[str] = []  # in sorted order, each token comes after all its prefixes
    count, characters = len(tokens), 0
    for token in sorted(tokens):
        while open_ones and not token.startswith(open_ones[-1]):
            open_ones.pop()
        count += len(open_ones)
        characters += len(open_ones) * len(token)
        if count > MAX_WHOLE * 2 or characters > MAX_CHARACTERS:
            return None
        for left in open_ones:
            if len(token) - len(left) in lengths and (right := token[len(left) :]) in known:
                ways.setdefault(token, []).append((left, right))
        open_ones.append(token)
    return ways


def made_tokens(merges: Sequence[str], ids: Mapping[str, int]) -> npt.NDArray[np.int32]:
    """The id of the token that each merge makes, ``int32[merges]``.

    Raises:
        InvalidInputError: A merge is not ``left right``, or a part or the result is not a token.
    """
    whole = [merge.replace(" ", "") for merge in merges]
    spaced = all(len(token) + 1 == len(merge) for token, merge in zip(whole, merges, strict=True))
    made = np.fromiter(map(ids.get, whole, repeat(-1)), np.int32, len(whole))
    if not (spaced and (made >= 0).all() and ids.keys() >= set(" ".join(merges).split(" "))):
        _check_each(merges, ids)
    return made


def _check_each(merges: Iterable[str], ids: Mapping[str, int]) -> None:
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2:
            raise InvalidInputError(f"hold {brief(merge)}, which is not two tokens separated by a space.")
        unknown = next((token for token in (*parts, "".join(parts)) if token not in ids), None)
        if unknown is not None:
            raise InvalidInputError(f"hold {brief(merge)}, but {brief(unknown)} is not a token.")
