"""Text to token ids and back. The library ``tokenizers`` does the byte-pair encoding, or Python where it is absent."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.gguf import GGUFFile
from bitnet.core.support.garbage import no_collection
from bitnet.core.text.literals import Literals
from bitnet.core.text.merge_index import indexed_tokens
from bitnet.core.text.merges import ListedMerges, Merges, ScoredMerges
from bitnet.core.text.vocabulary import KEY, TokenType, Vocabulary, vocabulary_from_metadata
from bitnet.core.text.words import SPACE, byte_characters

_MARKUP = re.compile(r"<[^<>\s]{1,100}>|\[/?[A-Z][A-Z_]*\]")
"""How control tokens look in chat templates."""
CALL_MARKS = frozenset(
    mark.encode()
    for mark in (
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call_start|>"),
        *("<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜"),
    )
)
"""Tokens that mark calls of tools. They are part of a text even where a file calls them control tokens, as calls are
read from the text."""


class Encoder(Protocol):
    """Byte-pair encoding of texts that hold no special tokens."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""

    def build(self) -> bool:
        """Prepare for long texts; False if the vocabulary is too large for that."""


class Encoders(Protocol):
    """Makes encoders: a module."""

    def byte_level(self, ids: Mapping[str, int], merges: Merges, pre: str) -> Encoder: ...

    def sentencepiece(
        self,
        ids: Mapping[str, int],
        merges: Merges,
        *,
        prepend: bool,
        unknown: Sequence[str],
        byte_tokens: Sequence[str],
    ) -> Encoder: ...


class Tokenizer:
    """A model's tokenizer.

    Args:
        vocabulary: Tokens, merges and special ids.
        size: Number of ids; None: one for each token. Models may embed, and generate, more ids than there are tokens.
        digest: A digest of everything that the vocabulary was read from, for an index of its merges on disk
            (:mod:`~bitnet.core.text.merge_index`); None: without one.

    Attributes:
        bos_id: Id that begins a sequence, if there is one.
        eos_ids: Ids that end an answer, such as end of text and end of turn.
        control_tokens: Names of the control tokens, which are not part of a text.

    Raises:
        InvalidInputError: The merges do not fit the tokens.
    """

    def __init__(
        self, vocabulary: Vocabulary, size: int | None = None, *, digest: Callable[[], bytes] | None = None
    ) -> None:
        self._tokens = vocabulary.tokens
        self._size = len(self._tokens) if size is None else size
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
        self.control_tokens = tuple(sorted(filter(None, (self._tokens[i] for i in self._special))))
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}  # with and without special tokens
        # By character, tokens in which it does not begin, and those in which it does, as far as known
        self._beginning: dict[str, tuple[set[int], set[int]]] = {}
        self._split_all = Literals(self._ids)
        self._split_user = Literals(self._tokens[i] for i in self._literal - self._special)
        control = self._special - of_kind(TokenType.UNKNOWN)
        self._backend: Encoder = (
            _byte_level(vocabulary, control, digest) if self._byte_level else _sentencepiece(vocabulary, control)
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._size

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: Add the begin (and end) token if the model expects them.
            parse_special: Recognise special tokens that are spelled out in the text, such as ``<|eot_id|>``. Use it for
                rendered chat templates, never for users' text.

        Raises:
            InvalidInputError: The text contains a lone surrogate, which is not a Unicode character.
        """
        _check(text)
        splitter = self._split_all if parse_special else self._split_user
        ids = self._encode(splitter.split(text))
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Token ids of texts with special tokens between them: parts with even index are texts, the others tokens.

        Raises:
            InvalidInputError: A text contains a lone surrogate.
        """
        cut: list[str] = []
        for i, part in enumerate(parts):
            _check(part)
            cut += [part] if i % 2 else self._split_user.split(part)
        return self._encode(cut)

    def _encode(self, parts: Sequence[str]) -> list[int]:
        """Token ids of alternating texts and special tokens."""
        ids: list[int] = []
        for i, plain in enumerate(self._backend.encode(parts[::2])):
            ids += plain
            ids += [self._ids[part] for part in parts[2 * i + 1 : 2 * i + 2]]
        return ids

    def prepare(self) -> bool:
        """Prepare for long texts; False if the vocabulary is too large for that, so that long texts stay slow."""
        return self._backend.build()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD."""
        stream = StreamDecoder(self, skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token; for special tokens their names, for ids without a token nothing.

        Raises:
            InvalidInputError: There is no such token.
        """
        if not 0 <= id < self._size:
            raise InvalidInputError(f"there is no token {id}; the vocabulary has {self._size} ids.")
        if id >= len(self._tokens):
            return b""
        token = self._tokens[id]
        if id in self._literal:
            return token.encode()
        if self._byte_level:
            table = _byte_of_character()
            return b"".join(table[c] if c in table else c.encode() for c in token)
        return self._byte[id] if id in self._byte else token.replace(SPACE, " ").encode()

    def plain_markup(self, template: str) -> list[str]:
        """Names of tokens that a chat template writes between brackets, but that text is not recognised as."""
        written = {*_MARKUP.findall(template)} - {*self._ids}
        names = [(i, token) for i, token in enumerate(self._tokens) if token in written] if written else []
        return [token for i, token in names if self.encode(token, add_special=False, parse_special=True) != [i]]

    def is_special(self, id: int) -> bool:
        """Whether an id is a control token, which text never becomes."""
        return id in self._special

    def is_hidden(self, id: int) -> bool:
        """Whether a token is left out of texts: a control token, unless it marks a call of a tool."""
        return id in self._special and self.token_bytes(id) not in CALL_MARKS


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the text holds {text[error.start]!r}, which is not a Unicode character.") from None


class StreamDecoder:
    """Decodes a stream of tokens; the text returned so far is always a prefix of the whole text.

    A character whose bytes are spread over several tokens is returned with the last one.

    Args:
        after: Tokens that the text continues. A continuation keeps its leading space.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._pieces = tokenizer._pieces[skip_special]
        self._strip = tokenizer._strip and all(map(tokenizer.is_special, after))
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *ids: int) -> str:
        """The text completed by further tokens; may be empty.

        Raises:
            InvalidInputError: There is no such token.
        """
        pieces = self._pieces
        try:
            data = b"".join([pieces[id] for id in ids])
        except KeyError:
            data = b"".join(map(self._piece, ids))
        if self._strip and data:  # the space that encoding prepends to a text
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def lacks(self, character: str, ids: Sequence[int]) -> bool:
        """Whether further tokens surely add no such character, by their bytes alone. Changes nothing.

        Raises:
            InvalidInputError: There is no such token.
        """
        if not character.isascii() and self._utf8.getstate()[0]:  # its first bytes may have come already
            return False
        known = self._tokenizer._beginning.get(character)
        if known is None:
            known = self._tokenizer._beginning[character] = set(), set()
        lacking, having = known
        if lacking.issuperset(ids):
            return True
        if having.isdisjoint(ids):
            first, token_bytes = character.encode()[:1], self._tokenizer.token_bytes
            for id in ids:
                (having if first in token_bytes(id) else lacking).add(id)
        return having.isdisjoint(ids)

    def _piece(self, id: int) -> bytes:
        """The bytes of a token within a text, cached."""
        if id not in self._pieces:
            data = self._tokenizer.token_bytes(id)
            self._pieces[id] = b"" if self._skip and self._tokenizer.is_hidden(id) else data
        return self._pieces[id]

    def flush(self) -> str:
        """The remaining text at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)


