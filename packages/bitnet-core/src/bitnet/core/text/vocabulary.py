"""A tokenizer's data (tokens, merges, special ids) in GGUF metadata."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from bitnet.core.errors import brief
from bitnet.core.gguf import MetadataValue
from bitnet.core.support import log

KEY = "tokenizer.ggml."

MAX_TOKENS = 1 << 19
MAX_TOKEN = 512
MAX_MERGES = 3 << 18
"""Maximum tokens, characters of a token, and merges, which bound everything derived from a vocabulary. The largest
known vocabularies have 262,144 tokens, half a million merges, and tokens of 128 spaces."""

LLAMA3 = "llama-bpe"
GPT2 = "gpt-2"
OLMO = "olmo"
DEFAULT = "default"
QWEN2 = "qwen2"
QWEN35 = "qwen35"
HUNYUAN = "hunyuan-dense"
PRE_TOKENIZERS: Mapping[str, str] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "falcon_e"), LLAMA3),
    "gpt-2": GPT2,
    "default": DEFAULT,
    "olmo": OLMO,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "qwen35": QWEN35,
    "hunyuan-dense": HUNYUAN,
}
"""Names of pre-tokenizers in files, mapped to the seven that bitnet implements. ``olmo`` is GPT-2's after NFC, as in
the tokenizers of OLMo and TriLM, which are GPT-NeoX's. ``default`` is llama.cpp's own, of no model. ``falcon_e`` is
in files of Microsoft's fork of llama.cpp alone; conversion replaces it."""

HUNYUAN_END = "<\uff5chy_place\u2581holder\u2581no\u25812\uff5c>"
"""The token that ends an answer of HunYuan's models, whatever id a file names."""
END_OF_TURN = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"}
    | {HUNYUAN_END}
)
"""Tokens that end a model's answer in any vocabulary that has them; files name only one end token."""

NO_TOKEN = (-1, 2**32 - 1)
"""What files hold in place of the id of a token that there is not."""

MAX_LISTED_ENDS = 2
"""Maximum end tokens of other names that a file can list besides the end token, as ``eot`` and ``eom``."""


def excess(tokens: Sequence[str], merges: Sequence[object] = ()) -> str | None:
    """A message about the count that exceeds its limit, if any; checked before anything is derived from a
    vocabulary."""
    for found, most, what in ((len(tokens), MAX_TOKENS, "tokens"), (len(merges), MAX_MERGES, "merges")):
        if found > most:
            return f"has {found} {what}; the limit is {most}."
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_TOKEN:
        return f"has a token of {len(longest)} characters, {brief(longest)}; the limit is {MAX_TOKEN}."
    return None


class TokenType(IntEnum):
    """Kinds of tokens, numbered as in SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Everything a tokenizer is built from.

    Attributes:
        model: ``gpt2``: byte-level BPE with ``merges``; ``llama``: SentencePiece BPE with ``scores`` and byte fallback.
        pre: ``llama-bpe``, ``gpt-2``, ``default``, ``olmo``, ``qwen2``, ``qwen35`` or ``hunyuan-dense``, for ``gpt2``
            vocabularies.
        types: :class:`TokenType` of each token.
        merges: Pairs as ``left right``, in order of priority.
        end_ids: Further tokens that end an answer.
        space_prefix: Whether ``llama`` prepends a space to text.
    """

    model: Literal["gpt2", "llama"]
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    pre: str = LLAMA3
    bos_id: int | None = None
    eos_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = True

    @property
    def listed_ends(self) -> list[int]:
        """The further end tokens that a file must list, because their names do not identify them as end tokens."""
        others = self.end_ids - {self.eos_id, self.bos_id}
        return sorted(i for i in others if self.tokens[i] not in END_OF_TURN)

    def metadata(self) -> dict[str, MetadataValue]:
        """The GGUF keys for this vocabulary; they hold at most two of :attr:`listed_ends`."""
        ends = self.listed_ends or sorted(self.end_ids - {self.eos_id})[:1]
        values: dict[str, MetadataValue | None] = {
            "model": self.model,
            "pre": self.pre if self.model == "gpt2" else "default",
            "tokens": list(self.tokens),
            "token_type": np.array(self.types, np.int32),
            "merges": list(self.merges) if self.model == "gpt2" else None,
            "scores": np.array(self.scores, np.float32) if self.model == "llama" else None,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "eot_token_id": ends[0] if ends else None,
            "eom_token_id": ends[1] if len(ends) > 1 else None,
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "add_space_prefix": self.space_prefix if self.model == "llama" else None,
        }
        return {KEY + key: value for key, value in values.items() if value is not None}


