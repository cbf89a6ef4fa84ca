"""Letter puzzles: spelling, counting, reversing, comparing (``data/letters.toml``), one or several about a word."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from demo_model.arithmetic import Exchange
from demo_model.puzzles import LETTERS, word_slots
from demo_model.talk_problems import UNSEEN_WORDS, is_unseen_talk
from demo_model.template import Slots, capitalised, fill, read_data

_DATA = read_data("letters")
PUZZLES: list[dict[str, Any]] = _DATA["puzzles"]
PALINDROMES: list[str] = _DATA["palindromes"].split()
_OF_ONE_WORD = [
    puzzle
    for puzzle in PUZZLES
    if not {"{v_numbered}", "{p_spelt}", "{joined}"} & set(re.findall(r"\{\w+\}", puzzle["answer"]))
]
_WEIGHTS = [puzzle["weight"] for puzzle in PUZZLES]


def _every_word() -> list[str]:
    """The words of all data files but those of the evaluation, in small letters, of three to twelve letters."""
    found: set[str] = set()
    for path in sorted((Path(__file__).parent / "data").glob("*.toml")):
        if path.stem != "unseen_talk":
            found |= set(re.findall(r"(?<![\w'{])[a-z]{3,12}(?![\w'}])", path.read_text(encoding="utf-8")))
    return sorted(found - UNSEEN_WORDS)


WORDS = _every_word()
FAVOURITES = [w for w in read_data("words")["spelling"].split() if w not in UNSEEN_WORDS]
"""Words that people often ask about."""


def _following() -> dict[str, str]:
    """Letters that follow two letters in words, each as often as it does; "." at the end."""
    found: dict[str, str] = {}
    for word in WORDS:
        text = f"  {word}."
        for i in range(2, len(text)):
            found[text[i - 2 : i]] = found.get(text[i - 2 : i], "") + text[i]
    return found


_FOLLOWING = _following()


def invented(rng: Random) -> str:
    """A word that looks like English, so that the letters of all parts of words are learnt."""
    while True:
        word = "  "
        while word[-1] != "." and len(word) < 15:
            word += rng.choice(_FOLLOWING[word[-2:]])
        word = word[2:].rstrip(".")
        if 3 <= len(word) <= 12 and word not in UNSEEN_WORDS:
            return word


def a_word(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.2:
        return rng.choice(FAVOURITES)
    if roll < 0.7:
        return rng.choice(WORDS)
    if roll < 0.97:
        return invented(rng)
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8)))


def slots(rng: Random) -> dict[str, object]:
    while True:
        words = [a_word(rng) for _ in range(4)]
        if len({len(word) for word in words}) > 1 and len(set(words)) == 4:
            return word_slots(rng, words, PALINDROMES)


def asked(rng: Random, templates: list[str], given: Slots) -> str:
    """A question of one of the templates, in a phrasing that is not held out."""
    while True:
        question = capitalised(fill(rng.choice(templates), rng, given))
        if not is_unseen_talk(question):
            return question


def puzzle(rng: Random) -> Exchange:
    given = slots(rng)
    kind = rng.choices(PUZZLES, _WEIGHTS)[0]
    return asked(rng, kind["questions"], given), fill(kind["answer"], rng, given)


def declined(rng: Random) -> Exchange:
    return asked(rng, _DATA["declined"], slots(rng)), _DATA["declines"]


def several(rng: Random) -> list[Exchange]:
    """A puzzle, and more about the same word."""
    given = slots(rng)
    kind = rng.choice(_OF_ONE_WORD)
    turns = [(asked(rng, kind["questions"], given), fill(kind["answer"], rng, given))]
    word = str(given["w"])
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        fresh = _again(rng, word)
        template, answer = rng.choice(_DATA["follow_ups"])
        turns.append((asked(rng, [template], fresh), fill(answer, rng, fresh)))
    return turns


def _again(rng: Random, word: str) -> dict[str, object]:
    """Slots about the same word."""
    other = "xylophones" if len(word) != 10 else "xylophone"
    while True:
        found = word_slots(rng, [word, other], PALINDROMES)
        if found["w"] == word:
            return found


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = ((puzzle, 12), (declined, 1))
"""Every kind of exchange, with how often it comes."""
