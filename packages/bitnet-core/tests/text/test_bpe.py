"""A partial vocabulary encodes a text like the whole one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from bitnet.core.errors import InvalidInputError
from bitnet.core.text import bpe
from bitnet.core.text.bpe import BytePairs, listed_merges, scored_merges

LETTERS = "abcd\u0120\u00e9\u65e5"


@pytest.fixture
def words() -> list[str]:
    """Tokens of one to six letters, so few letters that most of a text is in many of them."""
    longer = ("".join(random.choices(LETTERS, k=random.randrange(2, 7))) for _ in range(400))
    return list(dict.fromkeys([*LETTERS, *longer]))


def text() -> str:
    return "".join(random.choices([*LETTERS, " ", "\n", "!", "\U0001f600"], k=random.randrange(1, 80)))


def cuts(words: list[str]) -> list[tuple[str, str]]:
    return [(w[:i], w[i:]) for w in words for i in range(1, len(w)) if w[:i] in words and w[i:] in words]


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_listed_merges(words: list[str], monkeypatch: pytest.MonkeyPatch, ignore_merges: bool) -> None:
    ids = {word: 3 * i + 1 for i, word in enumerate(words)}
    pairs = cuts(words)
    random.shuffle(pairs)
    pairs += random.choices(pairs, k=5)  # of a merge that is there twice, the last place counts
    cut = pre_tokenizers.Split(" ", "removed")
    oracle = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=ignore_merges))
    oracle.pre_tokenizer = cut
    merges = listed_merges([" ".join(pair) for pair in pairs], ids)
    compare(BytePairs(ids, merges, cut=cut, ignore_merges=ignore_merges), oracle, monkeypatch)


def test_scored_merges(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens have the same score, and bytes stand for what has no token."""
    extra = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {word: i for i, word in enumerate([*extra, *words])}
    scores = {word: float(random.randrange(-20, 0)) for word in words}
    ranked = sorted(cuts(words), key=lambda pair: -scores["".join(pair)])
    options: dict[str, Any] = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    normalize = normalizers.Sequence([normalizers.Prepend("\u0120"), normalizers.Replace(" ", "\u0120")])
    oracle = tokenizers.Tokenizer(models.BPE(ids, ranked, **options))
    oracle.normalizer = normalize
    pairs = BytePairs(ids, scored_merges(scores), normalize=normalize, always=extra, **options)
    compare(pairs, oracle, monkeypatch)


def compare(pairs: BytePairs, oracle: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*(text() for _ in range(300)), ""]
    expected = [oracle.encode(text).ids if text else [] for text in texts]
    assert len({id for ids in expected for id in ids}) > 100  # not single letters only
    monkeypatch.setattr(bpe, "ENOUGH", sum(map(len, texts)) * 2)
    assert [ids for text in texts for ids in pairs.encode([text])] == expected
    assert pairs.encode(texts) == expected
    built = count_builds(pairs, monkeypatch)
    assert [ids for text in texts for ids in pairs.encode([text])] == expected
    assert built == [len(pairs._ids)]  # the whole, once


def count_builds(pairs: BytePairs, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    built: list[int] = []
    build: Callable[..., tokenizers.Tokenizer | None] = pairs._build
    monkeypatch.setattr(pairs, "_build", lambda ids: built.append(len(ids)) or build(ids))  # type: ignore[func-returns-value]
    return built


@pytest.mark.parametrize("wrong", ["ab", "a b c", "a  b", " ab", "a ", "a x", "x a", "b a", "a\nb", ""])
def test_merges_that_cannot_be(wrong: str) -> None:
    ids = {"a": 0, "b": 1, "ab": 2}
    assert listed_merges(["a b"], ids)(["ab"]) == [("a", "b")]
    with pytest.raises(InvalidInputError, match="hold "):
        listed_merges(["a b", wrong, "a b"], ids)
    assert listed_merges([], ids)(ids) == []


def test_too_many_merges_are_left_to_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of runs has a merge for every two of them: the whole is never built, and parts say the same."""
    monkeypatch.setattr(bpe, "CHARACTERS", 50_000)
    monkeypatch.setattr(bpe, "FEW", random.choice([10, 256]))
    runs = ["a" * n for n in range(1, 100)]
    scores = {run: float(len(run)) for run in runs} | {"b": 0.0}
    ids = {token: i for i, token in enumerate(scores)}
    ranked = sorted(((a, b) for a in runs for b in runs if a + b in scores), key=lambda pair: -len(pair[0] + pair[1]))
    oracle = tokenizers.Tokenizer(models.BPE(ids, ranked))
    pairs = BytePairs(ids, scored_merges(scores))
    assert not pairs.build()
    for text in ("aab", "b" * 20_000, "baaab" * 3):
        assert pairs.encode([text]) == [oracle.encode(text).ids]
    with pytest.raises(InvalidInputError, match="too many merges"):
        pairs.encode(["a" * 90])


def test_a_long_token_of_sentencepiece_does_not_take_for_ever() -> None:
    """A token of 300,000 characters was once cut in two in every way, which took more than 20 s."""
    scores = {"a": 0.0, "aa": 1.0, "a" * 300_000: 2.0}
    began = time.process_time()
    assert scored_merges(scores)(scores) == [("a", "aa")[:1] * 2]
    assert time.process_time() - began < 1


def test_a_long_token_does_not_take_for_ever() -> None:
    """A hostile vocabulary has one: every string of a text's words up to that length was looked up, 70 million here."""
    ids = {"a": 0, "b" * 20_000: 1}
    pairs = BytePairs(ids, listed_merges([], ids))
    began = time.process_time()
    assert pairs.encode(["a" * 12_000]) == [[0] * 12_000]
    assert time.process_time() - began < 5
