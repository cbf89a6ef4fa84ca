"""Byte-pair encoding in Python, where the library ``tokenizers`` is not installed, as in a browser.

It gives the same tokens as :mod:`bitnet.core.text.bpe_rust`. The tokens of words are kept, so that most words of a text
are looked up.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

from bitnet.core.text.cutting import word_cutter
from bitnet.core.text.merges import Merges
from bitnet.core.text.words import COMPOSED, SPACE, WHOLE_WORDS

_ENDED = re.compile(f"[^{SPACE}]{SPACE}")
_SPACED = re.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")
"""Spaces with what follows them: the words of most SentencePiece vocabularies."""
MAX_CACHED = 1 << 15
"""Maximum number of words whose tokens are kept."""
MAX_CACHED_LENGTH = 64
"""Maximum characters of such a word."""


class BytePairs:
    """The byte-pair encoding of a vocabulary.

    Args:
        ids: The id of each token.
        merges: Its merges; their parts and results are tokens.
        cut: Splits text into words; None: the text is one word.
        normalize: Normalises text before it is split.
        ignore_merges: Whether a word that is a token stays whole, whatever the merges say.
        byte_fallback: Whether the byte tokens of a character that has no token stand for it.
        unk_token: The token for a run of other characters without tokens; None: they are dropped.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        merges: Merges,
        *,
        cut: Callable[[str], list[str]] | None = None,
        normalize: Callable[[str], str] | None = None,
        ignore_merges: bool = False,
        byte_fallback: bool = False,
        unk_token: str | None = None,
    ) -> None:
        self._ids, self._merges = ids, merges
        self._cut, self._normalize = cut, normalize
        self._ignore_merges, self._byte_fallback, self._unknown = ignore_merges, byte_fallback, unk_token
        self._cached: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        return list(map(self._encode, texts))

    def build(self) -> bool:
        """Build what encoding needs; it is built with the first text anyway."""
        self._merges.rank("", "")
        return True

    def _encode(self, text: str) -> list[int]:
        if text and self._normalize is not None:
            text = self._normalize(text)
        if self._cut is None:
            return self._word(text)
        ids: list[int] = []
        cached = self._cached
        for word in self._cut(text):
            known = cached.get(word)
            if known is None:
                known = self._word(word)
                if len(word) <= MAX_CACHED_LENGTH:
                    if len(cached) >= MAX_CACHED:
                        cached.clear()
                    cached[word] = known
            ids += known
        return ids

    def _word(self, word: str) -> list[int]:
        ids = self._ids
        if self._ignore_merges and word in ids:
            return [ids[word]]
        return [ids[symbol] for symbol in merged(self._symbols(word), self._merges)]

    def _symbols(self, word: str) -> list[str]:
        """The tokens of a word's characters.

        As in ``tokenizers``, the unknown token of a run of characters comes just before the next character that has a
        token, even if byte tokens came in between.
        """
        ids, unknown, pending = self._ids, self._unknown, False
        if all(map(ids.__contains__, word)):
            return list(word)
        symbols: list[str] = []
        for character in word:
            if character in ids:
                if pending and unknown is not None:
                    symbols.append(unknown)
                pending = False
                symbols.append(character)
                continue
            spelled = [f"<0x{byte:02X}>" for byte in character.encode()] if self._byte_fallback else []
            if spelled and all(map(ids.__contains__, spelled)):
                symbols += spelled
            else:
                pending = True
        if pending and unknown is not None:
            symbols.append(unknown)
        return symbols


def merged(symbols: list[str], merges: Merges) -> list[str]:
    """The symbols after all merges: each time the pair of the smallest rank, the leftmost of equals."""
    rank, end = merges.rank, len(symbols)
    following, before = [*range(1, end + 1)], [*range(-1, end)]
    heap = [
        (found, at, symbols[at] + symbols[at + 1])
        for at in range(end - 1)
        if (found := rank(symbols[at], symbols[at + 1])) is not None
    ]
    heapify(heap)
    while heap:
        _, at, joint = heappop(heap)
        right = following[at]
        if right == end or not symbols[at] or symbols[at] + symbols[right] != joint:
            continue  # one of the two was merged meanwhile
        symbols[at], symbols[right] = joint, ""
        following[at] = after = following[right]
        before[after] = at
        left = before[at]
        if left >= 0 and (found := rank(symbols[left], joint)) is not None:
            heappush(heap, (found, left, symbols[left] + joint))
        if after < end and (found := rank(joint, symbols[after])) is not None:
            heappush(heap, (found, at, joint + symbols[after]))
    return list(filter(None, symbols))


def byte_level(ids: Mapping[str, int], merges: Merges, pre: str) -> BytePairs:
    """The encoder of a byte-level vocabulary whose pre-tokenizer is ``pre``."""
    normalize = partial(unicodedata.normalize, "NFC") if pre in COMPOSED else None
    return BytePairs(ids, merges, cut=word_cutter(pre), normalize=normalize, ignore_merges=pre in WHOLE_WORDS)


def sentencepiece(
    ids: Mapping[str, int], merges: Merges, *, prepend: bool, unknown: Sequence[str], byte_tokens: Iterable[str]
) -> BytePairs:
    """The encoder of a SentencePiece vocabulary.

    Args:
        prepend: Whether text gets a space before it.
        unknown: The token that stands for what has no token; empty: there is none.
        byte_tokens: Tokens that stand for bytes; they are found by their names.
    """
    begin = SPACE if prepend else ""
    apart = SPACE in ids and not any(map(_ENDED.search, ids))  # no token goes on after a space that follows something
    return BytePairs(
        ids,
        merges,
        cut=_SPACED.findall if apart else None,
        normalize=lambda text: begin + text.replace(" ", SPACE),
        byte_fallback=True,
        unk_token=unknown[0] if unknown else None,
    )