def tokenizer_from_gguf(file: GGUFFile, vocab_size: int) -> Tokenizer:
    """The tokenizer in a model file's metadata.

    Args:
        vocab_size: Rows of the model's embedding table.

    Raises:
        ModelFileError: It is missing, unsupported or broken, or has more tokens than the model.
    """
    vocabulary = vocabulary_from_metadata(file.metadata, lambda key, message: file.error(message, key=key))
    if len(vocabulary.tokens) > vocab_size:
        raise file.error(
            f"has {len(vocabulary.tokens)} tokens; the model has embeddings for {vocab_size}.", key=KEY + "tokens"
        )
    try:
        with no_collection():
            return Tokenizer(vocabulary, vocab_size, digest=file.metadata_digest)
    except InvalidInputError as error:
        raise file.error(error.message, key=KEY + ("merges" if vocabulary.model == "gpt2" else "tokens")) from error


def _byte(token: str) -> bytes:
    """The byte of a SentencePiece byte token such as ``<0x0A>``."""
    if not re.fullmatch("<0x[0-9A-F]{2}>", token):
        raise InvalidInputError(f"{brief(token)} is marked as a byte, but is not of the form <0x0A>.")
    return bytes([int(token[3:5], 16)])


def _byte_level(vocabulary: Vocabulary, control: Set[int], digest: Callable[[], bytes] | None) -> Encoder:
    """``control`` are ids that text must never become, even if merges lead to them."""
    ids = _ids_without(vocabulary.tokens, control)
    try:
        merges = ListedMerges(
            vocabulary.merges, ids, indexed_tokens(vocabulary.merges, ids, len(vocabulary.tokens), digest)
        )
    except InvalidInputError:  # rarely, merges lead to control tokens: leave those out
        never = {vocabulary.tokens[i] for i in control}
        pairs = [merge.split(" ", 1) for merge in vocabulary.merges]
        others = [pair for pair in pairs if never.isdisjoint([*pair, "".join(pair)])]
        merges = ListedMerges([" ".join(pair) for pair in others], ids)
    return encoders().byte_level(ids, merges, vocabulary.pre)


def _sentencepiece(vocabulary: Vocabulary, control: Set[int]) -> Encoder:
    """``control`` are ids that text must never become."""

    def of_kind(*wanted: TokenType) -> list[str]:
        return [tokens[i] for i, kind in enumerate(vocabulary.types) if kind in wanted and i not in control]

    tokens = vocabulary.tokens
    scores = {
        token: score
        for i, (token, score) in enumerate(zip(tokens, vocabulary.scores, strict=True))
        if vocabulary.types[i] == TokenType.NORMAL and i not in control
    }
    return encoders().sentencepiece(
        _ids_without(tokens, control),
        ScoredMerges(scores),
        prepend=vocabulary.space_prefix,
        unknown=of_kind(TokenType.UNKNOWN)[:1],
        byte_tokens=of_kind(TokenType.BYTE),
    )


def _ids_without(tokens: Sequence[str], control: Set[int]) -> dict[str, int]:
    """The last id of each token, without these ids."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        return {token: i for i, token in enumerate(tokens) if i not in control}
    for i in control:
        del ids[tokens[i]]
    return ids


def encoders() -> Encoders:
    """The module that encodes: :mod:`~bitnet.core.text.bpe_rust` where ``tokenizers`` is installed, else
    :mod:`~bitnet.core.text.bpe_python`."""
    if find_spec("tokenizers") is not None:
        from bitnet.core.text import bpe_rust

        return bpe_rust
    from bitnet.core.text import bpe_python

    return bpe_python


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, bytes]:
    return {character: bytes([byte]) for byte, character in byte_characters().items()}
