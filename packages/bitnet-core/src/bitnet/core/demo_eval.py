"""How good the demo model is: problems it was never trained on, asked on any device (``bitnet eval demo``).

The demo model is trained by ``tools/demo_model`` on generated text. What may not be in that text is decided here, by
:func:`held_out`, which the training data's generator imports: no sum and no difference of a held-out pair of numbers
occurs in training, in either order and in any wording. The evaluation asks held-out pairs only.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from bitnet.core.api import Model

HELD_OUT_PART = 5
"""One pair in this many is held out."""
_SALT = "bitnet-demo-4"  # with which 17 and 25, whose sum the README asks for, are held out

ADDITION = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a}+{b}",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
)
SUBTRACTION = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "{a}-{b}",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "How much is {a} minus {b}?",
    "Take {b} away from {a}.",
)
GAIN = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in a box. {name} puts {b} more into it. How many {things} are in the box?",
    "{name} finds {a} {things} in the morning and {b} {things} in the evening. How many {things} is that in all?",
)
LOSS = (
    "{name} has {a} {things} and gives away {b} of them. How many {things} are left?",
    "There are {a} {things} in a box. {name} takes out {b}. How many {things} are still in the box?",
    "{name} had {a} {things} but lost {b}. How many {things} does {name} have now?",
)
NAMES = ("Anna", "Ben", "Clara", "Leo", "Mia", "Nora", "Omar", "Tom")
THINGS = ("apples", "books", "buttons", "coins", "marbles", "shells", "stamps", "stones")


@lru_cache(maxsize=1 << 20)
def held_out(a: int, b: int) -> bool:
    """Whether the sum and the differences of two numbers are kept out of the training data.

    One in :data:`HELD_OUT_PART` unordered pairs of numbers of two or more digits is, chosen by a hash.
    """
    low, high = min(a, b), max(a, b)
    if low < 10:
        return False
    digest = hashlib.blake2b(f"{_SALT} {low} {high}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_PART == 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with one right number."""

    question: str
    answer: int


@dataclass(frozen=True, slots=True)
class Category:
    """A kind of problem.

    Attributes:
        digits: Digits of both numbers.
        claim: Fraction of exact answers the model is claimed to reach, or None where nothing is claimed.
    """

    name: str
    digits: int
    forms: tuple[tuple[str, int], ...]
    claim: float | None


def _forms(templates: Sequence[str], sign: int) -> tuple[tuple[str, int], ...]:
    return tuple((template, sign) for template in templates)


CATEGORIES = (
    Category("addition, 2 digits", 2, _forms(ADDITION, 1), 0.99),
    Category("subtraction, 2 digits", 2, _forms(SUBTRACTION, -1), 0.99),
    Category("addition, 3 digits", 3, _forms(ADDITION, 1), 0.95),
    Category("subtraction, 3 digits", 3, _forms(SUBTRACTION, -1), 0.95),
    Category("word problems, 2 digits", 2, _forms(GAIN, 1) + _forms(LOSS, -1), None),
    Category("sums and differences, 4 digits", 4, _forms(ADDITION, 1) + _forms(SUBTRACTION, -1), None),
)


def draw_problems(category: Category, count: int, seed: int) -> list[Problem]:
    """``count`` different held-out problems; the same for the same seed, on any machine.

    Pairs are drawn uniformly, in either order, so that about half of the differences are negative (those of things
    that are given away are not).

    Raises:
        InvalidInputError: There are fewer than ``count`` such problems.
    """
    rng = random.Random(f"{category.name} {seed}")
    low, high = 10 ** (category.digits - 1), 10**category.digits - 1
    most = (high - low + 1) ** 2 // HELD_OUT_PART * len(category.forms) // 2  # half of those there are: drawn fast
    if not 0 < count <= most:
        raise InvalidInputError(f"{category.name}: {count} problems were asked for; it takes 1 to {most}.")
    seen: dict[Problem, None] = {}
    while len(seen) < count:
        a, b = rng.randint(low, high), rng.randint(low, high)
        template, sign = rng.choice(category.forms)
        if template in LOSS:
            a, b = max(a, b), min(a, b)
        if held_out(a, b):
            question = template.format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
            seen[Problem(question, a + sign * b)] = None
    return list(seen)


