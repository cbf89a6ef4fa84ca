"""``bitnet eval``: files are read or refused by the line, and right replies are counted honestly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.evaluation.questions import Question, Result, number_in, read_questions, run


def question(**checks: Any) -> Question:
    (read,), _ = read_questions(json.dumps({"question": "Q", **checks}))
    return read


@pytest.mark.parametrize(
    ("checks", "reply", "right"),
    [
        ({"number": 42}, "17 + 25 = 42.", True),
        ({"number": -18}, "12 - 30 = -18.", True),
        ({"number": 42}, "42, or 43", False),
        ({"number": 0}, "none", False),
        ({"equals": "Paris."}, " Paris.\n", True),
        ({"equals": "Paris."}, "Paris", False),
        ({"contains": "paris"}, "It is PARIS.", True),
        ({"contains": ["Lyon", "Paris"]}, "It is Paris.", True),
        ({"contains": ["Lyon", "Paris"]}, "It is Nice.", False),
        ({"lacks": "="}, "I do not know.", True),
        ({"contains": "I cannot", "lacks": ["=", "%"]}, "I cannot: 3 = 3", False),
        ({"number": 3, "contains": "apples"}, "3 pears", False),
    ],
)
def test_every_check_must_hold(checks: dict[str, Any], reply: str, right: bool) -> None:
    assert question(**checks).solved_by(reply) is right


@pytest.mark.parametrize(
    ("reply", "number"), [("It is 7, because 7 x 7 = 49.", 49), ("-18", -18), ("forty-two", None), ("", None)]
)
def test_a_replys_number_is_its_last(reply: str, number: int | None) -> None:
    assert number_in(reply) == number


GOOD = '{"question": "What is 1 + 1?", "number": 2}'


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "it is no JSON object"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "it is no JSON object|recursion|depth"),
        ('{"number": 1}', "either question or messages"),
        ('{"question": "a", "messages": [], "number": 1}', "either question or messages"),
        ('{"question": 5, "number": 1}', "question is a text"),
        ('{"messages": "Hi", "number": 1}', "question is a text"),
        ('{"messages": [{"role": "user"}], "number": 1}', "question is a text"),
        ('{"question": "a"}', "needs one of number, equals, contains, lacks"),
        ('{"question": "a", "number": "1"}', "number is a whole number"),
        ('{"question": "a", "equals": 1}', "equals is a text"),
        ('{"question": "a", "contains": [1]}', "contains is a text or a list"),
        ('{"question": "a", "lacks": ""}', "lacks is a text or a list"),
        ('{"question": "a", "number": 1, "anwser": 1}', "unknown field anwser"),
        ('{"category": 3, "question": "a", "number": 1}', "category is no text"),
        ('{"category": "a", "claim": 1.5}', "a number from 0 to 1"),
        ('{"category": "a", "claim": 1, "question": "a"}', "a number from 0 to 1"),
    ],
)
def test_a_bad_line_is_named(line: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=f"line 3 is no question: .*({why})"):
        read_questions(f"{GOOD}\n\n{line}\n{GOOD}")


@pytest.mark.parametrize("text", ["", "\n\n", '{"category": "a", "claim": 1}'])
def test_a_file_without_questions_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="the file has no question"):
        read_questions(text)


class Answers:
    """Stands for a model: it answers each question with what a function says."""

    chat_template = SimpleNamespace()
    config = SimpleNamespace(name="oracle")
    device = SimpleNamespace(name="cpu:none")

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(c) for c in messages[-1]["content"]]

    def generate_batch(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float) -> list[Any]:
        assert temperature == 0
        questions = ["".join(map(chr, prompt)) for prompt in prompts]
        self.asked += questions
        return [SimpleNamespace(text=self.answer(question)) for question in questions]


def test_right_replies_count_and_wrong_ones_are_shown() -> None:
    lines = [json.dumps({"category": kind, "claim": claim}) for kind, claim in (("even", 0.9), ("odd", 0.5))]
    for n in range(70):
        kind = ("even", "odd", "free")[n % 3]
        lines.append(json.dumps({"category": kind, "question": f"What is {n} + 1?", "number": n + 1}))

    def reply(asked: str) -> str:
        n = int(re.findall(r"\d+", asked)[0])
        return f"It is {n + 1 + (n % 3 == 1 or n == 0)}."

    model: Any = Answers(reply)
    seen: list[tuple[int, int]] = []
    report = run(model, *read_questions("\n".join(lines)), progress=lambda done, total: seen.append((done, total)))
    assert [(r.category, r.count, r.exact, r.passed) for r in report.results] == [
        ("even", 24, 23, True),
        ("odd", 23, 0, False),
        ("free", 23, 23, None),
    ]
    assert not report.passed
    assert len(model.asked) == len(set(model.asked)) == 70
    assert seen == [(64, 70), (70, 70)]
    assert report.results[0].wrong == (("What is 0 + 1?", "It is 2."),)
    assert len(report.results[1].wrong) == 5
    document = report.to_json()
    assert document["passed"] is False
    assert [c["accuracy"] for c in document["categories"]] == [23 / 24, 0, 1]
    assert "MISSED" in report.table()
    assert "free                                23  100.00%" in report.table()


@pytest.mark.parametrize(("count", "exact"), [(100, 90), (500, 500), (20, 0), (2000, 1990)])
def test_the_lower_bound_is_wilsons(count: int, exact: int) -> None:
    """The accuracy of which the observed one is 1.96 standard deviations off (what the interval inverts)."""
    result = Result("sums", None, count, exact, ())
    deviation = math.sqrt(result.lower * (1 - result.lower) / count) if exact else 0
    assert result.accuracy - result.lower == pytest.approx(1.96 * deviation, abs=1e-9)
    assert 0 <= result.lower <= result.accuracy


def test_a_model_without_a_chat_template_cannot_be_asked() -> None:
    model: Any = Answers(str)
    model.chat_template = None
    with pytest.raises(InvalidInputError, match="no chat template"):
        run(model, *read_questions(GOOD))
