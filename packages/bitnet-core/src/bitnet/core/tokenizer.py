"""Text to token ids and back, with the ``tokenizers`` library doing the byte-pair encoding."""

from __future__ import annotations

import codecs
import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.gguf import GGUFFile
from bitnet.core.vocabulary import KEY, LLAMA3, TokenType, Vocabulary, vocabulary_from_metadata

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of Llama 3's tokenizer.json."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class Tokenizer:
    """A model's tokenizer.

    Args:
        vocabulary: What it is built from.

    Attributes:
        bos_id: Id that begins a sequence, if there is one.
        eos_ids: Ids that end an answer: end of text, end of turn.

    Raises:
        InvalidInputError: The merges do not fit the tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._byte_level = vocabulary.model == "gpt2"
        self._strip = not self._byte_level and vocabulary.space_prefix
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.end_ids | ({vocabulary.eos_id} if vocabulary.eos_id is not None else set())
        self.bos_token = "" if self.bos_id is None else self._tokens[self.bos_id]
        self.eos_token = "" if vocabulary.eos_id is None else self._tokens[vocabulary.eos_id]
        self._prefix = [self.bos_id] if vocabulary.add_bos and self.bos_id is not None else []
        self._suffix = [vocabulary.eos_id] if vocabulary.add_eos and vocabulary.eos_id is not None else []
        kinds = np.array(vocabulary.types)

        def of_kind(*wanted: TokenType) -> set[int]:
            return set(np.flatnonzero(np.isin(kinds, wanted)).tolist())

        self._special = of_kind(TokenType.CONTROL, TokenType.UNKNOWN) | self.eos_ids | {*self._prefix}
        self._literal = self._special | of_kind(TokenType.USER_DEFINED)
        self._byte = {i: _byte(self._tokens[i]) for i in of_kind(TokenType.BYTE)}
        self._ids = {self._tokens[i]: i for i in self._literal}
        self._split_all = _splitter(self._ids)
        self._split_user = _splitter(self._tokens[i] for i in self._literal - self._special)
        self._backend = _byte_level(vocabulary) if self._byte_level else _sentencepiece(vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: Put the begin (and end) token around it where the model wants them.
            parse_special: Read special tokens written out in the text, such as ``<|eot_id|>``, as these tokens. For
                rendered chat templates; never for text of users.

        Raises:
            InvalidInputError: The text holds a lone surrogate, which is no Unicode character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"the text holds {text[error.start]!r}, which is no Unicode character.") from None
        splitter = self._split_all if parse_special else self._split_user
        ids = list(self._prefix) if add_special else []
        for i, part in enumerate(splitter.split(text) if splitter else [text]):
            if i % 2:
                ids.append(self._ids[part])
            elif part:
                ids += self._backend.encode(part, add_special_tokens=False).ids
        return ids + self._suffix if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        stream = StreamDecoder(self, skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for; special ones stand for their names.

        Raises:
            InvalidInputError: There is no such token.
        """
        if not 0 <= id < len(self._tokens):
            raise InvalidInputError(f"there is no token {id}; the vocabulary has {len(self._tokens)}.")
        token = self._tokens[id]
        if id in self._literal:
            return token.encode()
        if self._byte_level:
            table = _byte_of_character()
            return b"".join(table[c] if c in table else c.encode() for c in token)
        return self._byte[id] if id in self._byte else token.replace(SPACE, " ").encode()

    def is_special(self, id: int) -> bool:
        """Whether a token is a control token, which is not part of the text."""
        return id in self._special


class StreamDecoder:
    """Decodes tokens as they come; what it returned so far is always a prefix of the whole text.

    A character whose bytes are spread over several tokens is returned with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._strip = tokenizer._strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that one more token completes; may be empty.

        Raises:
            InvalidInputError: There is no such token.
        """
        data = self._tokenizer.token_bytes(id)
        if self._skip and self._tokenizer.is_special(id):
            return ""
        if self._strip and data:  # the space that encoding put before the text
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)


def tokenizer_from_gguf(file: GGUFFile, vocab_size: int) -> Tokenizer:
    """The tokenizer in a model file's metadata.

    Args:
        vocab_size: Rows of the model's embedding table.

    Raises:
        ModelFileError: It is missing, not supported, broken, or has more tokens than the model.
    """
    vocabulary = vocabulary_from_metadata(file.metadata, lambda key, message: file.error(message, key=key))
    if len(vocabulary.tokens) > vocab_size:
        raise file.error(f"has {len(vocabulary.tokens)} tokens; the model embeds {vocab_size}.", key=KEY + "tokens")
    try:
        with _no_collection():
            return Tokenizer(vocabulary)
    except InvalidInputError as error:
        raise file.error(error.message, key=KEY + ("merges" if vocabulary.model == "gpt2" else "tokens")) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no cycles be looked for among the hundreds of thousands of tuples of a vocabulary: a sixth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _byte(token: str) -> bytes:
    """The byte that a SentencePiece byte token such as ``<0x0A>`` stands for."""
    if not re.fullmatch("<0x[0-9A-F]{2}>", token):
        raise InvalidInputError(f"{brief(token)} is marked as a byte, but is not of the form <0x0A>.")
    return bytes([int(token[3:5], 16)])


def _splitter(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Cuts text at tokens that are written out in it, longest first; they are the odd parts of ``split``."""
    alternatives = "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True)))
    return re.compile(f"({alternatives})") if alternatives else None


def _backend(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: bool | str) -> tokenizers.Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(ids, merges, **options))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidInputError(f"do not make a byte-pair encoding: {brief(str(error))}.") from error


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    merges: list[Any] = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise InvalidInputError(f"hold {brief(' '.join(wrong))}, which is not two tokens with a space between.")
    backend = _backend(vocabulary, merges, ignore_merges=vocabulary.pre == LLAMA3)
    backend.pre_tokenizer = word_cutter(vocabulary.pre)
    return backend


def word_cutter(pre: str) -> pre_tokenizers.PreTokenizer:
    """What cuts text into words before byte-level encoding, the way ``pre`` names."""
    if pre != LLAMA3:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_WORDS), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    # SentencePiece merges the neighbours whose joint piece has the best score: every way to cut a piece in two is a
    # merge, ranked by the piece's score.
    score = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        if kind == TokenType.NORMAL
    }
    merges = [
        (-score[piece], (piece[:cut], piece[cut:]))
        for piece in score
        for cut in range(1, len(piece))
        if piece[:cut] in score and piece[cut:] in score
    ]
    merges.sort(key=lambda merge: merge[0])
    unknown = next(
        (t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.UNKNOWN), None
    )
    options: dict[str, bool | str] = {} if unknown is None else {"unk_token": unknown}
    backend = _backend(vocabulary, [pair for _, pair in merges], byte_fallback=True, fuse_unk=True, **options)
    replace = normalizers.Replace(" ", SPACE)
    prepend = [normalizers.Prepend(SPACE)] if vocabulary.space_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, replace])
    return backend


@lru_cache(maxsize=1)
def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, bytes]:
    return {character: bytes([byte]) for byte, character in byte_characters().items()}
