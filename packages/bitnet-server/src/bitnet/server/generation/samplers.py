"""``samplers`` of llama.cpp's server: which ways of sampling act, in which order."""

from __future__ import annotations

from typing import Any

from bitnet.core.errors import brief
from bitnet.server.request.errors import unsupported, wrong
from bitnet.server.request.fields import Fields

MAX_SAMPLERS = 32
ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""The order in which they act here."""
DEFAULT_ORDER = ("penalties", "top_k", "top_p", "min_p", "temperature")
"""llama.cpp's, which programs send that set nothing."""
OFF: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
"""The options with which a sampler does nothing."""
OTHERS = frozenset({"dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "adaptive_p"})
"""Samplers that do nothing unless a field that is refused turns them on."""
LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "a": "adaptive_p",
}


def left_out(fields: Fields) -> dict[str, Any]:
    """The options that turn off what ``samplers`` leaves out; empty if it is not given.

    Raises:
        RequestError: It has an unknown sampler, or another order.
    """
    given = fields.values.get("samplers")
    if not given:
        return {}
    if isinstance(given, str):
        names = tuple(LETTERS.get(letter, letter) for letter in given[: MAX_SAMPLERS + 1])
    else:
        names = fields.strings("samplers", MAX_SAMPLERS)
    for name in names:
        if name not in OFF and name not in OTHERS:
            raise wrong("samplers", f"has {brief(name)}; known are {', '.join([*OFF, *sorted(OTHERS)])}.")
    acting = [name for name in names if name in OFF]
    if not any(acting == [name for name in order if name in acting] for order in (ORDER, DEFAULT_ORDER)):
        raise unsupported("samplers", f"samplers act in one order: {', '.join(ORDER)}.")
    return {option: value for name, off in OFF.items() if name not in acting for option, value in off.items()}
