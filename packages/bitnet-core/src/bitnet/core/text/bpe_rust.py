"""Byte-pair encoding by the library ``tokenizers``, built for only the part of a vocabulary that a text needs.

Building a whole vocabulary of 128,000 tokens takes the library a third of a second, during which no other thread runs.
But merging a word only ever makes substrings of that word. So for a short text, the tokens among its substrings, and
their merges, give the same result and are built in a millisecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from bitnet.core.errors import InvalidInputError
from bitnet.core.text.merges import MAX_WHOLE, Merges
from bitnet.core.text.words import COMPOSED, GPT2_WORDS, PATTERNS, SPACE, WHOLE_WORDS

ENOUGH = 1 << 14
"""Characters, over all texts, encoded with partial vocabularies before the whole vocabulary is built."""
FEW = 256
"""If tokens have at most this many different lengths, all are tried at each place of a word; else only the lengths of
tokens that begin with the next two characters."""


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
        self._parts_only = len(ids) > MAX_WHOLE

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
        merges = self._merges.among(ids)
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


def byte_level(ids: Mapping[str, int], merges: Merges, pre: str) -> BytePairs:
    """The encoder of a byte-level vocabulary whose pre-tokenizer is ``pre``."""
    normalize = normalizers.NFC() if pre in COMPOSED else None
    return BytePairs(ids, merges, cut=word_cutter(pre), normalize=normalize, ignore_merges=pre in WHOLE_WORDS)


def sentencepiece(
    ids: Mapping[str, int], merges: Merges, *, prepend: bool, unknown: Sequence[str], byte_tokens: Iterable[str]
) -> BytePairs:
    """The encoder of a SentencePiece vocabulary.

    Args:
        prepend: Whether text gets a space before it.
        unknown: The token that stands for what has no token; empty: there is none.
        byte_tokens: Tokens that stand for bytes.
    """
    steps = [normalizers.Prepend(SPACE)] if prepend else []
    options: dict[str, Any] = {"unk_token": unknown[0]} if unknown else {}
    return BytePairs(
        ids,
        merges,
        normalize=normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)]),
        always=[*unknown, *byte_tokens],
        byte_fallback=True,
        fuse_unk=True,
        **options,
    )


def word_cutter(pre: str) -> PreTokenizer:
    """The pre-tokenizer named ``pre``, which splits text into words before byte-level encoding."""
    patterns = PATTERNS[pre]
    if patterns == (GPT2_WORDS,):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
