"""The demo model's evaluation problems: the same everywhere, held out, with right answers."""

from __future__ import annotations

import re

import pytest

import make_demo_eval
from bitnet.core.errors import InvalidInputError
from bitnet.core.evaluation.questions import read_questions
from demo_model.held_out import UNSEEN_SUBTRACTION
from demo_model.problems import (
    CATEGORIES,
    Category,
    draw_problems,
    frame,
    held_out,
    refuses,
)
from demo_model.talk_problems import talk_problems

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


def test_the_committed_file_is_what_the_tool_writes() -> None:
    assert make_demo_eval.FILE.read_text(encoding="utf-8").splitlines() == [
        *make_demo_eval.lines(make_demo_eval.PROBLEMS, make_demo_eval.SEED)
    ]


def test_the_file_judges_replies_as_the_problems_do() -> None:
    questions, claims = read_questions("\n".join(make_demo_eval.lines(40, 5)))
    kinds = {problem["category"] for problem in talk_problems(5, 5)}
    questions = [question for question in questions if question.category not in kinds]
    assert claims == {category.name: category.claim for category in CATEGORIES if category.claim is not None}
    problems = {p.question: p for category in CATEGORIES for p in draw_problems(category, 40, 5)}
    assert len(questions) == len(problems) == 40 * len(CATEGORIES)
    replies = ("I do not know that.", "1 + 1 = 2.", "I can only guess: 5 + 5 = 10.", "Paris.")
    for question in questions:
        problem = problems[question.messages[0]["content"]]
        for reply in (*replies, f"It is {problem.answer}."):
            assert question.solved_by(reply) == problem.solved_by(reply), (problem, reply)
