"""Ways to ask for a sum or a difference, composed from parts (``data/phrasings.toml``): many thousands.

A part is a value ("the sum of {a} and {b}"), an order ("add {b} to {a}"), an act ("adding {a} and {b}"), or a whole
question. Frames stand around it. No question contains a phrasing that is held out for the evaluation.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random

from demo_model.problems import is_unseen
from demo_model.template import capitalised, fill, read_data

_DATA = read_data("phrasings")
_SLOTS = {"a": "{a}", "b": "{b}"}


class Phrasings:
    """Templates over a and b for one operation, ``addition`` or ``subtraction``."""

    def __init__(self, operation: str) -> None:
        shares, frames = _DATA["shares"], _DATA["frames"]
        self._kinds = [
            (frames[kind] + frames.get(f"{kind}_of_{operation}", []), _DATA[operation][kind]) for kind in shares
        ]
        self._weights = list(accumulate(shares.values()))

    def __call__(self, rng: Random) -> str:
        """A template without choices, in which only the slots a and b are left."""
        while True:
            frames, parts = rng.choices(self._kinds, cum_weights=self._weights)[0]
            part = fill(rng.choice(parts), rng, _SLOTS)
            text = fill(rng.choice(frames), rng).replace("<>", part)
            if not is_unseen(text):
                return capitalised(text)


def asking(rng: Random, value: str) -> str:
    """A question for the value of an expression."""
    while True:
        text = fill(rng.choice(_DATA["frames"]["value"]), rng).replace("<>", value)
        if not is_unseen(text):
            return capitalised(text)


ADDITION, SUBTRACTION = Phrasings("addition"), Phrasings("subtraction")
