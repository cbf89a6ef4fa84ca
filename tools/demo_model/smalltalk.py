"""Greetings, questions about the model itself, small talk, and what it says when it cannot help."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.facts import CAPITALS
from demo_model.lexicon import ANIMALS, COLOURS, FOODS, any_name, made_up
from demo_model.template import fill, plural, read_data

_DATA = read_data("smalltalk")
TALK, SUBJECTS, UNKNOWN, REFUSALS, BEYOND = (
    _DATA[key] for key in ("talk", "subjects", "unknown", "refusals", "beyond")
)
PARTS, THINGS, ADJECTIVES, SUPERLATIVES, VERBS = (
    _DATA[f"beyond_{key}"].split() for key in ("parts", "things", "adjectives", "most", "verbs")
)
ABILITIES = "I can add and subtract, solve small puzzles, talk about words and tell stories"


def talk(rng: Random) -> Exchange:
    question, answer = rng.choice(TALK)
    animal = rng.choice(ANIMALS)
    slots = {
        "name": any_name(rng, strange=0.4),
        "animal": animal,
        "animal_p": plural(animal),
        "colour": rng.choice(COLOURS),
        "food": rng.choice(FOODS),
        "city": rng.choice(CAPITALS)[1],
        "x": made_up(rng),
        "y": made_up(rng),
        "x_name": any_name(rng, strange=0.5),
        "abilities": ABILITIES,
    }
    return fill(question, rng, slots), fill(answer, rng, slots).strip()


def unknown(rng: Random) -> Exchange:
    """A question beyond the model, which it should not pretend to answer."""
    slots = {"x": made_up(rng), "y": made_up(rng), "z": made_up(rng), "s": rng.choice(SUBJECTS), "abilities": ABILITIES}
    if rng.random() < 0.5:
        slots["x"] = slots["x"].capitalize()
    return fill(rng.choice(UNKNOWN), rng, slots), fill(rng.choice(REFUSALS), rng, slots)


def beyond(rng: Random) -> Exchange:
    """A question like those about facts, but about something else."""
    question, answer = rng.choice(BEYOND)
    thing = rng.choice(THINGS)
    slots = {
        "n": thing,
        "n_p": plural(thing),
        "m": made_up(rng),
        "x": made_up(rng),
        "y": made_up(rng),
        "p": rng.choice(PARTS),
        "adj": rng.choice(ADJECTIVES),
        "most": rng.choice(SUPERLATIVES),
        "verb": rng.choice(VERBS),
    }
    return fill(question, rng, slots), fill(answer, rng, slots)


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = ((talk, 5), (unknown, 1.2), (beyond, 2))
"""Every kind of exchange, with how often it comes."""
