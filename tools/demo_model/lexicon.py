"""The words generated text is made of: names, creatures, places, things (``data/lexicon.toml``)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from demo_model.template import read_data

_DATA = read_data("lexicon")


def _words(key: str) -> list[str]:
    words: str = _DATA[key]
    return words.split()


def _phrases(key: str) -> list[str]:
    return list(_DATA[key])


class Pronouns(NamedTuple):
    """Subject, object, possessive, reflexive."""

    he: str
    him: str
    his: str
    himself: str


HE = Pronouns("he", "him", "his", "himself")
SHE = Pronouns("she", "her", "her", "herself")
HE_NAMES, SHE_NAMES = _words("he_names"), _words("she_names")
ANIMALS, MAGICAL, PEOPLE, MACHINES = _words("animals"), _words("magical"), _words("people"), _words("machines")
ALWAYS_HE, ALWAYS_SHE = frozenset(_words("always_he")), frozenset(_words("always_she"))
TRAITS, LOOKS, COLOURS, ROOMS, THINGS = (_words(key) for key in ("traits", "looks", "colours", "rooms", "things"))
DRINKS, SIZES = _words("drinks"), _words("sizes")
TREASURES, FOODS, TIMES = _phrases("treasures"), _phrases("foods"), _phrases("times")
CLASSES = {kind: words.split() for kind, words in _DATA["classes"].items()}
"""Members of kinds of things: "fruit", "bird"."""
SYLLABLES = _words("syllables")
CODAS = [
    "",
    "",
    "",
    "b",
    "d",
    "g",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "x",
    "ck",
    "ff",
    "ng",
    "mp",
    "nk",
    "sh",
    "zz",
]


@dataclass(frozen=True)
class Place:
    """Where a story happens.

    Attributes:
        at: Where one lives there ("in a quiet forest").
        there: How it is spoken of later ("in the forest").
        name: Its name alone ("the forest").
        mark: Something everybody there knows ("the old oak").
        nook: Where things get lost ("under a heap of leaves").
        danger: What blocks the way ("a fallen tree").
        sound: What is heard there at night ("the wind in the branches").
    """

    at: str
    there: str
    name: str
    mark: str
    nook: str
    danger: str
    sound: str


PLACES = [Place(**place) for place in _DATA["places"]]


def made_up(rng: Random) -> str:
    """A word that does not exist, so that the model learns to repeat words it has never seen."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3)))) + rng.choice(CODAS)


def name_and_pronouns(rng: Random, kind: str = "", *, strange: float = 0.06) -> tuple[str, Pronouns]:
    """A name with pronouns that fit it and, where one is given, the kind of creature."""
    male = rng.random() < 0.5
    if kind in ALWAYS_HE or kind in ALWAYS_SHE:
        male = kind in ALWAYS_HE
    name = rng.choice(HE_NAMES if male else SHE_NAMES)
    if rng.random() < strange:
        name = made_up(rng).capitalize()
    return name, HE if male else SHE


def several_names(rng: Random, count: int) -> list[str]:
    """Different names."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[any_name(rng)] = None
    return list(names)


def any_name(rng: Random, *, strange: float = 0.06) -> str:
    """A name."""
    return made_up(rng).capitalize() if rng.random() < strange else rng.choice(rng.choice((HE_NAMES, SHE_NAMES)))


def creature(rng: Random, *, strange: float = 0.1) -> str:
    """A hero's kind: mostly an animal; sometimes a word that does not exist."""
    roll = rng.random()
    if roll < strange:
        return made_up(rng)
    if roll < 0.62:
        word = rng.choice(ANIMALS)
    elif roll < 0.74:
        word = rng.choice(MAGICAL)
    elif roll < 0.88:
        word = rng.choice(PEOPLE)
    else:
        word = rng.choice(MACHINES)
    return word.replace("-", " ")
