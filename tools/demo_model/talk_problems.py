"""Evaluation problems of small talk and letter puzzles that are held out of the training (``data/unseen_talk.toml``).

The phrasings, the words of puzzles, and the cities and names of users are none of the training's. Two lists of
questions are about things of which the training has nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from random import Random
from typing import Any

from demo_model.problems import REFUSALS, frame
from demo_model.puzzles import word_slots
from demo_model.template import capitalised, read_data

_DATA = read_data("unseen_talk")
WORDS: list[str] = _DATA["words"].split()
PALINDROMES: list[str] = _DATA["palindromes"].split()
UNSEEN_WORDS = frozenset((*WORDS, *PALINDROMES))
UNSEEN_VALUES = frozenset((*_DATA["cities"], *_DATA["names"]))
UNSEEN_TOPICS = frozenset(_DATA["topics"])
KINDS: list[dict[str, Any]] = _DATA["kinds"]
OTHER_KINDS = "letter puzzles of other kinds"
ELSEWHERE = "anything else"
_GREETING = "(?:(?:hi|hello|hey|please|question|so|ok|good morning) )?"


@lru_cache(maxsize=1)
def _patterns() -> tuple[frozenset[str], re.Pattern[str]]:
    """Held-out questions of signs alone, and a pattern of the frames of all others."""
    questions = [q for kind in (*KINDS, _DATA["kinds_held_out"], _DATA["elsewhere"]) for q in kind["questions"]]
    signs = frozenset(q for q in questions if not frame(q).strip("# "))
    words = "(?:[^ ]+|" + "|".join(frame(topic) for topic in _DATA["topics"] if " " in topic) + ")"
    frames = {re.escape(frame(q)).replace(r"\#", words) for q in questions if q not in signs}
    return signs, re.compile(f"{_GREETING}(?:{'|'.join(sorted(frames))})")


def is_unseen_talk(question: str) -> bool:
    """Whether a question has a phrasing that is held out, with any words in its slots."""
    signs, pattern = _patterns()
    return question in signs or pattern.fullmatch(frame(question)) is not None


def talk_problems(each: int, seed: int) -> Iterator[dict[str, Any]]:
    """``each`` problems of every kind, as lines of a file for ``bitnet eval``; fewer where there are fewer."""
    for kind in KINDS:
        yield from _drawn(kind, each, Random(f"{kind['name']} {seed}"), kind["name"])
    for name, kind in ((OTHER_KINDS, _DATA["kinds_held_out"]), (ELSEWHERE, _DATA["elsewhere"])):
        right = {"contains": [*REFUSALS, "I speak English"], "lacks": ["="]}
        yield from _drawn({"right": right} | kind, 3 * each, Random(f"{name} {seed}"), name)


def _drawn(kind: Mapping[str, Any], count: int, rng: Random, name: str) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for i in range(20 * count):
        if len(seen) == count:
            return
        slots = _slots(rng)
        question = kind["questions"][i % len(kind["questions"])]
        messages = [
            {"role": role, "content": _filled(text, slots)}
            for turn in kind.get("before", ())
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        messages.append({"role": "user", "content": _filled(question, slots)})
        key = str(messages)
        if key in seen:
            continue
        seen.add(key)
        right: dict[str, Any] = {}
        for check, value in kind["right"].items():
            right[check] = [_filled(v, slots) for v in value] if isinstance(value, list) else int(_filled(value, slots))
        yield {"category": name, "messages": messages, **right}


def _filled(text: str, slots: Mapping[str, object]) -> str:
    def value(match: re.Match[str]) -> str:
        key = match[1]
        return str(slots[key]) if key in slots else capitalised(str(slots[key[0].lower() + key[1:]]))

    return re.sub(r"\{(\w+)\}", value, text)


_STATEMENTS = (
    (
        "I work as {x}.",
        "{X}? That is a good job.",
        ("What did I say my work is?", "By trade I am what?"),
        ("a beekeeper", "an optician", "a goldsmith", "a clown"),
    ),
    (
        "I have a parrot called {x}.",
        "{x} is a good name for a parrot.",
        ("How did I name my parrot?", "My parrot, what's its name again?"),
        ("Pirx", "Gonzo", "Tilla", "Basko"),
    ),
    (
        "I am {x} years old.",
        "{x} is a good age.",
        ("What's my age again, in years?", "And my age was what?"),
        ("17", "34", "58", "71"),
    ),
)


def _slots(rng: Random) -> dict[str, object]:
    slots = word_slots(rng, WORDS, PALINDROMES)
    a, b, k, h = rng.randint(2, 40), rng.randint(2, 50), rng.randint(2, 9), rng.randint(2, 40)
    while str(slots["m"]) == slots["l"]:
        slots = word_slots(rng, WORDS, PALINDROMES)
    numbers = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
    slots |= {"a": a, "b": b, "sum": a + b, "k": k if rng.random() < 0.5 else numbers[k - 2], "times": (a + b) * k}
    slots |= {"h": h, "h2": 2 * h, "h4": 4 * h, "city": rng.choice(_DATA["cities"]), "name": rng.choice(_DATA["names"])}
    topic = rng.choice(_DATA["topics"])
    this, that = rng.sample(_DATA["choices"], 2)
    slots |= {"topic": topic, "a_topic": f"{'an' if topic[0] in 'aeiou' else 'a'} {topic}", "this": this, "that": that}
    thing = rng.choice(sorted(_FAVOURITES))
    slots |= {"thing": thing, "favourite": rng.choice(_FAVOURITES[thing])}
    statement, replied, asked, values = rng.choice(_STATEMENTS)
    answer = rng.choice(values)
    slots |= {"told": statement.format(x=answer), "replied": replied.format(x=answer, X=capitalised(answer))}
    slots |= {"asked": rng.choice(asked), "answer": answer}
    return slots | {"foreign_hello": rng.choice(_HELLO), "foreign_bye": rng.choice(_BYE)}


_FAVOURITES = {
    "food": ("lasagne", "goulash", "falafel"),
    "animal": ("axolotl", "puffin", "gecko"),
    "flower": ("orchid", "peony"),
    "sport": ("fencing", "archery"),
    "drink": ("cider", "ginger ale"),
    "colour": ("turquoise", "magenta"),
}
_HELLO = (
    *("bonjour", "salut", "hola", "guten Tag", "hallo", "ciao", "olá", "goedemorgen", "hej", "cześć", "merhaba", "moi"),
    *("konnichiwa", "privet", "ni hao", "buongiorno", "buenos días"),
)
_BYE = (
    "au revoir",
    "adiós",
    "auf Wiedersehen",
    "tschüss",
    "arrivederci",
    "tchau",
    "tot ziens",
    "hej då",
    "merci",
    "gracias",
    "danke",
    "grazie",
)
