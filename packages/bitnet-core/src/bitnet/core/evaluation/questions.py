"""Ask a model questions whose answers are known, from a JSONL file (``bitnet eval``)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import InvalidInputError
from bitnet.core.support.foreign import label

if TYPE_CHECKING:
    from bitnet.core.api import Model

MAX_TOKENS = 256
"""Tokens of a reply, at most."""
_BATCH = 64  # questions submitted at a time; progress is updated after each batch
_CHECKS = ("number", "equals", "contains", "lacks")


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what a right reply is like; every check that is given must hold.

    Attributes:
        category: The results of a category are counted together.
        messages: The conversation up to the reply.
        number: The last number of the reply.
        equals: The whole reply, without space around it.
        contains: Texts of which the reply has at least one, in any case of letters.
        lacks: Texts of which the reply has none.
    """

    category: str
    messages: tuple[Mapping[str, str], ...]
    number: int | None = None
    equals: str | None = None
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def solved_by(self, reply: str) -> bool:
        """Whether a reply is right."""
        lower = reply.lower()
        return (
            (self.number is None or number_in(reply) == self.number)
            and (self.equals is None or reply.strip() == self.equals)
            and (not self.contains or any(text.lower() in lower for text in self.contains))
            and not any(text.lower() in lower for text in self.lacks)
        )


def number_in(reply: str) -> int | None:
    """The number that a reply gives, which is the last one in it; None if there is none."""
    numbers = re.findall(r"-?\d+", reply)
    return int(numbers[-1]) if numbers else None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a category. ``wrong`` holds the first few wrong replies with their questions."""

    category: str
    claim: float | None
    count: int
    exact: int
    wrong: tuple[tuple[str, str], ...]

    @property
    def accuracy(self) -> float:
        return self.exact / self.count

    @property
    def passed(self) -> bool | None:
        """Whether the claim was reached; None if there is no claim."""
        return None if self.claim is None else self.accuracy >= self.claim

    @property
    def lower(self) -> float:
        """Lower end of the accuracy's 95 % confidence interval (Wilson 1927)."""
        z, n, p = 1.96, self.count, self.accuracy
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (p + z * z / (2 * n) - spread) / (1 + z * z / n))


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The result of every category, in the file's order."""

    model: str
    device: str
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
            "passed": self.passed,
            "categories": [
                {
                    "name": result.category,
                    "questions": result.count,
                    "exact": result.exact,
                    "accuracy": result.accuracy,
                    "lower": result.lower,
                    "claim": result.claim,
                    "wrong": [{"question": question, "reply": reply} for question, reply in result.wrong],
                }
                for result in self.results
            ],
        }

    def table(self) -> str:
        """The report as text: one line per category; ``surely`` is the lower end of the 95 % confidence interval."""
        lines = [f"{'category':<32}{'n':>6}{'right':>9}{'surely':>9}   claim"]
        for result in self.results:
            claim = "" if result.claim is None else f"≥ {result.claim:.0%} "
            verdict = {True: "reached", False: "MISSED", None: "no claim"}[result.passed]
            line = f"{label(result.category):<32}{result.count:>6}{result.accuracy:>9.2%}{result.lower:>9.2%}"
            lines.append(f"{line}   {claim}{verdict}")
        return "\n".join(lines)


def read_questions(text: str) -> tuple[list[Question], dict[str, float]]:
    """Read a JSONL file: its questions, and the claimed share of right replies by category.

    A line is a JSON object. A question has ``question`` (a text) or ``messages`` (roles and contents), one or more of
    ``number``, ``equals``, ``contains`` and ``lacks`` (a text or a list of texts), and, if it belongs to one, a
    ``category``. A claim has a ``category`` and a ``claim`` from 0 to 1.

    Raises:
        InvalidInputError: A line is none of these, or there is no question; with the line's number.
    """
    questions, claims = list[Question](), dict[str, float]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("it is no JSON object")
            category = fields.pop("category", "all")
            if not isinstance(category, str):
                raise ValueError("category is no text")
            if "claim" in fields:
                claims[category] = _claim(fields)
            else:
                questions.append(_question(category, fields))
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"line {number} is no question: {error}.") from error
    if not questions:
        raise InvalidInputError('the file has no question, such as {"question": "What is 1 + 1?", "number": 2}.')
    return questions, claims


def _claim(fields: Mapping[str, Any]) -> float:
    claim = fields["claim"]
    if len(fields) > 1 or not isinstance(claim, (int, float)) or not 0 <= claim <= 1:
        raise ValueError("a claim has a category and a number from 0 to 1")
    return float(claim)


def _question(category: str, fields: dict[str, Any]) -> Question:
    if ("question" in fields) == ("messages" in fields):
        raise ValueError("it needs either question or messages")
    messages = fields.pop("messages", None) or [{"role": "user", "content": fields.pop("question", None)}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and all(isinstance(v, str) for v in m.values())
        for m in messages
    ):
        raise ValueError("question is a text, and messages are objects with the texts role and content")
    if unknown := fields.keys() - {*_CHECKS}:
        raise ValueError(f"it has the unknown field {min(unknown)}")
    if not fields:
        raise ValueError(f"it needs one of {', '.join(_CHECKS)}")
    if not isinstance(fields.get("number", 0), int) or not isinstance(fields.get("equals", ""), str):
        raise ValueError("number is a whole number, and equals is a text")
    for name in ("contains", "lacks"):
        texts = fields.get(name, [])
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{name} is a text or a list of texts")
        fields[name] = tuple(texts)
    return Question(category, tuple(messages), **fields)


def run(
    model: Model,
    questions: Sequence[Question],
    claims: Mapping[str, float],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Ask the model every question, greedily, and count the right replies of each category.

    Args:
        model: Any model with a chat template.
        claims: Claimed share of right replies by category.
        progress: Called with the questions done and the total.

    Raises:
        InvalidInputError: The model has no chat template.
        DeviceError: The device failed.
    """
    if model.chat_template is None:
        raise InvalidInputError(f"{model.config.name} has no chat template, so it cannot answer questions.")
    categories = {question.category: list[tuple[Question, str]]() for question in questions}
    done = 0
    for batch in _batches(questions):
        prompts = [model.chat_tokens([dict(m) for m in question.messages]) for question in batch]
        replies = model.generate_batch(prompts, max_tokens=MAX_TOKENS, temperature=0)
        for question, reply in zip(batch, replies, strict=True):
            categories[question.category].append((question, reply.text))
        done += len(batch)
        if progress is not None:
            progress(done, len(questions))
    return EvalReport(
        model.config.name,
        model.device.name,
        tuple(_count(name, claims.get(name), replies) for name, replies in categories.items()),
    )


def _count(category: str, claim: float | None, replies: Sequence[tuple[Question, str]]) -> Result:
    wrong = [(question.messages[-1]["content"], reply) for question, reply in replies if not question.solved_by(reply)]
    return Result(category, claim, len(replies), len(replies) - len(wrong), tuple(wrong[:5]))


def _batches(questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
    left = iter(questions)
    while batch := list(islice(left, _BATCH)):
        yield batch
