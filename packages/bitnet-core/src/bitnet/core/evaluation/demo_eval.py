"""Evaluation of the demo model on problems it was never trained on, on any device (``bitnet eval demo``).

The problems are defined in :mod:`bitnet.core.evaluation.demo_problems`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import InvalidInputError
from bitnet.core.evaluation.demo_problems import CATEGORIES, Category, Problem, draw_problems

if TYPE_CHECKING:
    from bitnet.core.api import Model


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a category. ``wrong`` holds the first few wrong replies with their questions."""

    category: Category
    count: int
    exact: int
    wrong: tuple[tuple[str, str], ...]

    @property
    def accuracy(self) -> float:
        return self.exact / self.count

    @property
    def passed(self) -> bool | None:
        """Whether the claim was reached; None if there is no claim."""
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
        """The report as text: one line per category; ``surely`` is the lower end of the 95 % confidence interval."""
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
        problems: Number of problems per category; fewer for categories of refusals that have fewer.
        seed: Seed for drawing the problems.
        progress: Called with the problems done and the total.

    Raises:
        InvalidInputError: The model has no chat template, or a category has too few different problems.
        DeviceError: The device failed.
    """
    if model.chat_template is None:
        raise InvalidInputError(f"{model.config.name} has no chat template, so it cannot answer questions.")
    sets = {}
    for category in CATEGORIES:
        most = problems if category.digits else category.most()
        sets[category] = draw_problems(category, min(problems, most), seed)
    total, done, results = sum(map(len, sets.values())), 0, []
    for category, asked in sets.items():
        exact, wrong = 0, []
        for batch in _batches(asked):
            prompts = [model.chat_tokens([{"role": "user", "content": problem.question}]) for problem in batch]
            for problem, completion in zip(
                batch, model.generate_batch(prompts, max_tokens=64, temperature=0), strict=True
            ):
                if problem.solved_by(completion.text):
                    exact += 1
                else:
                    wrong.append((problem.question, completion.text))
            done += len(batch)
            if progress is not None:
                progress(done, total)
        results.append(Result(category, len(asked), exact, tuple(wrong[:5])))
    return EvalReport(model.config.name, model.device.name, seed, tuple(results))


_BATCH = 64  # problems submitted at a time; progress is updated after each batch


def _batches(asked: Sequence[Problem]) -> Iterator[Sequence[Problem]]:
    for begin in range(0, len(asked), _BATCH):
        yield asked[begin : begin + _BATCH]
