"""Bombs in the vocabularies of GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bombs.base import GGUF
from bombs.family import Family

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SMALL = {"hidden": 16, "ffn": 32, "heads": 1, "head_dim": 16}


def families() -> Iterator[Family]:
    """Every family of this file. ``inspect`` makes of a vocabulary what ``run`` does, and is left out."""
    return (replace(family, doors=("run", "convert", "encode")) for family in _all())


def _all() -> Iterator[Family]:
    for model in ("gpt2", "llama"):
        yield Family(f"{model}: a token of 300,000 characters", _tokens(lambda: ["a" * 300_000], model), "characters")
        yield Family(f"{model}: tokens a, aa, aaa, …", _tokens(lambda: _runs(500), model), None)
        yield Family(f"{model}: many runs of letters", _tokens(lambda: _many_runs(60, 500), model), None)
        yield Family(f"{model}: 128k user-defined, shared prefix", _tokens(_shared_prefix, model, USER_DEFINED), None)
        yield Family(f"{model}: 128k control tokens", _tokens(_shared_prefix, model, CONTROL), None)
        yield Family(
            f"{model}: user-defined tokens of all lengths", _tokens(lambda: _runs(500), model, USER_DEFINED), None
        )
        yield Family(f"{model}: a million tokens", _tokens(lambda: _words(1_000_000), model), "the limit is 524288")
        yield Family(f"{model}: 300,000 tokens", _tokens(lambda: _words(300_000), model), None)
        yield Family(f"{model}: one token 150,000 times", _tokens(lambda: ["same"] * 150_000, model), None)
        yield Family(f"{model}: ends 150,000 times", _tokens(lambda: ["<|eot_id|>"] * 150_000, model), None)
    yield Family("llama: 150,000 unknown tokens", _tokens(lambda: _words(150_000), "llama", UNKNOWN), None)
    yield Family("llama: a byte 150,000 times", _tokens(lambda: ["<0x41>"] * 150_000, "llama", BYTE), None)
    yield Family("llama: prefixes without a rest", _tokens(_prefixes, "llama"), None)
    yield Family("llama: scores that are not numbers", _tokens(lambda: _words(50_000), "llama", scores="nan"), None)
    yield Family("merges: a million", _merges(lambda: ["a b"] * 1_000_000), "merges")
    yield Family("merges: one of 8 MB", _merges(lambda: ["a" * 8_000_000 + " b"]), "is not a token")
    yield Family("merges: 8 MB of spaces", _merges(lambda: [" " * 8_000_000]), "not two tokens")
    yield Family("merges: of long tokens", _long_merges, None)


def _tokens(
    tokens: Callable[[], list[str]], model: str, kind: int = NORMAL, scores: str = ""
) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        from bombs.base import Shape

        bomb = GGUF(Shape(**SMALL))
        made = tokens()
        more: dict[str, Any] = {"scores": np.full(len(made) + 258, np.nan, np.float32)} if scores else {}
        bomb.vocabulary(made, kind=kind, model=model, **more)
        return bomb.write(folder)

    return make


def _merges(merges: Callable[[], list[str]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        bomb = GGUF()
        bomb.vocabulary(["ab"], merges=merges())
        return bomb.write(folder)

    return make


def _long_merges(folder: Path) -> Path:
    bomb = GGUF()
    runs = _runs(500)
    bomb.vocabulary(runs, merges=[f"{a} {b}" for a, b in zip(["a", *runs], ["a"] * 500, strict=False)][:499])
    return bomb.write(folder)


def _runs(most: int) -> list[str]:
    return ["a" * n for n in range(2, most + 1)]


def _many_runs(letters: int, most: int) -> list[str]:
    return [chr(0x41 + letter) * n for letter in range(letters) for n in range(2, most + 1)]


def _shared_prefix() -> list[str]:
    return [f"<|reserved_special_token_with_a_long_name_{i}|>" for i in range(128_000)]


def _words(count: int) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(word) for _, word in zip(range(count), product(letters, repeat=5), strict=False)]


def _prefixes() -> list[str]:
    """Each token begins with all those before it, and what is left of it is none."""
    return [chr(0x100 + series) + "a" * n for series in range(60) for n in range(1, 500)]
