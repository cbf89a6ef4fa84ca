"""Byte-pair encoding by the ``tokenizers`` library, of as much of a vocabulary as a text can need.

To build the whole of a vocabulary of 128,000 tokens takes the library a third of a second, in which no other thread
runs. But what a word is merged into are strings that stand in the word: for a short text, the tokens and the merges
among those strings are enough, give the same result, and are built in a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import TypeAlias

from tokenizers import Tokenizer, models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from bitnet.core.errors import InvalidInputError, brief

ENOUGH = 1 << 14
"""Characters encoded by parts of the vocabulary, over all texts, before the whole is built."""
LONGEST = 256
"""Characters of the longest token of a vocabulary of which parts are taken: that many strings begin at each place of a
word. Llama 3's has 128."""

Merges: TypeAlias = Callable[[Collection[str]], list[tuple[str, str]]]
"""The merges that make one of the given tokens, first merged first."""


class BytePairs:
    """The byte-pair encoding of a vocabulary.

    Args:
        ids: The id of each token.
        merges: Its merges; their parts and what they make are tokens.
        cut: Cuts text into words; None: all of it is one.
        normalize: Rewrites text before that.
        always: Tokens that stand for what is not in a text: the unknown one, those of bytes.
        options: Of the library's ``BPE``.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        merges: Merges,
        *,
        cut: PreTokenizer | None = None,
        normalize: Normalizer | None = None,
        always: Iterable[str] = (),
        **options: bool | str,
    ) -> None:
        self._ids, self._merges = ids, merges
        self._cut, self._normalize = cut, normalize
        self._always = {token: ids[token] for token in always}
        self._options = options
        self._longest = max(map(len, ids))
        self._encoded = 0
        self._whole: Tokenizer | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        self._encoded += sum(map(len, texts))
        if self._whole is None and (self._encoded > ENOUGH or self._longest > LONGEST):
            self._whole = self._build(self._ids)
        backend = self._whole or self._build(self._part(texts))
        return [backend.encode(text, add_special_tokens=False).ids if text else [] for text in texts]

    def _build(self, ids: Mapping[str, int]) -> Tokenizer:
        backend = Tokenizer(models.BPE(dict(ids), self._merges(ids), **self._options))
        if self._cut is not None:
            backend.pre_tokenizer = self._cut
        if self._normalize is not None:
            backend.normalizer = self._normalize
        return backend

    def _part(self, texts: Sequence[str]) -> dict[str, int]:
        """The tokens that stand in a word of the texts, or would if it had no characters that are no tokens.

        The library may leave such characters out, so that what they parted is merged.
        """
        words = set()
        for text in texts:
            plain = text if self._normalize is None else self._normalize.normalize_str(text)
            words.update([plain] if self._cut is None else [word for word, _ in self._cut.pre_tokenize_str(plain)])
        ids, pieces = self._ids, words & self._ids.keys()
        for word in words:
            known = "".join(filter(ids.__contains__, word))
            for begin in range(len(known)):
                most = min(len(known), begin + self._longest)
                pieces.update(filter(ids.__contains__, (known[begin:end] for end in range(begin + 1, most + 1))))
        return self._always | {piece: ids[piece] for piece in pieces}


def listed_merges(merges: Sequence[str], ids: Mapping[str, int]) -> Merges:
    """Merges written as ``left right``, first merged first.

    Raises:
        InvalidInputError: One is not of that form, or its parts or what it makes is no token.
    """
    made = [merge.replace(" ", "") for merge in merges]
    spaced = all(len(token) + 1 == len(merge) for token, merge in zip(made, merges, strict=True))
    if not (spaced and all(map(ids.__contains__, made)) and ids.keys() >= set(" ".join(merges).split(" "))):
        _check_each(merges, ids)

    def among(tokens: Collection[str]) -> list[tuple[str, str]]:
        some = merges if tokens is ids else compress(merges, map(tokens.__contains__, made))
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in some)]

    return among


def scored_merges(scores: Mapping[str, float]) -> Merges:
    """SentencePiece's: the neighbours whose joint token scores best are merged first.

    Every way to cut a token in two is a merge, ranked by the token's score, then by its place in ``scores``.
    """

    def among(tokens: Collection[str]) -> list[tuple[str, str]]:
        ranked = [
            (-scores[token], (token[:cut], token[cut:]))
            for token in scores
            if token in tokens
            for cut in range(1, len(token))
            if token[:cut] in scores and token[cut:] in scores
        ]
        ranked.sort(key=lambda merge: merge[0])
        return [pair for _, pair in ranked]

    return among


def _check_each(merges: Iterable[str], ids: Mapping[str, int]) -> None:
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2:
            raise InvalidInputError(f"hold {brief(merge)}, which is not two tokens with a space between.")
        unknown = next((token for token in (*parts, "".join(parts)) if token not in ids), None)
        if unknown is not None:
            raise InvalidInputError(f"hold {brief(merge)}, but {brief(unknown)} is no token.")
