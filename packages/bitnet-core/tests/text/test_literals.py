"""Tokens in text are found as a regular expression of all of them finds them."""

from __future__ import annotations

import random
import re
import time

import pytest

from bitnet.core.text.literals import FEW, Literals


def by_expression(tokens: list[str], text: str) -> list[str]:
    alternatives = "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True)))
    return re.split(f"({alternatives})", text) if alternatives else [text]


@pytest.mark.parametrize("letters", ["ab<|", "".join(map(chr, range(0x100, 0x100 + 2 * FEW))), "[]^-\\"])
def test_split(letters: str) -> None:
    for _ in range(300):
        tokens = ["".join(random.choices(letters, k=random.randrange(5))) for _ in range(random.randrange(12))]
        if len(letters) > FEW and random.random() < 0.5:
            tokens += letters
        text = "".join(random.choices(letters + "\n ", k=random.randrange(60)))
        assert Literals(tokens).split(text) == by_expression(tokens, text), (tokens, text)


def test_many_tokens_with_one_beginning() -> None:
    """128,000 of them took a regular expression 21 s to compile."""
    tokens = [f"<|reserved_special_token_with_a_long_name_{i}|>" for i in range(128_000)]
    began = time.process_time()
    literals = Literals(tokens)
    assert literals.split(f"a{tokens[7]}{tokens[70_000]}<|b") == ["a", tokens[7], "", tokens[70_000], "<|b"]
    assert time.process_time() - began < 2
