"""Questions about the world that the model is not taught, and how it says so (``data/unknown.toml``)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.lexicon import any_name, made_up
from demo_model.smalltalk import ABILITIES
from demo_model.template import fill, read_data

_DATA = read_data("unknown")


def fact(rng: Random) -> Exchange:
    question, answer = rng.choice(_DATA["exchanges"])
    strange = rng.random() < 0.12  # so that a name it never saw is unknown too
    other = made_up(rng).capitalize()
    subject, second = rng.sample(_DATA["subjects"], 2)
    slots = {
        "person": f"{any_name(rng)} {other}" if strange else rng.choice(_DATA["people"]),
        "country": other if strange else rng.choice(_DATA["countries"]),
        "place": other if strange else rng.choice(_DATA[rng.choice(("places", "countries", "known_countries"))]),
        "subject": made_up(rng) if strange else subject,
        "other": second,
        "work": f"The {other}" if strange else rng.choice(_DATA["works"]),
        "task": rng.choice(_DATA["tasks"]),
        "language": other if strange else rng.choice(_DATA["languages"]),
        "company": other if strange else rng.choice(_DATA["companies"]),
        "phrase": rng.choice(_DATA["phrases"]),
        "year": rng.randint(1000, 2040),
        "x": made_up(rng),
        "n": rng.randint(1, 60),
        "abilities": ABILITIES,
    }
    return fill(question, rng, slots), fill(answer, rng, slots)


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = ((fact, 1),)
"""Every kind of exchange, with how often it comes."""
