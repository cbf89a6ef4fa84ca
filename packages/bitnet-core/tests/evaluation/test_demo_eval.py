"""The problems of ``bitnet eval demo``: the same everywhere, held out, with right answers, and counted honestly."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.evaluation import demo_eval
from bitnet.core.evaluation.demo_phrasings import UNSEEN_SUBTRACTION
from bitnet.core.evaluation.demo_problems import (
    CATEGORIES,
    Category,
    draw_problems,
    frame,
    held_out,
    number_in,
    refuses,
)

BY_NAME = {category.name: category for category in CATEGORIES}
SUMS, REFUSALS = CATEGORIES[:8], CATEGORIES[8:]
TAKEN = (
    *("-", "−", "minus", "gives away", "takes out", "lost", "subtract", "take", "taking", "less than", "remove"),
    *("reduce", "deduct", "lowered", "Find the difference"),
)
"""Words that make a problem a difference."""
SECOND_FIRST = re.compile(
    r"(?i)\b(subtract|take|remove|deduct|subtracting) \d+ (away )?from|\d (is subtracted|taken away) from|less than"
)
"""Words of a difference that name the number to take away first."""


def solved(question: str) -> tuple[int, int, int]:
    """Both numbers of a question, and its answer, worked out from its words alone."""
    first, second = map(int, re.findall(r"\d+", question))
    if SECOND_FIRST.search(question):
        return second, first, second - first
    return first, second, first - second if any(word.lower() in question.lower() for word in TAKEN) else first + second


@pytest.mark.parametrize("category", SUMS, ids=lambda category: category.name)
def test_problems_are_right_distinct_and_held_out(category: Category) -> None:
    problems = draw_problems(category, 600, seed=3)
    assert len(set(problems)) == len(problems) == 600
    for problem in problems:
        first, second, answer = solved(problem.question)
        assert problem.answer == answer, problem
        assert held_out(first, second)
        assert len(str(first)) == len(str(second)) == category.digits


@pytest.mark.parametrize("category", REFUSALS, ids=lambda category: category.name)
def test_problems_to_be_refused_are_distinct_filled_and_have_no_number(category: Category) -> None:
    problems = draw_problems(category, 600, seed=3)
    assert len(set(problems)) == len(problems) == 600
    for problem in problems:
        assert problem.answer is None
        assert not re.search(r"[{}]", problem.question)
        assert problem.solved_by("I do not know that.")
        assert not problem.solved_by("The answer is 3.")
    assert len({frame(problem.question) for problem in problems}) > 20


def test_unseen_phrasings_are_many_and_differ_from_those_of_the_training() -> None:
    asked = {frame(p.question) for p in draw_problems(BY_NAME["unseen phrasings, 3 digits"], 1000, seed=0)}
    assert len(asked) >= 40
    for name in ("addition, 3 digits", "subtraction, 3 digits"):
        assert not asked & {frame(p.question) for p in draw_problems(BY_NAME[name], 300, seed=0)}
    assert "−" in UNSEEN_SUBTRACTION[-1]


@pytest.mark.parametrize(
    ("reply", "refused"),
    [
        ("I can only add and subtract numbers of up to four digits.", True),
        ("I do not know that. I am a very small model.", True),
        ("That is too difficult for me: I am only a tiny model.", True),
        ("I am not sure. It depends on the house.", True),
        ("I can only guess: 5 + 5 = 10.", False),
        ("1.5 + 2.5 = 4.", False),
        ("Paris.", False),
    ],
)
def test_a_refusal_is_known_by_its_words(reply: str, refused: bool) -> None:
    assert refuses(reply) is refused


def test_differences_have_either_sign() -> None:
    answers = [p.answer for p in draw_problems(BY_NAME["subtraction, 3 digits"], 500, seed=1)]
    assert 150 < sum(answer is not None and answer < 0 for answer in answers) < 350


def test_the_same_seed_draws_the_same_problems_on_every_python() -> None:
    assert [p.question for p in draw_problems(BY_NAME["addition, 3 digits"], 3, seed=0)] == [
        "920 + 970 = ?",
        "What is 398 + 930?",
        "What is 381 plus 575?",
    ]
    assert draw_problems(CATEGORIES[0], 50, seed=0) != draw_problems(CATEGORIES[0], 50, seed=1)


def test_one_pair_in_five_is_held_out_in_either_order_and_no_small_one() -> None:
    pairs = [(a, b) for a in range(10, 300) for b in range(a, 300)]
    assert abs(sum(held_out(a, b) for a, b in pairs) / len(pairs) - 0.2) < 0.01
    assert all(held_out(a, b) == held_out(b, a) for a, b in pairs[:2000])
    assert not any(held_out(a, b) for a in range(10) for b in range(1000))


def test_the_sum_of_the_readme_is_held_out() -> None:
    assert held_out(17, 25)


@pytest.mark.parametrize("count", [0, -1, 10**6])
def test_too_many_or_no_problems_are_refused(count: int) -> None:
    with pytest.raises(InvalidInputError, match="it takes 1 to"):
        draw_problems(CATEGORIES[0], count, seed=0)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("17 + 25 = 42.", 42),
        ("12 - 30 = -18.", -18),
        ("-18", -18),
        ("It is 7, because 7 x 7 = 49.", 49),
        ("forty-two", None),
        ("", None),
    ],
)
def test_a_replys_number_is_its_last(reply: str, number: int | None) -> None:
    assert number_in(reply) == number


class Answers:
    """Stands for a model: it answers each question with what a function says."""

    chat_template = SimpleNamespace()
    config = SimpleNamespace(name="oracle")
    device = SimpleNamespace(name="cpu:none")

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(c) for c in messages[0]["content"]]

    def generate_batch(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float) -> list[Any]:
        assert temperature == 0
        questions = ["".join(map(chr, prompt)) for prompt in prompts]
        self.asked += questions
        return [SimpleNamespace(text=self.answer(question)) for question in questions]


def test_right_answers_count_and_wrong_ones_are_shown() -> None:
    def wrong_on_threes(question: str) -> str:
        """Off by one wherever a number has three digits; it refuses what is no sum of two whole numbers."""
        if question in refused:
            return "I cannot do that."
        first, _, answer = solved(question)
        return f"It is {answer + (first in range(100, 1000))}."

    refused = {p.question for category in REFUSALS[:1] for p in draw_problems(category, 70, seed=4)}
    unknown = {p.question for category in REFUSALS[1:] for p in draw_problems(category, 70, seed=4)}
    model: Any = Answers(lambda question: "Yes." if question in unknown else wrong_on_threes(question))
    seen: list[tuple[int, int]] = []
    report = demo_eval.run(model, problems=70, seed=4, progress=lambda done, total: seen.append((done, total)))
    assert [(r.category.name, r.exact, r.passed) for r in report.results] == [
        ("addition, 2 digits", 70, True),
        ("subtraction, 2 digits", 70, True),
        ("addition, 3 digits", 0, False),
        ("subtraction, 3 digits", 0, False),
        ("word problems, 2 digits", 70, None),
        ("sums and differences, 4 digits", 70, None),
        ("unseen phrasings, 2 digits", 70, True),
        ("unseen phrasings, 3 digits", 0, False),
        ("refusals, arithmetic beyond it", 70, True),
        ("refusals, unknown facts", 0, False),
    ]
    assert not report.passed
    assert len(model.asked) == len(set(model.asked)) == 10 * 70
    assert seen[-1] == (700, 700)
    assert seen == sorted(seen)
    question, reply = report.results[2].wrong[0]
    assert number_in(reply) == solved(question)[2] + 1
    document = report.to_json()
    assert document["passed"] is False
    assert [c["accuracy"] for c in document["categories"]] == [1, 1, 0, 0, 1, 1, 1, 0, 1, 0]
    assert "MISSED" in report.table()
    assert "addition, 2 digits                  70  100.00%" in report.table()


@pytest.mark.parametrize(("count", "exact"), [(100, 90), (500, 500), (20, 0), (2000, 1990)])
def test_the_lower_bound_is_wilsons(count: int, exact: int) -> None:
    """The accuracy of which the observed one is 1.96 standard deviations off (what the interval inverts)."""
    result = demo_eval.Result(CATEGORIES[0], count, exact, ())
    deviation = math.sqrt(result.lower * (1 - result.lower) / count) if exact else 0
    assert result.accuracy - result.lower == pytest.approx(1.96 * deviation, abs=1e-9)
    assert 0 <= result.lower <= result.accuracy


def test_a_model_without_a_chat_template_cannot_be_asked() -> None:
    model: Any = Answers(str)
    model.chat_template = None
    with pytest.raises(InvalidInputError, match="no chat template"):
        demo_eval.run(model, problems=1)
