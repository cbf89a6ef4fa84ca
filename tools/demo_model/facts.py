"""Questions about well-known facts (``data/facts.toml``)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.lexicon import CLASSES
from demo_model.template import capitalised, fill, plural, read_data, with_article

_DATA = read_data("facts")
CAPITALS, CONTINENTS, QUESTIONS = (_DATA[key] for key in ("capitals", "continents", "questions"))
SOUNDS, YOUNG, HOMES, LEGS = (_DATA[key] for key in ("sounds", "young", "homes", "legs"))
MIXES, TYPICAL, MATERIALS, USES, JOBS = (_DATA[key] for key in ("mixes", "typical", "materials", "uses", "jobs"))


def capital(rng: Random) -> Exchange:
    country, city = rng.choice(CAPITALS)
    if rng.random() < 0.75:
        return fill("[What is|What's|Tell me|what is] the capital of {c}?", rng, {"c": country}), (
            f"The capital of {country} is {city}."
        )
    return fill("{c} is the capital of which country?", rng, {"c": city}), f"{city} is the capital of {country}."


def continent(rng: Random) -> Exchange:
    where = rng.choice(sorted(CONTINENTS))
    country = rng.choice(CONTINENTS[where])
    if rng.random() < 0.7:
        return fill("[On which continent is {c}?|Where is {c}?|Which continent is {c} in?]", rng, {"c": country}), (
            f"{country} is in {where}."
        )
    asked = rng.choice(sorted(CONTINENTS))
    return f"Is {country} in {asked}?", f"{'Yes' if asked == where else 'No'}, {country} is in {where}."


def animal(rng: Random) -> Exchange:
    """Sounds, young, homes and legs of animals."""
    roll = rng.random()
    if roll < 0.3:
        name, sound = rng.choice(SOUNDS)
        return fill(
            "[What sound does {a:n} make?|What does {a:n} say?|What noise does {a:n} make?]", rng, {"n": name}
        ), (f"{capitalised(with_article(name))} says {sound}.")
    if roll < 0.55:
        name, young = rng.choice(YOUNG)
        return fill(
            "[What is a baby {n} called?|What is a young {n} called?|What do you call a baby {n}?]", rng, {"n": name}
        ), (f"A baby {name} is called {with_article(young)}.")
    if roll < 0.8:
        name, home = rng.choice(HOMES)
        return fill("Where does {a:n} live?", rng, {"n": name}), f"{capitalised(with_article(name))} lives {home}."
    name, legs = rng.choice(LEGS)
    number = legs if "arms" in legs else f"{legs} legs"
    return fill("How many legs does {a:n} have?", rng, {"n": name}), f"{capitalised(with_article(name))} has {number}."


def described(rng: Random) -> Exchange:
    """Everything the tables know about an animal."""
    homes, young, sounds, legs = dict(HOMES), dict(YOUNG), dict(SOUNDS), dict(LEGS)
    name = rng.choice(sorted({*homes, *young, *sounds, *legs} - {"human"}))
    known = []
    if name in legs:
        known.append(f"has {legs[name] if 'arms' in legs[name] else legs[name] + ' legs'}")
    if name in homes:
        known.append(f"lives {homes[name]}")
    if name in sounds:
        known.append(f"says {sounds[name]}")
    text = (
        f"{capitalised(with_article(name))} {' and '.join(filter(None, (', '.join(known[:-1]), *known[-1:])))}. "
        if known
        else ""
    )
    if name in young:
        text += f"{'Its baby' if known else f'A baby {name}'} is called {with_article(young[name])}."
    question = "[Tell me about|What do you know about|Tell me something about] [{p}|the {n}][.|]"
    return fill(question, rng, {"n": name, "p": plural(name)}), text.strip()


def thing(rng: Random) -> Exchange:
    """Colours, materials, uses and jobs."""
    roll = rng.random()
    if roll < 0.15:
        colours, result = rng.choice(MIXES)
        return fill(
            "[What colour do you get when you mix {c}?|What do {c} make?|Mix {c}. What colour is it?]",
            rng,
            {"c": colours},
        ), f"{capitalised(colours)} make {result}."
    if roll < 0.4:
        name, colour = rng.choice(TYPICAL)
        return fill("What [colour|color] is {n}?", rng, {"n": name}), (f"{capitalised(name)} is {colour}.")
    if roll < 0.6:
        name, material = rng.choice(MATERIALS)
        verb = "are" if name in ("chips", "raisins") else "is"
        return f"What {verb} {name} made of?", f"{capitalised(name)} {verb} made of {material}."
    if roll < 0.8:
        name, use = rng.choice(USES)
        verb = "are" if name in ("scissors", "glasses") else "is"
        question = f"What {verb} {name} for?" if rng.random() < 0.6 else f"What do you use {name} for?"
        return question, f"You use {name} {use}."
    name, work = rng.choice(JOBS)
    if rng.random() < 0.6:
        return f"What does {name} do?", f"{capitalised(name)} {work}."
    return f"Who {work}?", f"{capitalised(name)} {work}."


def month(rng: Random) -> Exchange:
    name, count = rng.choice(list(_DATA["days_of_months"].items()))
    leap = ", and 29 in a leap year" if name == "February" else ""
    return fill(
        "How many days [are in {m}|does {m} have|has {m}]?", rng, {"m": name}
    ), f"{name} has {count} days{leap}."


def classed(rng: Random) -> Exchange:
    """What something is: a member of a kind of things."""
    kind = rng.choice(sorted(CLASSES))
    word = rng.choice(CLASSES[kind])
    one = word if kind == "colour" else with_article(word)
    question = fill("[What is|What's|What kind of thing is] {w}?", rng, {"w": one})
    return question, f"{capitalised(one)} is {with_article(kind)}."


def general(rng: Random) -> Exchange:
    questions, answer = rng.choice(QUESTIONS)
    return rng.choice(questions.split("|")), answer


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (capital, 4),
    (continent, 1),
    (animal, 3),
    (described, 1),
    (thing, 4),
    (general, 9),
    (month, 0.7),
    (classed, 1),
)
"""Every kind of exchange, with how often it comes."""
