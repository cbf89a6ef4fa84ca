"""Reads the vocabulary in SentencePiece's ``tokenizer.model``, and the tokens that a Hugging Face folder adds to it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bitnet.core.errors import ModelFileError
from bitnet.core.model.safetensors import MAX_JSON, optional_json, read_bytes
from bitnet.core.support.foreign import label
from bitnet.core.support.log import logger
from bitnet.core.text.vocabulary import MAX_TOKENS, TokenType, Vocabulary
from bitnet.core.text.words import SPACE

MAX_FIELDS = 256
"""Maximum fields of a protocol buffer message, besides a vocabulary's pieces; SentencePiece's messages have about
50."""
CONTROL_NAME = re.compile(r"<[|｜].+[|｜]>")
"""Pattern of control tokens' names, used if a folder does not say what kind an added token is."""


def read_sentencepiece(path: Path) -> Vocabulary:
    """The vocabulary in SentencePiece's own file, with the tokens that the files beside it add.

    The file is a protocol buffer (``sentencepiece_model.proto``): pieces, and how text is prepared.

    Raises:
        ModelFileError: The file is broken, or a GGUF file cannot describe the vocabulary.
    """
    try:
        data = read_bytes(path, MAX_JSON)
        tokens, scores, types = [], [], []
        trainer, normalizer = dict[int, bytes | int](), dict[int, bytes | int]()
        for number, value in list(_fields(data, MAX_TOKENS + MAX_FIELDS)):  # count the fields before reading any piece
            if number == 1 and isinstance(value, bytes):  # ModelProto.pieces
                piece = dict(_fields(value))
                tokens.append(piece[1].decode())  # type: ignore[union-attr]
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])  # type: ignore[arg-type]
                types.append(int(TokenType(int(piece.get(3, TokenType.NORMAL)))))
            elif number == 2 and isinstance(value, bytes):  # trainer_spec
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):  # normalizer_spec
                normalizer = dict(_fields(value))
        algorithm, prefix = int(trainer.get(3, 1)), bool(normalizer.get(3, 1))  # model_type, add_dummy_prefix
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelFileError(f"is not a SentencePiece model: {error}.", path=path) from error
    if algorithm != 2 or not tokens:
        raise ModelFileError("is not a byte-pair encoding, the only supported kind.", path=path, field="model_type")
    if normalizer.get(2):  # precompiled_charsmap
        raise _changes_text(path, "replaces characters")
    if normalizer.get(4, 1):  # remove_extra_whitespaces
        raise _changes_text(path, "removes spaces")
    for i, (token, kind) in sorted(_added(path.parent).items()):
        for unused in range(len(tokens), i + 1):
            tokens.append(f"[PAD{unused}]")
            scores.append(0.0)
            types.append(int(TokenType.UNUSED))
        if tokens[i] != token or types[i] == TokenType.NORMAL:
            tokens[i], types[i] = token, int(kind)
    written = [i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED]
    for i in written:  # these are matched in the unmodified text
        tokens[i] = tokens[i].replace(SPACE, " ")
    return Vocabulary("llama", tokens, types, merges=[], scores=scores, space_prefix=prefix)


def _changes_text(path: Path, how: str) -> ModelFileError:
    return ModelFileError(
        f"{how} before it encodes a text, for which GGUF files have no key.",
        path=path,
        field="normalizer_spec",
        hint="If transformers' tokenizer of this model does not, save it with transformers 4 and legacy=True: "
        "then its tokenizer.json is used.",
    )


def _added(folder: Path) -> dict[int, tuple[str, TokenType]]:
    """Added tokens by id, from ``added_tokens.json``, overridden by the more detailed ``tokenizer_config.json``."""
    listed = optional_json(folder / "added_tokens.json")
    if not all(type(i) is int and 0 <= i < MAX_TOKENS for i in listed.values()):
        raise ModelFileError("must map each token to an id.", path=folder / "added_tokens.json")
    settings = optional_json(folder / "tokenizer_config.json")
    special = {*_named(settings), *_named(optional_json(folder / "special_tokens_map.json"))}

    def kind(token: str, *, control: bool) -> TokenType:
        return TokenType.CONTROL if control or token in special else TokenType.USER_DEFINED

    added = {i: (token, kind(token, control=bool(CONTROL_NAME.fullmatch(token)))) for token, i in listed.items()}
    greedy: list[str] = []
    described = settings.get("added_tokens_decoder") or {}
    try:
        for key, entry in described.items():
            i, token = int(key), entry["content"]
            if not (0 <= i < MAX_TOKENS and isinstance(token, str)):
                raise ValueError(key)
            added[i] = (token, kind(token, control=entry.get("special") is True))
            if any(entry.get(flag) is True for flag in ("lstrip", "rstrip", "single_word")):
                greedy.append(token)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            "must map each id to a token.", path=folder / "tokenizer_config.json", field="added_tokens_decoder"
        ) from error
    warn_of_greedy(folder, greedy)
    return added


def warn_of_greedy(path: Path, tokens: Sequence[str]) -> None:
    """Warn of added tokens that take the blanks beside them, or are found only between blanks."""
    if tokens:
        some = ", ".join(map(label, tokens[:3])) + (f" and {len(tokens) - 3} more" if len(tokens) > 3 else "")
        logger.warning(
            "%s: GGUF files have no key for lstrip, rstrip and single_word of added tokens. Blanks beside %s will be "
            "tokens of their own, unlike in transformers.",
            path,
            some,
        )


def _named(settings: dict[str, Any]) -> Iterator[str]:
    """The tokens to which the settings assign a role, such as ``eos_token`` and ``additional_special_tokens``."""
    for key, value in settings.items():
        if key.endswith(("_token", "_special_tokens")):
            for token in value if isinstance(value, list) else [value]:
                name = token.get("content") if isinstance(token, dict) else token
                if isinstance(name, str):
                    yield name


def _fields(data: bytes, most: int = MAX_FIELDS) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of every field of a protocol buffer message; fixed32 values are their four bytes."""
    at = count = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError(f"it is cut off at byte {at}")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        count += 1
        if count > most:
            raise ValueError(f"it has more than {most} fields")
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            if kind != 2:
                raise ValueError(f"field {key >> 3} has the unknown wire type {kind}")
            size = varint()
        if size > len(data) - at:
            raise ValueError(f"field {key >> 3} is cut off at byte {at}")
        yield key >> 3, data[at : at + size]
        at += size
