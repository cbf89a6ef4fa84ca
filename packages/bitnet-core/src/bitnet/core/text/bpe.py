"""Byte-pair encoding by the ``tokenizers`` library, built for only the part of a vocabulary that a text needs.

Building a whole vocabulary of 128,000 tokens takes the library a third of a second, during which no other thread runs.
But merging a word only ever makes substrings of that word. So for a short text, the tokens among its substrings, and
their merges, give the same result and are built in a millisecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import TypeAlias

from tokenizers import Tokenizer, models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from bitnet.core.errors import InvalidInputError, brief

ENOUGH = 1 << 14
"""Characters, over all texts, encoded with partial vocabularies before the whole vocabulary is built."""
WHOLE = 1 << 19
"""Maximum tokens plus merges of a vocabulary that is built whole: Llama 3 has 408,512. The build cannot be interrupted
with Ctrl-C. A larger vocabulary is only ever built in parts, which is slower for many texts."""
CHARACTERS = 1 << 24
"""Maximum characters of all merges of such a vocabulary: three times those of the largest known."""
FEW = 256
"""If tokens have at most this many different lengths, all are tried at each place of a word; else only the lengths of
tokens that begin with the next two characters."""

Merges: TypeAlias = Callable[[Collection[str]], "list[tuple[str, str]] | None"]
"""Returns the merges that make any of the given tokens, in order of priority; None if there are too many."""


class BytePairs:
    """The byte-pair encoding of a vocabulary.

    Args:
        ids: The id of each token.
        merges: Its merges; their parts and results are tokens.
        cut: Splits text into words; None: the text is one word.
        normalize: Normalises text before it is split.
        always: Tokens that may occur although they are not substrings of the text: the unknown token and byte tokens.
        options: Options of the library's ``BPE``.
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
        self._lengths = sorted(set(map(len, ids)))
        self._encoded = 0
        self._whole: Tokenizer | None = None
        self._lengths_of: dict[str, list[int]] | None = None if len(self._lengths) <= FEW else _by_head(ids)
        self._parts_only = len(ids) > WHOLE

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        self._encoded += sum(map(len, texts))
        if self._encoded > ENOUGH:
            self.build()
        backend = self._whole or self._build(self._part(texts))
        if backend is None:
            raise InvalidInputError("the vocabulary has too many merges that could make this text.")
        return [backend.encode(text, add_special_tokens=False).ids if text else [] for text in texts]

    def build(self) -> bool:
        """Build the whole vocabulary unless it is built already; False if it is too large."""
        if self._whole is None and not self._parts_only:
            self._whole = self._build(self._ids)
            self._parts_only = self._whole is None
        return not self._parts_only

    def _build(self, ids: Mapping[str, int]) -> Tokenizer | None:
        """An encoder with these tokens; None if they have too many merges."""
        merges = self._merges(ids)
        if merges is None:
            return None
        # The library caches words per thread and model until the thread ends, long after the model was freed.
        backend = Tokenizer(models.BPE(dict(ids), merges, cache_capacity=0, **self._options))
        if self._cut is not None:
            backend.pre_tokenizer = self._cut
        if self._normalize is not None:
            backend.normalizer = self._normalize
        return backend

    def _part(self, texts: Sequence[str]) -> dict[str, int]:
        """The tokens that are substrings of a word of the texts, or would be after removal of characters without
        tokens.

        The library may drop such characters and then merge what they separated.
        """
        words = set()
        for text in texts:
            plain = text if self._normalize is None else self._normalize.normalize_str(text)
            words.update([plain] if self._cut is None else [word for word, _ in self._cut.pre_tokenize_str(plain)])
        ids, pieces = self._ids, words & self._ids.keys()
        for word in words:
            known = "".join(filter(ids.__contains__, word))
            pieces.update(known)
            for begin in range(len(known)):
                lengths = (
                    self._lengths if self._lengths_of is None else self._lengths_of.get(known[begin : begin + 2], [])
                )
                lengths = lengths[: bisect_right(lengths, len(known) - begin)]
                pieces.update(filter(ids.__contains__, (known[begin : begin + length] for length in lengths)))
        return self._always | {piece: ids[piece] for piece in pieces}


def _by_head(tokens: Iterable[str]) -> dict[str, list[int]]:
    """For each two characters, the lengths of the tokens that begin with them."""
    lengths: dict[str, set[int]] = {}
    for token in tokens:
        lengths.setdefault(token[:2], set()).add(len(token))
    return {head: sorted(found) for head, found in lengths.items()}


def listed_merges(merges: Sequence[str], ids: Mapping[str, int]) -> Merges:
    """Merges written as ``left right``, in order of priority.

    Raises:
        InvalidInputError: A merge does not have that form, or a part or the result is not a token.
    """
    made = [merge.replace(" ", "") for merge in merges]
    spaced = all(len(token) + 1 == len(merge) for token, merge in zip(made, merges, strict=True))
    if not (spaced and all(map(ids.__contains__, made)) and ids.keys() >= set(" ".join(merges).split(" "))):
        _check_each(merges, ids)

    def among(tokens: Collection[str]) -> list[tuple[str, str]] | None:
        if len(tokens) + len(merges) > WHOLE and tokens is ids:
            return None
        some = merges if tokens is ids else compress(merges, map(tokens.__contains__, made))
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in some)]

    return among


def scored_merges(scores: Mapping[str, float]) -> Merges:
    """SentencePiece's merges: the neighbours whose joint token has the highest score are merged first.

    Every split of a token into two tokens is a merge, ranked by the token's score, then by its place in ``scores``.
    """
    lengths = set(map(len, scores))

    def among(tokens: Collection[str]) -> list[tuple[str, str]] | None:
        chosen = [token for token in scores if token in tokens]
        ways = _ways(chosen, scores, lengths)
        if ways is None or len(tokens) + sum(map(len, ways.values())) > WHOLE:
            return None
        made = sorted(filter(ways.__contains__, chosen), key=lambda token: -scores[token])
        return [pair for token in made for pair in ways[token]]

    return among


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
        if count > WHOLE * 2 or characters > CHARACTERS:
            return None
        for left in open_ones:
            if len(token) - len(left) in lengths and (right := token[len(left) :]) in known:
                ways.setdefault(token, []).append((left, right))
        open_ones.append(token)
    return ways


def _check_each(merges: Iterable[str], ids: Mapping[str, int]) -> None:
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2:
            raise InvalidInputError(f"hold {brief(merge)}, which is not two tokens separated by a space.")
        unknown = next((token for token in (*parts, "".join(parts)) if token not in ids), None)
        if unknown is not None:
            raise InvalidInputError(f"hold {brief(merge)}, but {brief(unknown)} is not a token.")