def number_in(reply: str) -> int | None:
    """The number a reply gives: the last one in it. None where there is none."""
    numbers = re.findall(r"-?\d+", reply)
    return int(numbers[-1]) if numbers else None


@dataclass(frozen=True, slots=True)
class Result:
    """How a category went. ``wrong`` holds questions and replies, the first few."""

    category: Category
    count: int
    exact: int
    wrong: tuple[tuple[str, str], ...]

    @property
    def accuracy(self) -> float:
        return self.exact / self.count

    @property
    def passed(self) -> bool | None:
        """Whether the claim was reached; None where there is none."""
        return None if self.category.claim is None else self.accuracy >= self.category.claim

    @property
    def lower(self) -> float:
        """Lower end of the accuracy's 95 % confidence interval (Wilson 1927)."""
        z, n, p = 1.96, self.count, self.accuracy
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (p + z * z / (2 * n) - spread) / (1 + z * z / n))


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The result of every category, in order."""

    model: str
    device: str
    seed: int
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether every claim was reached."""
        return all(result.passed is not False for result in self.results)

    def to_json(self) -> Mapping[str, Any]:
        """The report as plain data."""
        return {
            "model": self.model,
            "device": self.device,
            "seed": self.seed,
            "passed": self.passed,
            "categories": [
                {
                    "name": result.category.name,
                    "problems": result.count,
                    "exact": result.exact,
                    "accuracy": result.accuracy,
                    "lower": result.lower,
                    "claim": result.category.claim,
                    "wrong": [{"question": question, "reply": reply} for question, reply in result.wrong],
                }
                for result in self.results
            ],
        }

    def table(self) -> str:
        """The report for people: one line a category; ``surely`` is the lower end of the 95 % confidence interval."""
        lines = [f"{'held-out problems':<32}{'n':>6}{'exact':>9}{'surely':>9}   claim"]
        for result in self.results:
            claim = "" if result.category.claim is None else f"≥ {result.category.claim:.0%} "
            verdict = {True: "reached", False: "MISSED", None: "no claim"}[result.passed]
            line = f"{result.category.name:<32}{result.count:>6}{result.accuracy:>9.2%}{result.lower:>9.2%}"
            lines.append(f"{line}   {claim}{verdict}")
        return "\n".join(lines)


def run(
    model: Model, *, problems: int = 500, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> EvalReport:
    """Ask the model ``problems`` held-out problems of each category, greedily, and count the exact answers.

    Args:
        model: Any model with a chat template; the claims are about the demo model.
        problems: Of each category.
        seed: Which problems are drawn.
        progress: Called with problems done and in all.

    Raises:
        InvalidInputError: The model has no chat template, or there are fewer different problems.
        DeviceError: The device failed.
    """
    if model.chat_template is None:
        raise InvalidInputError(f"{model.config.name} has no chat template, so it cannot be asked.")
    sets = {category: draw_problems(category, problems, seed) for category in CATEGORIES}
    total, done, results = len(CATEGORIES) * problems, 0, []
    for category, asked in sets.items():
        exact, wrong = 0, []
        for batch in _batches(asked):
            prompts = [model.chat_tokens([{"role": "user", "content": problem.question}]) for problem in batch]
            for problem, completion in zip(
                batch, model.generate_batch(prompts, max_tokens=64, temperature=0), strict=True
            ):
                if number_in(completion.text) == problem.answer:
                    exact += 1
                else:
                    wrong.append((problem.question, completion.text))
            done += len(batch)
            if progress is not None:
                progress(done, total)
        results.append(Result(category, len(asked), exact, tuple(wrong[:5])))
    return EvalReport(model.config.name, model.device.name, seed, tuple(results))


_BATCH = 64  # problems handed over at a time: progress shows after each


def _batches(asked: Sequence[Problem]) -> Iterator[Sequence[Problem]]:
    for begin in range(0, len(asked), _BATCH):
        yield asked[begin : begin + _BATCH]