def vocabulary_from_metadata(
    metadata: Mapping[str, MetadataValue], error: Callable[[str, str], Exception]
) -> Vocabulary:
    """Read a vocabulary from GGUF metadata.

    Args:
        error: Makes the error for a key (first argument) and a message (second argument).
    """
    read = _Reader(metadata, error)
    model = read.value("model", str)
    if model not in ("gpt2", "llama"):
        raise error(KEY + "model", f"{brief(model)} is not supported; supported are gpt2 and llama.")
    tokens = read.strings("tokens")
    if not tokens:
        raise error(KEY + "tokens", "is empty.")
    count = len(tokens)
    merges = read.strings("merges") if model == "gpt2" else []
    for key, wrong in (("tokens", excess(tokens)), ("merges", excess([], merges))):
        if wrong is not None:
            raise error(KEY + key, wrong)
    pre = read.value("pre", str, LLAMA3)  # the official file of 2B4T has no such key
    if model == "gpt2" and pre not in PRE_TOKENIZERS:
        raise error(KEY + "pre", f"{brief(pre)} is not supported; supported are {', '.join(PRE_TOKENIZERS)}.")
    pre = PRE_TOKENIZERS[pre] if model == "gpt2" else LLAMA3
    types = read.numbers("token_type", count, "iu", TokenType.NORMAL)
    ids = {key: read.identifier(key, count) for key in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")}
    if ids["eos_token_id"] is not None and HUNYUAN_END in tokens and types[ids["eos_token_id"]] == TokenType.NORMAL:
        named = f"{KEY}eos_token_id names the text {brief(tokens[ids['eos_token_id']])}"
        ids["eos_token_id"] = tokens.index(HUNYUAN_END)
        log.once(logging.WARNING, f"{named}: {HUNYUAN_END} ends answers instead.")
    ends = {i for i in ids.values() if i is not None} - {ids["bos_token_id"]}
    ends |= {i for i, token in enumerate(tokens) if token in END_OF_TURN}
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        merges=merges,
        scores=read.numbers("scores", count, "f", 0.0) if model == "llama" else [],
        pre=pre,
        bos_id=ids["bos_token_id"],
        eos_id=ids["eos_token_id"],
        end_ids=frozenset(ends),
        add_bos=read.value("add_bos_token", bool, model == "llama" or pre == LLAMA3),
        add_eos=read.value("add_eos_token", bool, False),
        space_prefix=read.value("add_space_prefix", bool, True),
    )


class _Reader:
    """Typed access to the ``tokenizer.ggml`` keys."""

    def __init__(self, metadata: Mapping[str, MetadataValue], error: Callable[[str, str], Exception]) -> None:
        self.metadata = metadata
        self.error = error

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(KEY + key, default)
        if type(value) is not kind:
            raise self.error(
                KEY + key, "is missing." if value is None else f"is {brief(value)}, not a {kind.__name__}."
            )
        return value

    def strings(self, key: str) -> list[str]:
        value = self.value(key, list)
        if value and not isinstance(value[0], str):
            raise self.error(KEY + key, "is not an array of strings.")
        return value  # type: ignore[no-any-return]

    def numbers(self, key: str, count: int, kinds: str, default: float) -> list[Any]:
        value = self.metadata.get(KEY + key)
        if value is None:
            return [default] * count
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != count:
            raise self.error(KEY + key, f"must be an array of {count} numbers, one for each token.")
        return value.tolist()  # type: ignore[no-any-return]

    def identifier(self, key: str, count: int) -> int | None:
        """A token's id; None if there is none. An id of no token counts as none, as in llama.cpp."""
        value = self.metadata.get(KEY + key)
        if value is None:
            return None
        if type(value) is not int:
            raise self.error(KEY + key, f"is {brief(value)}; it must be the id of one of the {count} tokens.")
        if 0 <= value < count:
            return value
        if value not in NO_TOKEN:
            log.once(logging.WARNING, f"{KEY}{key} is {value}, but there are {count} tokens: it is ignored.")
        return None
