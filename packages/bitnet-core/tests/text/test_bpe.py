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
from bitnet.core.text import bpe_python, bpe_rust, merges
from bitnet.core.text.bpe_rust import BytePairs
from bitnet.core.text.merges import ListedMerges, ScoredMerges

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
    listed = ListedMerges([" ".join(pair) for pair in pairs], ids)
    compare(BytePairs(ids, listed, cut=cut, ignore_merges=ignore_merges), oracle, monkeypatch)
    compare_python(
        bpe_python.BytePairs(ids, listed, cut=lambda text: text.split(" "), ignore_merges=ignore_merges),
        oracle,
    )


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
    pairs = BytePairs(ids, ScoredMerges(scores), normalize=normalize, always=extra, **options)
    compare(pairs, oracle, monkeypatch)
    del options["fuse_unk"]
    ours = bpe_python.BytePairs(
        ids, ScoredMerges(scores), normalize=lambda text: "\u0120" + text.replace(" ", "\u0120"), **options
    )
    compare_python(ours, oracle)


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_what_has_no_token(unknown: str | None) -> None:
    """Some characters have tokens for all their bytes, some for a few; the rest are unknown, or dropped."""
    letters = "abc\u00e9\u65e5\u20ac"
    fallback = random.choice([True, False])
    spelled = [f"<0x{byte:02X}>" for byte in random.sample([0x0A, 0x21, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xB1], 6)]
    tokens = ["<unk>", *spelled, *letters[:4], "ab", "bc", "abc", "ca", "\u00e9a"]
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [pair for pair in cuts(tokens[len(spelled) + 1 :]) if len(pair[0]) and len(pair[1])]
    options: dict[str, Any] = {"byte_fallback": fallback, **({"unk_token": unknown} if unknown else {})}
    oracle = tokenizers.Tokenizer(models.BPE(ids, pairs, fuse_unk=True, **options))
    ours = bpe_python.BytePairs(ids, ListedMerges([" ".join(pair) for pair in pairs], ids), **options)
    some = [*letters, "\n", "!", "\U0001f600", "\u00f1", "?"]
    texts = ["".join(random.choices(some, k=random.randrange(1, 30))) for _ in range(300)]
    assert ours.encode(texts) == [oracle.encode(text).ids for text in texts]


def compare_python(pairs: bpe_python.BytePairs, oracle: tokenizers.Tokenizer) -> None:
    """Text by text and all at once, so that words come from the cache, too."""
    texts = [*(text() for _ in range(300)), ""]
    expected = [oracle.encode(text).ids if text else [] for text in texts]
    assert pairs.encode(texts) == expected
    assert [ids for text in texts for ids in pairs.encode([text])] == expected


def compare(pairs: BytePairs, oracle: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*(text() for _ in range(300)), ""]
    expected = [oracle.encode(text).ids if text else [] for text in texts]
    assert len({id for ids in expected for id in ids}) > 100  # not single letters only
    monkeypatch.setattr(bpe_rust, "ENOUGH", sum(map(len, texts)) * 2)
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
    assert ListedMerges(["a b"], ids).among(["ab"]) == [("a", "b")]
    with pytest.raises(InvalidInputError, match="hold "):
        ListedMerges(["a b", wrong, "a b"], ids)
    assert ListedMerges([], ids).among(ids) == []


def test_too_many_merges_are_left_to_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of runs has a merge for every two of them: the whole is never built, and parts say the same."""
    monkeypatch.setattr(merges, "MAX_CHARACTERS", 50_000)
    monkeypatch.setattr(bpe_rust, "FEW", random.choice([10, 256]))
    runs = ["a" * n for n in range(1, 100)]
    scores = {run: float(len(run)) for run in runs} | {"b": 0.0}
    ids = {token: i for i, token in enumerate(scores)}
    ranked = sorted(((a, b) for a in runs for b in runs if a + b in scores), key=lambda pair: -len(pair[0] + pair[1]))
    oracle = tokenizers.Tokenizer(models.BPE(ids, ranked))
    pairs = BytePairs(ids, ScoredMerges(scores))
    assert not pairs.build()
    for text in ("aab", "b" * 20_000, "baaab" * 3):
        assert pairs.encode([text]) == [oracle.encode(text).ids]
    with pytest.raises(InvalidInputError, match="too many merges"):
        pairs.encode(["a" * 90])


def test_a_long_token_of_sentencepiece_does_not_take_for_ever() -> None:
    """A token of 300,000 characters was once cut in two in every way, which took more than 20 s."""
    scores = {"a": 0.0, "aa": 1.0, "a" * 300_000: 2.0}
    began = time.process_time()
    assert ScoredMerges(scores).among(scores) == [("a", "aa")[:1] * 2]
    assert time.process_time() - began < 1


def test_a_long_token_does_not_take_for_ever() -> None:
    """A hostile vocabulary has one: every string of a text's words up to that length was looked up, 70 million here."""
    ids = {"a": 0, "b" * 20_000: 1}
    pairs = BytePairs(ids, ListedMerges([], ids))
    began = time.process_time()
    assert pairs.encode(["a" * 12_000]) == [[0] * 12_000]
    assert time.process_time() - began < 5


def test_python_merges_a_long_word_in_time() -> None:
    """SentencePiece's text is one word. A search for the best pair after each merge would take 20 s for this one."""
    letters = "abcdefgh"
    pieces = [*letters, *{"".join(random.choices(letters, k=random.randrange(2, 6))) for _ in range(3000)}]
    pairs = bpe_python.BytePairs(
        {piece: i for i, piece in enumerate(pieces)}, ScoredMerges({piece: random.random() for piece in pieces})
    )
    began = time.process_time()
    pairs.encode(["".join(random.choices(letters, k=30_000))])
    assert time.process_time() - began < 3
