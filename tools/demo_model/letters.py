"""Letter puzzles: spelling, counting, reversing, comparing (``data/letters.toml``), one or several about a word."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
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
FRAMES: dict[str, list[str]] = _DATA["frames"]
WHOLE = 0.25
"""Share of questions that are written out; the others are a part within a frame."""
NAMED = """[{\\1}|{\\1}|the word {\\1}|'{\\1}'|"{\\1}"|the word '{\\1}'|the word "{\\1}"]"""
"""Ways to name the word that is asked about."""
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
    return sorted(found)


def _may_be_seen(word: str) -> bool:
    """Whether no word of the evaluation is a part of a word, which a count of letters would spell."""
    return not any(unseen in word for unseen in UNSEEN_WORDS)


WORDS = list(filter(_may_be_seen, _every_word()))
"""Words that puzzles are about."""
UNSPELT = sorted(set(_every_word()) - set(WORDS))
"""The other words of the data files."""
FAVOURITES = [w for w in read_data("words")["spelling"].split() if _may_be_seen(w)]
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
        if 3 <= len(word) <= 12 and _may_be_seen(word):
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


def palindrome(rng: Random) -> str:
    """A palindrome: a known one, or letters and the same letters from the end; at times with one letter changed."""
    if rng.random() < 0.3:
        return rng.choice(PALINDROMES)
    while True:
        half = invented(rng)[: rng.randint(2, 4)]
        word = half + half[::-1][rng.randint(0, 1) :]
        if rng.random() < 0.3:
            place = rng.randrange(len(word))
            word = word[:place] + rng.choice(LETTERS) + word[place + 1 :]
        if _may_be_seen(word):
            return word


def slots(rng: Random) -> dict[str, object]:
    while True:
        words = [a_word(rng) for _ in range(4)]
        if len({len(word) for word in words}) > 1 and len(set(words)) == 4:
            return word_slots(rng, words, [palindrome(rng)])


def template(rng: Random, written: list[str], parts: Mapping[str, Any], frames: Mapping[str, list[str]]) -> str:
    """A question as a template: one that is written out, or one of the parts within a frame of its form."""
    if rng.random() < WHOLE:
        return rng.choice(written)
    form = rng.choice([form for form in frames if form in parts])
    whole = rng.choice(frames[form]).replace("<>", rng.choice(parts[form]))
    return re.sub("<([wp])>", NAMED, whole)


def puzzle_template(rng: Random, kind: Mapping[str, Any]) -> str:
    return template(rng, kind["questions"], kind, FRAMES)


def asked(rng: Random, templates: list[str], given: Slots) -> str:
    """A question of one of the templates, in a phrasing that is not held out."""
    return phrased(rng, lambda: rng.choice(templates), given)


def phrased(rng: Random, choose: Callable[[], str], given: Slots) -> str:
    """A question of a template, chosen anew until the phrasing is not held out."""
    while True:
        question = capitalised(fill(choose(), rng, given))
        if not is_unseen_talk(question):
            return question


def puzzle(rng: Random) -> Exchange:
    given = slots(rng)
    kind = rng.choices(PUZZLES, _WEIGHTS)[0]
    return phrased(rng, partial(puzzle_template, rng, kind), given), fill(kind["answer"], rng, given)


def declined(rng: Random) -> Exchange:
    return asked(rng, _DATA["declined"], slots(rng)), _DATA["declines"]


def several(rng: Random) -> list[Exchange]:
    """A puzzle, and more about the same word."""
    given = slots(rng)
    kind = rng.choice(_OF_ONE_WORD)
    turns = [(phrased(rng, partial(puzzle_template, rng, kind), given), fill(kind["answer"], rng, given))]
    word = str(given["w"])
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        fresh = _again(rng, word)
        follow_up, answer = rng.choice(_DATA["follow_ups"])
        turns.append((asked(rng, [follow_up], fresh), fill(answer, rng, fresh)))
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
