"""Bombs in Hugging Face folders: configuration, tokenizer, checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from bombs.base import BYTE_TOKENS, LFS_POINTER, Folder, safetensors
from bombs.family import FOLDER_DOORS, Family

MB = 1 << 20
GREATEST = 2**31 - 1
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def families() -> Iterator[Family]:
    """Every family of this file."""
    for name, make, refused in _all():
        yield Family(f"convert: {name}", make, refused, FOLDER_DOORS)


def _all() -> Iterator[tuple[str, Callable[[Path], Path], str | None]]:
    yield "sound", _config(), None
    yield "vocab_size of 2^31", _config(vocab_size=GREATEST), "the limit is"
    linear = {"rope_type": "linear", "factor": 2.0}
    yield "head_dim of 2^31, linear scaling", _config(head_dim=GREATEST - 1, rope_scaling=linear), "head_dim"
    yield "head_dim of 2^29, llama3 scaling", _config(head_dim=2**29, rope_scaling=LLAMA3_SCALING), "head_dim"
    yield "head_dim of 1024, linear scaling", _config(head_dim=1024, rope_parameters=linear), "it must be"
    yield "2^31 layers", _config(num_hidden_layers=GREATEST), "is missing"
    yield "2^31 heads", _config(num_attention_heads=2**30), "head"
    yield "hidden_size of 2^31", _config(hidden_size=GREATEST - 3), "head_dim"
    yield "feed-forward of 2^31", _config(intermediate_size=GREATEST), "intermediate_size"
    yield "config.json of 60 MB", _file("config.json", lambda: b"[" + b"0," * (30 * MB) + b"0]"), "bytes"
    yield "config.json in brackets", _file("config.json", lambda: b"[" * MB), "JSON"
    yield (
        "config.json with a number of a million digits",
        _file("config.json", lambda: b'{"a":' + b"9" * MB + b"}"),
        "JSON",
    )
    yield "a header of 700,000 entries", _header(lambda: {f"{i}": {} for i in range(700_000)}), "header"
    yield "a header that is all brackets", _file("model.safetensors", _brackets), "JSON"
    yield "a header of 2^60 bytes", _file("model.safetensors", lambda: struct.pack("<Q", 2**60) + bytes(64)), "header"
    yield "an index of 300,000 names", _file("model.safetensors.index.json", _index), "bytes"
    yield "an empty tensor of 2^62 columns", _header(_empty), "shape"
    yield "a normalizer that doubles spaces", _tokenizer(normalizer=_doubling()), "normalizer"
    yield "a normalizer with long content", _tokenizer(normalizer=_replace(" ", "x" * MB)), "normalizer"
    yield "a prefix of a megabyte", _tokenizer(normalizer={"type": "Prepend", "prepend": "x" * MB}), "normalizer"
    yield "padding to 2^31", _tokenizer(padding=_padding()), None
    yield "truncation to 0", _tokenizer(truncation=_truncation()), None
    yield "words cut by a hostile expression", _tokenizer(pre_tokenizer=_split(r"(\w+\s?)+#")), "pre_tokenizer"
    yield "words cut by many stars", _tokenizer(pre_tokenizer=_split(".*" * 12 + "#")), "pre_tokenizer"
    yield "words cut by a panic", _tokenizer(pre_tokenizer=_split(r"([ -}]|[ -}][ -}])+[~]")), "pre_tokenizer"
    yield "pre-tokenizers in pre-tokenizers", _nested_pre_tokenizers, "tokenizer"
    yield "added tokens with a shared prefix", _added(20_000), None
    yield "added tokens beside many others", _added(30_000, 20_000), None
    yield "an added token of a megabyte", _one_added("x" * MB), "characters"
    yield "an added token with id 2^31", _one_added("x", GREATEST), None
    yield "a token of a megabyte", _vocabulary(lambda: ["x" * MB]), "characters"
    runs = _vocabulary(lambda: ["a" * n for n in range(2, 500)], byte_fallback=True)
    yield "runs of a letter", runs, "too many merges"
    yield "a million merges", _tokenizer_model(merges=[["a", "b"]] * MB), "merges"
    yield "a merge of no tokens", _tokenizer_model(merges=[["a" * MB, "b"]]), "is not a tokenizer"
    yield (
        "a tokenizer of another kind",
        _tokenizer_model(type="Unigram", vocab=[["a", 0.0]] * 200_000),
        "tokens with ids",
    )
    yield "SentencePiece: a million empty fields", _sentencepiece(lambda: b"\x08\x00" * (4 * MB)), "SentencePiece"
    yield "SentencePiece: a million pieces", _sentencepiece(lambda: b"\x0a\x03\x0a\x01a" * (2 * MB)), "fields"
    yield "SentencePiece: a piece of 300,000", _sentencepiece(lambda: _piece("a" * 300_000) + BPE), "characters"
    yield "SentencePiece: 120,000 added tokens", _sentencepiece_added, None
    yield "SentencePiece: runs of a letter", _sentencepiece(_sentencepiece_runs), None
    yield "chat_template.jinja of 40 MB", _file("chat_template.jinja", lambda: b"x" * (40 * MB)), "bytes"
    yield "a configuration that is a pipe", _pipe, "config.json"
    for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "tokenizer_config.json"):
        yield f"{name} that is a Git LFS pointer", _file(name, lambda: LFS_POINTER), "Git LFS"
    yield "MLX: sound", _mlx(lambda bomb: None), None
    yield "MLX: groups of 2^31", _mlx(lambda bomb: bomb.config.update(quantization=_groups(2**31))), None
    yield "MLX: a million scales", _mlx(_many_scales), "one scale for each"
    yield "MLX: a wide embedding", _mlx(_wide_embedding), "it must be"
    yield "MLX: biases that all differ", _mlx(_many_biases), "not ternary"


def _groups(size: int) -> dict[str, int]:
    return {"group_size": size, "bits": 2}


def _mlx(change: Callable[[Folder], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        bomb.mlx()
        change(bomb)
        return bomb.write(folder)

    return make


def _many_scales(bomb: Folder) -> None:
    bomb.tensors["model.embed_tokens.scales"] = np.ones((300, 4096), np.float16)


def _wide_embedding(bomb: Folder) -> None:
    bomb.tensors["model.embed_tokens.weight"] = np.zeros((MB, 4), np.uint32)
    for part in ("scales", "biases"):
        bomb.tensors[f"model.embed_tokens.{part}"] = np.zeros((MB, 2), np.float16)


def _many_biases(bomb: Folder) -> None:
    name = "model.embed_tokens.biases"
    size = bomb.tensors[name].size
    bomb.tensors[name] = np.arange(size, dtype=np.float32).reshape(bomb.tensors[name].shape)


def _config(**changes: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        bomb.config |= changes
        return bomb.write(folder)

    return make


def _file(name: str, content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        bomb.files[name] = content()
        return bomb.write(folder)

    return make


def _header(entries: Callable[[], dict[str, Any]]) -> Callable[[Path], Path]:
    return _file("model.safetensors", lambda: safetensors(Folder().tensors, entries()))


def _empty() -> dict[str, Any]:
    return {"model.norm.weight": {"dtype": "F16", "shape": [0, 2**62], "data_offsets": [0, 0]}}


def _brackets() -> bytes:
    return struct.pack("<Q", MB) + b"[" * MB


def _index() -> bytes:
    return json.dumps({"weight_map": {f"{i}": "model.safetensors" for i in range(300_000)}}).encode()


def _tokenizer(**changes: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        bomb.tokenizer |= changes
        return bomb.write(folder)

    return make


def _tokenizer_model(**changes: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        bomb.tokenizer["model"] |= changes
        return bomb.write(folder)

    return make


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _doubling() -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [_replace(" ", "  ")] * 40}


def _split(expression: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def _padding() -> dict[str, Any]:
    strategy = {"strategy": {"Fixed": GREATEST}, "direction": "Right", "pad_to_multiple_of": None}
    return strategy | {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}


def _truncation() -> dict[str, Any]:
    return {"max_length": 0, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


def _nested_pre_tokenizers(folder: Path) -> Path:
    bomb = Folder()
    inner = json.dumps(bomb.tokenizer["pre_tokenizer"])
    depth = 5000
    nested = '{"type":"Sequence","pretokenizers":[' * depth + inner + "]}" * depth
    text = json.dumps(bomb.tokenizer | {"pre_tokenizer": 0}).replace('"pre_tokenizer": 0', f'"pre_tokenizer": {nested}')
    bomb.files["tokenizer.json"] = text.encode()
    return bomb.write(folder)


def _added(count: int, words: int = 0) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        tokens = [*BYTE_TOKENS, *("".join(word) for word in islice(product("abcdefghijkl", repeat=4), words))]
        bomb.tokenizer["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
        bomb.tokenizer["added_tokens"] = [bomb.added(f"<|reserved_{i}|>", len(tokens) + i) for i in range(count)]
        return _sized(bomb, len(tokens) + count).write(folder)

    return make


def _sized(bomb: Folder, vocab: int) -> Folder:
    bomb.config["vocab_size"] = vocab
    bomb.tensors["model.embed_tokens.weight"] = np.ones((vocab, bomb.shape.hidden), np.float16)
    return bomb


def _one_added(content: str, id: int = 256) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        bomb.tokenizer["added_tokens"] = [bomb.added(content, id)]
        return bomb.write(folder)

    return make


def _vocabulary(tokens: Callable[[], list[str]], **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        words = [*BYTE_TOKENS, *tokens()]
        model = bomb.tokenizer["model"] | {"vocab": {word: i for i, word in enumerate(words)}} | options
        if options:
            spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _replace(" ", "▁")]}
            bomb.tokenizer |= {"normalizer": spaces, "pre_tokenizer": None}
            model["merges"] = [["a" * n, "a"] for n in range(1, 499)]
        bomb.tokenizer["model"] = model
        return _sized(bomb, len(words)).write(folder)

    return make


BPE = b"\x12\x02\x18\x02\x1a\x02\x20\x00"
"""A trainer_spec that says byte-pair encoding, and a normalizer_spec that leaves spaces as they are."""


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _piece(text: str, kind: int = 1) -> bytes:
    raw = text.encode()
    message = b"\x0a" + _varint(len(raw)) + raw + b"\x15" + struct.pack("<f", -1.0) + b"\x18" + bytes([kind])
    return b"\x0a" + _varint(len(message)) + message


def _sentencepiece_runs() -> bytes:
    return _piece("<unk>", 2) + b"".join(_piece("a" * n) for n in range(1, 300)) + BPE


def _sentencepiece(content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = Folder()
        bomb.files |= {"tokenizer.json": b"", "tokenizer.model": content()}
        return bomb.write(folder)

    return make


def _sentencepiece_added(folder: Path) -> Path:
    bomb, count = Folder(), 120_000
    pieces = _piece("<unk>", 2) + _piece("a") + BPE
    added = json.dumps({f"<|{i}|>": 2 + i for i in range(count)}).encode()
    bomb.files |= {"tokenizer.json": b"", "tokenizer.model": pieces, "added_tokens.json": added}
    return _sized(bomb, 2 + count).write(folder)


def _pipe(folder: Path) -> Path:
    import os

    target = Folder().write(folder)
    (target / "config.json").unlink()
    os.mkfifo(target / "config.json")
    return target
