"""Evaluation problems of the demo model that are held out of its training.

This module, which the generator imports, defines what the training text must not contain: sums and differences of
held-out pairs of numbers (:func:`held_out`), questions with a held-out phrasing (:func:`is_unseen`), and anything about
the people, countries and subjects of refusals. ``tools/make_demo_eval.py`` writes the problems to a file that
``bitnet eval`` reads.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bitnet.core.errors import InvalidInputError
from bitnet.core.evaluation.questions import number_in
from demo_model.held_out import (
    ADDITION,
    BEYOND_ARITHMETIC,
    BEYOND_FACTS,
    COUNTRIES,
    GAIN,
    LOSS,
    NAMES,
    PEOPLE,
    SUBJECTS,
    SUBTRACTION,
    TASKS,
    THINGS,
    UNSEEN_ADDITION,
    UNSEEN_SUBTRACTION,
)

HELD_OUT_PART = 5
"""One pair in this many is held out."""
_SALT = "bitnet-demo-4"  # chosen so that 17 and 25, whose sum the README asks for, are held out


@lru_cache(maxsize=1 << 20)
def held_out(a: int, b: int) -> bool:
    """Whether the sum and the differences of two numbers are held out of the training data.

    A hash selects one in :data:`HELD_OUT_PART` unordered pairs of numbers with two or more digits.
    """
    low, high = min(a, b), max(a, b)
    if low < 10:
        return False
    digest = hashlib.blake2b(f"{_SALT} {low} {high}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_PART == 0


def frame(question: str) -> str:
    """A question without numbers (or template slots), capitals, spaces and punctuation."""
    text = re.sub(r"\{\w+\}|\d[\d,.]*(?<![,.])", "#", question.lower().replace("−", "-"))
    return " ".join(re.findall(r"[a-z#]+|[-+*/^%=]", text))


_UNSEEN = re.compile("|".join(re.escape(frame(form)) for form in (*UNSEEN_ADDITION, *UNSEEN_SUBTRACTION)))


def is_unseen(question: str) -> bool:
    """Whether a question, or a template of one, contains a phrasing that is held out."""
    return _UNSEEN.search(frame(question)) is not None


@dataclass(frozen=True, slots=True)
class Problem:
    """A question whose right answer is a number, or None if the model should refuse."""

    question: str
    answer: int | None

    def solved_by(self, reply: str) -> bool:
        """Whether a reply is right."""
        return refuses(reply) if self.answer is None else number_in(reply) == self.answer


REFUSALS = ("I can only", "I cannot", "I do not know", "I do not speak", "I am not sure", "too difficult for me")
"""What a reply says that refuses."""


def refuses(reply: str) -> bool:
    """Whether a reply says that the model cannot solve the problem or does not know, and gives no result."""
    return any(text.lower() in reply.lower() for text in REFUSALS) and "=" not in reply


@dataclass(frozen=True, slots=True)
class Category:
    """A kind of problem.

    Attributes:
        digits: Digits of both numbers; 0 if the problems should be refused.
        forms: Question templates, each with the sign of its second number (0: to be refused).
        claim: Claimed fraction of right answers; None if nothing is claimed.
    """

    name: str
    digits: int
    forms: tuple[tuple[str, int], ...]
    claim: float | None

    def most(self) -> int:
        """Maximum number of problems to draw: half of all there are, so that drawing is fast."""
        if self.digits:
            numbers: int = 9 * 10 ** (self.digits - 1)
            return numbers * numbers // HELD_OUT_PART * len(self.forms) // 2
        return sum(_variety(form) for form, _ in self.forms) // 2


def _forms(*signed: tuple[Sequence[str], int]) -> tuple[tuple[str, int], ...]:
    return tuple((template, sign) for templates, sign in signed for template in templates)


_UNSEEN_FORMS = _forms((UNSEEN_ADDITION, 1), (UNSEEN_SUBTRACTION, -1))
CATEGORIES = (
    Category("addition, 2 digits", 2, _forms((ADDITION, 1)), 0.99),
    Category("subtraction, 2 digits", 2, _forms((SUBTRACTION, -1)), 0.99),
    Category("addition, 3 digits", 3, _forms((ADDITION, 1)), 0.95),
    Category("subtraction, 3 digits", 3, _forms((SUBTRACTION, -1)), 0.95),
    Category("word problems, 2 digits", 2, _forms((GAIN, 1), (LOSS, -1)), None),
    Category("sums and differences, 4 digits", 4, _forms((ADDITION, 1), (SUBTRACTION, -1)), None),
    Category("unseen phrasings, 2 digits", 2, _UNSEEN_FORMS, 0.99),
    Category("unseen phrasings, 3 digits", 3, _UNSEEN_FORMS, 0.99),
    Category("refusals, arithmetic beyond it", 0, _forms((BEYOND_ARITHMETIC, 0)), 0.95),
    Category("refusals, unknown facts", 0, _forms((BEYOND_FACTS, 0)), 0.95),
)


def draw_problems(category: Category, count: int, seed: int) -> list[Problem]:
    """Draw ``count`` different held-out problems; the same seed gives the same problems on any machine.

    Pairs are drawn uniformly, in either order, so about half of the differences are negative (except in word problems
    about losing things).

    Raises:
        InvalidInputError: There are fewer than ``count`` such problems.
    """
    most = category.most()
    if not 0 < count <= most:
        raise InvalidInputError(f"{category.name}: {count} problems were asked for; it takes 1 to {most}.")
    rng = random.Random(f"{category.name} {seed}")
    seen: dict[Problem, None] = {}
    while len(seen) < count:
        for problem in _drawn(category, rng):
            seen[problem] = None
    return list(seen)


def _drawn(category: Category, rng: random.Random) -> Iterator[Problem]:
    """Yield a problem, or nothing if the pair drawn is not held out."""
    if not category.digits:
        template, _ = rng.choice(category.forms)
        yield Problem(re.sub(r"\{(\w+)\}", lambda slot: _SLOTS[slot[1]][0](rng), template), None)
        return
    low, high = 10 ** (category.digits - 1), 10**category.digits - 1
    a, b = rng.randint(low, high), rng.randint(low, high)
    template, sign = rng.choice(category.forms)
    if template in LOSS:
        a, b = max(a, b), min(a, b)
    if held_out(a, b):
        question = template.format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
        yield Problem(question, a + sign * b)


def _number(low: int, high: int) -> tuple[Callable[[random.Random], str], int]:
    return (lambda rng: str(rng.randint(low, high))), high - low + 1


def _one(values: Sequence[str]) -> tuple[Callable[[random.Random], str], int]:
    return (lambda rng: rng.choice(values)), len(values)


_SLOTS: dict[str, tuple[Callable[[random.Random], str], int]] = {
    "big": ((lambda rng: str(rng.randint(1, 9) * 10 ** (n := rng.randint(4, 8)) + rng.randint(0, 10**n - 1))), 10**6),
    "small": _number(3, 9999),
    "two": _number(13, 99),
    "three": _number(101, 998),
    "power": _number(4, 9),
    "odd": _one(("7", "13", "17", "19", "23", "29")),
    "decimal": ((lambda rng: f"{rng.randint(0, 99)}.{rng.randint(1, 99)}"), 9900),
    "year": _number(1700, 2030),
    "person": _one(PEOPLE),
    "country": _one(COUNTRIES),
    "subject": _one(SUBJECTS),
    "task": _one(TASKS),
}
"""Functions that fill the slots of problems to be refused, each with its number of possibilities."""


def _variety(template: str) -> int:
    product = 1
    for slot in re.findall(r"\{(\w+)\}", template):
        product *= _SLOTS[slot][1]
    return product
