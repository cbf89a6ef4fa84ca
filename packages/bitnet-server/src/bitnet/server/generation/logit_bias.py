"""``logit_bias``: an object by token id, as in OpenAI's API; or pairs, and texts for ids, as in llama.cpp's server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bitnet.core.errors import brief
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields

if TYPE_CHECKING:
    from bitnet.core.text.tokenizer import Tokenizer

MAX_DIGITS = 18
"""Maximum digits of a token id; Python refuses to parse thousands of digits."""
MAX_TEXTS, MAX_TEXT = 1000, 256
"""Maximum texts, and characters of each."""
NEVER = -float("inf")


def logit_bias(fields: Fields, tokenizer: Tokenizer) -> dict[int, float] | None:
    """What is added to the logits of tokens, by id; None: nothing. A text biases each of its tokens.

    Raises:
        RequestError: An entry names no token, or its bias is neither a number in -100 … 100 nor false, which forbids
            it.
    """
    if "logit_bias" not in fields:
        return None
    biases: dict[int, float] = {}
    texts = 0
    for token, bias in _entries(fields):
        if isinstance(token, int):
            biases[token] = bias
            continue
        texts += 1
        if texts > MAX_TEXTS or len(token) > MAX_TEXT:
            raise wrong("logit_bias", f"may have {MAX_TEXTS:,} texts of {MAX_TEXT} characters each.")
        for one in tokenizer.encode(token, add_special=False):
            biases[one] = bias
    return biases


def _entries(fields: Fields) -> Iterator[tuple[int | str, float]]:
    """Ids or texts, and their biases."""
    if isinstance(fields.values["logit_bias"], dict):
        found = fields.object("logit_bias")
        assert found is not None
        for name in found.values:
            yield _token(found, name), 0.0 if found.values[name] is None else _bias(found, name)
        return
    for pair in fields.pairs("logit_bias", "token", "bias"):
        token = pair.values["token"]
        if isinstance(token, str) and token:
            yield token, _bias(pair, "bias")
        else:
            pair.require("token")
            yield pair.integer("token", 0) or 0, _bias(pair, "bias")


def _token(found: Fields, name: str) -> int | str:
    """A token by its name in an object: its id if that is a number, else a text."""
    number = name.removeprefix("-")
    if name and not (number.isascii() and number.isdigit()):
        return name
    if number != name or not 0 < len(name) <= MAX_DIGITS:
        raise wrong(found.name(brief(name)), "is not a token id.")
    return int(name)


def _bias(fields: Fields, name: str) -> float:
    if fields.values[name] is False:
        return NEVER
    bias = fields.number(name, -100, 100)
    if bias is None:
        raise wrong(fields.name(name), "is missing; it must be a number, or false.")
    return bias
