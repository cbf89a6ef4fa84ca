"""Small logic: orders, classes, who has what, where things are, days and months."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.lexicon import CLASSES, COLOURS, ROOMS, SIZES, TREASURES, any_name, made_up, several_names
from demo_model.template import capitalised, fill, with_article

ORDERS = (
    ("taller", "tallest", "shorter", "shortest"),
    ("older", "oldest", "younger", "youngest"),
    ("faster", "fastest", "slower", "slowest"),
    ("heavier", "heaviest", "lighter", "lightest"),
    ("stronger", "strongest", "weaker", "weakest"),
    ("richer", "richest", "poorer", "poorest"),
)
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def order(rng: Random) -> Exchange:
    """Three or four people in an order told pair by pair: who comes first or last, or whether one is before another."""
    more, most, less, least = rng.choice(ORDERS)
    people = several_names(rng, rng.choice((3, 3, 3, 4)))  # from the most to the least
    lines = []
    for a, b in itertools.pairwise(people):
        lines.append(f"{a} is {more} than {b}." if rng.random() < 0.7 else f"{b} is {less} than {a}.")
    if rng.random() < 0.4:
        rng.shuffle(lines)
    facts = " ".join(lines)
    roll = rng.random()
    if roll < 0.35:
        return fill("{t} Who is [the |]{m}?", rng, {"t": facts, "m": most}), f"{people[0]} is the {most}."
    if roll < 0.6:
        return fill("{t} Who is [the |]{m}?", rng, {"t": facts, "m": least}), f"{people[-1]} is the {least}."
    i, j = rng.sample(range(len(people)), 2)
    answer = "Yes" if i < j else "No"
    high, low = (people[i], people[j]) if i < j else (people[j], people[i])
    return f"{facts} Is {people[i]} {more} than {people[j]}?", f"{answer}, {high} is {more} than {low}."


def syllogism(rng: Random) -> Exchange:
    """All A are B; x is an A; is x a B? Mostly with words that do not exist, so that only the form counts."""
    a, b, c = (made_up(rng) for _ in range(3))
    if rng.random() < 0.3:
        a, b, c = rng.choice(
            (("cat", "animal", "stone"), ("rose", "flower", "fish"), ("carp", "fish", "bird"), ("oak", "tree", "cat"))
        )
    name = any_name(rng)
    roll = rng.random()
    if roll < 0.3:
        return f"All {a}s are {b}s. {name} is {with_article(a)}. Is {name} {with_article(b)}?", (
            f"Yes, {name} is {with_article(b)}, because all {a}s are {b}s."
        )
    if roll < 0.55:
        return f"No {a} is {with_article(c)}. {name} is {with_article(a)}. Is {name} {with_article(c)}?", (
            f"No, {name} is not {with_article(c)}, because no {a} is {with_article(c)}."
        )
    if roll < 0.8:
        a, b, c = (made_up(rng) for _ in range(3))
        return f"All {a}s are {b}s. All {b}s are {c}s. Are all {a}s {c}s?", (
            f"Yes, all {a}s are {c}s, because all {a}s are {b}s and all {b}s are {c}s."
        )
    return f"All {a}s are {b}s. {name} is {with_article(b)}. Is {name} {with_article(a)}?", (
        f"Maybe. All {a}s are {b}s, but not every {b} must be {with_article(a)}."
    )


def possession(rng: Random) -> Exchange:
    """A thing goes from hand to hand; who has it at the end?"""
    thing = rng.choice(TREASURES).partition(" ")[2]
    people = several_names(rng, rng.choice((2, 3, 3, 4)))
    holder = people[0]
    facts = [f"{holder} has the {thing}." if rng.random() < 0.5 else f"{holder} finds {with_article(thing)}."]
    for _ in range(rng.randint(1, 3)):
        other = rng.choice([p for p in people if p != holder])
        facts.append(
            f"{holder} [gives the {thing} to {other}|passes the {thing} to {other}|hands {other} the {thing}]."
        )
        holder = other
    return fill(f"{' '.join(facts)} Who has the {thing}[ now|]?", rng), f"{holder} has the {thing}."


def location(rng: Random) -> Exchange:
    """People move between rooms; where is one of them? (The form of bAbI task 1, Weston et al. 2015.)"""
    people = several_names(rng, rng.choice((1, 2, 2, 3)))
    where: dict[str, str] = {}
    facts = []
    for _ in range(rng.randint(2, 5)):
        person, room = rng.choice(people), rng.choice(ROOMS)
        where[person] = room
        facts.append(f"{person} [goes to|walks to|moves to|runs to] the {room}.")
    asked = rng.choice(list(where))
    return fill(f"{' '.join(facts)} Where is {asked}[ now|]?", rng), f"{asked} is in the {where[asked]}."


def container(rng: Random) -> Exchange:
    thing = rng.choice(TREASURES).partition(" ")[2]
    box, room = rng.choice(("box", "bag", "basket", "drawer", "chest")), rng.choice(ROOMS)
    asked = fill(
        "The {t} is in the {b}. The {b} is in the {r}. [Where is the {t}|In which room is the {t}]?",
        rng,
        {"t": thing, "b": box, "r": room},
    )
    return asked, f"The {thing} is in the {box} in the {room}."


def colour(rng: Random) -> Exchange:
    """Things of different colours; which is of one colour?"""
    names = rng.sample(("ball", "hat", "cup", "car", "box", "door", "chair", "book", "bag", "coat", "kite", "boat"), 3)
    colours = rng.sample(COLOURS, 3)
    facts = " ".join(f"The {n} is {c}." for n, c in zip(names, colours, strict=True))
    i = rng.randrange(3)
    if rng.random() < 0.5:
        return f"{facts} What colour is the {names[i]}?", f"The {names[i]} is {colours[i]}."
    return f"{facts} Which thing is {colours[i]}?", f"The {names[i]} is {colours[i]}."


def odd_one(rng: Random) -> Exchange:
    kind, other = rng.sample(sorted(CLASSES), 2)
    stranger = rng.choice(CLASSES[other])
    while stranger in CLASSES[kind]:
        stranger = rng.choice(CLASSES[other])
    words = [*rng.sample([w for w in CLASSES[kind] if w != stranger], 3), stranger]
    rng.shuffle(words)
    return fill(
        "[Which word does not belong|Which is the odd one out|Find the odd one out]: {w}?", rng, {"w": ", ".join(words)}
    ), (f"{capitalised(stranger)}. The others are {_plural(kind)}.")


def _plural(kind: str) -> str:
    return {"fish": "fish", "piece of clothing": "clothes", "piece of furniture": "furniture"}.get(kind, kind + "s")


def membership(rng: Random) -> Exchange:
    kind, other = rng.sample(sorted(CLASSES), 2)
    yes = rng.random() < 0.5
    word = rng.choice([w for w in CLASSES[kind if yes else other] if yes or w not in CLASSES[kind]])
    verdict = f"Yes, {with_article(word)} is {with_article(kind)}"
    if not yes:
        verdict = f"No, {with_article(word)} is not {with_article(kind)}. It is {with_article(other)}"
    return f"Is {with_article(word)} {with_article(kind)}?", f"{verdict}."


def days(rng: Random) -> Exchange:
    """Days of the week and months, one after another or a few steps apart."""
    cycle, word = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    i = rng.randrange(len(cycle))
    roll = rng.random()
    if roll < 0.4:
        return fill("[What|Which] {w} comes [right |]after {x}?", rng, {"w": word, "x": cycle[i]}), (
            f"{cycle[(i + 1) % len(cycle)]} comes after {cycle[i]}."
        )
    if roll < 0.7:
        return fill("[What|Which] {w} comes [right |]before {x}?", rng, {"w": word, "x": cycle[i]}), (
            f"{cycle[i - 1]} comes before {cycle[i]}."
        )
    n = rng.randint(1, 6)
    s = "" if n == 1 else "s"
    if word == "day":
        return f"Today is {cycle[i]}. What day is it in {n} day{s}?", f"It is {cycle[(i + n) % 7]}."
    return f"It is {cycle[i]}. What month is it in {n} month{s}?", f"It is {cycle[(i + n) % 12]}."


def size(rng: Random) -> Exchange:
    """Which of two animals is bigger."""
    i, j = sorted(rng.sample(range(len(SIZES)), 2))
    small, big = SIZES[i], SIZES[j]
    first, second = (small, big) if rng.random() < 0.5 else (big, small)
    more = rng.random() < 0.7
    word = rng.choice(("bigger", "larger", "heavier") if more else ("smaller", "lighter"))
    slots = {"w": word, "x": first, "y": second}
    if rng.random() < 0.6:
        question = fill("[Which is|What is|Which animal is] {w}, {a:x} or {a:y}?", rng, slots)
        one, other = (big, small) if more else (small, big)
        return question, f"{capitalised(with_article(one))} is {word} than {with_article(other)}."
    yes = (first == big) == more
    return fill("Is {a:x} {w} than {a:y}?", rng, slots), (
        f"Yes, {with_article(first)} is {word} than {with_article(second)}."
        if yes
        else f"No, {with_article(second)} is {word} than {with_article(first)}."
    )


def if_then(rng: Random) -> Exchange:
    """One rule and one fact: what follows, if anything does."""
    cause, effect = rng.choice(
        (
            ("it rains", "the street gets wet"),
            ("the bell rings", "the cat wakes up"),
            ("the lamp is on", "the room is bright"),
            ("the wind blows", "the mill turns"),
            ("the sun shines", "the snow melts"),
            ("{n} is tired", "{n} goes to bed"),
            ("{n} is hungry", "{n} eats an apple"),
            ("the door is open", "the dog runs out"),
        )
    )
    slots = {"n": any_name(rng)}
    cause, effect = fill(cause, rng, slots), fill(effect, rng, slots)
    if rng.random() < 0.6:
        return f"If {cause}, {effect}. {capitalised(cause)}. What happens?", f"{capitalised(effect)}."
    return f"If {cause}, {effect}. {capitalised(effect)}. Does that mean that {cause}?", (
        f"Not for certain. If {cause}, {effect}, but there may be another reason."
    )


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (order, 4),
    (syllogism, 2),
    (possession, 2.5),
    (location, 2.5),
    (container, 1),
    (colour, 1),
    (odd_one, 1.5),
    (membership, 2),
    (days, 2),
    (size, 1),
    (if_then, 1),
)
"""Every kind of exchange, with how often it comes."""
