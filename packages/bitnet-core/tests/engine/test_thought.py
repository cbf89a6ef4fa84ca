"""Thoughts in the engine: budgets are exact, and constraints and stop strings apply to the answer alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import Completion, GenerationOptions
from bitnet.core.text.thinking import Marks, Thinking

MARKS = Marks("<t>", "</t>")
START, END = (tuple(mark.encode()) for mark in MARKS)
PROMPT = [3, 1, 4, 1, 5]
NOT_MARKS = {token: -float("inf") for token in b"</>"}
"""Keeps a random model from writing a mark of its own."""
EOS = 256


def thinking(*, opened: bool, end: Sequence[int] = END, start: int | None = None) -> Thinking:
    hidden = {
        token: mark for token, mark in ((start, MARKS.start), (end[0], MARKS.end)) if token is not None and token > 255
    }
    return Thinking(MARKS, opened, tuple(end), start, hidden)


def answered(rig: Any, thought: Thinking, constraint: Any = None, **options: Any) -> Completion:
    sequences = rig.engine.preparer.prepare(PROMPT, GenerationOptions(**options), 1, constraint, thought)
    rig.engine.add(sequences)
    found: Completion = rig.finish()[sequences[0].number]
    return found


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("end", [END, (259,)], ids=["bytes", "token"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_budget_is_exact(
    make_rig: Callable[..., Any], lookup: bool, end: tuple[int, ...], logprobs: int | None
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "logit_bias": {**NOT_MARKS, 259: -float("inf")}}
    options |= {"seed": seed, "temperature": 1.0, "logprobs": logprobs}
    free = answered(make_rig(lookup=lookup), thinking(opened=True, end=end), **options)
    assert (free.text, free.reasoning_tokens) == ("", 60)
    for budget in (1, 7, 33, 59):
        done = answered(make_rig(lookup=lookup), thinking(opened=True, end=end), reasoning_budget=budget, **options)
        assert done.tokens[:budget] == free.tokens[:budget]
        assert done.tokens[budget : budget + len(end)] == end[: 60 - budget]
        assert done.reasoning_tokens == budget or budget + len(end) > 60
        assert len(done.tokens) == len(done.timings.token_times) == 60
        if logprobs is not None:
            assert done.logprobs is not None
            assert [entry.token for entry in done.logprobs] == list(done.tokens)


def test_no_budget_is_needed_where_the_thought_ends_earlier(make_rig: Callable[..., Any]) -> None:
    """The first token is the end mark: nothing is forced after it."""
    bias = {**NOT_MARKS, 259: 1e4}
    done = answered(make_rig(), thinking(opened=True, end=(259,)), max_tokens=5, reasoning_budget=3, logit_bias=bias)
    assert (done.tokens, done.reasoning, done.reasoning_tokens) == ((259,) * 5, "", 0)


@pytest.mark.parametrize("budget", [0, 4])
def test_a_thought_that_the_model_begins_ends_at_its_budget(make_rig: Callable[..., Any], budget: int) -> None:
    """A constraint of the test's own has the model begin a thought: its first token is the start mark."""
    thought = thinking(opened=False, end=(259,), start=258)
    bias = {**NOT_MARKS, 258: 1e4, 259: -float("inf")}
    done = answered(make_rig(), thought, max_tokens=9, reasoning_budget=budget, logit_bias=bias, ignore_eos=True)
    assert done.tokens == (258, *(258,) * budget, 259, *(258,) * (7 - budget))
    assert done.reasoning_tokens == budget


class Only:
    """Allows the tokens of a text, one after the other, and then the end."""

    def __init__(self, text: bytes) -> None:
        self.left = [*text, EOS]

    def allowed(self) -> bytes:
        bits = np.zeros(260, np.uint8)
        bits[self.left[0]] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> None:
        assert token == self.left.pop(0)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("opened", [True, False])
def test_a_constraint_begins_after_the_thought(
    make_rig: Callable[..., Any], opened: bool, logprobs: int | None
) -> None:
    thought = thinking(opened=opened, end=(259,), start=258)
    bias = NOT_MARKS if opened else {258: 1e4}
    options: dict[str, Any] = {"max_tokens": 40, "reasoning_budget": 5, "logit_bias": bias, "logprobs": logprobs}
    done = answered(make_rig(), thought, lambda: Only(b"yes 12"), **options)
    assert (done.text, done.finish_reason) == ("yes 12", "stop")
    assert done.reasoning_tokens <= 5
    assert done.tokens[-7] == 259


def test_an_end_token_within_the_thought_does_not_skip_a_constrained_answer(make_rig: Callable[..., Any]) -> None:
    bias = {**NOT_MARKS, EOS: 1e4}
    for options in ({}, {"logprobs": 1}):
        done = answered(
            make_rig(), thinking(opened=True, end=END), lambda: Only(b"yes"), max_tokens=40, logit_bias=bias, **options
        )
        assert (done.tokens, done.text, done.finish_reason) == ((*END, *b"yes"), "yes", "stop")
    done = answered(make_rig(), thinking(opened=True), max_tokens=40, logit_bias=bias)
    assert (done.tokens, done.finish_reason) == ((), "stop")  # without a constraint, the answer is empty


def test_without_a_thought_the_first_token_is_constrained(make_rig: Callable[..., Any]) -> None:
    done = answered(make_rig(), thinking(opened=False, start=258), lambda: Only(b"yes"), max_tokens=40)
    assert (done.text, done.reasoning) == ("yes", "")


def test_stop_strings_end_answers_not_thoughts(make_rig: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "reasoning_budget": 4, "ignore_eos": True, "stop": ["b"]}
    bias = {token: -float("inf") for token in range(260) if token not in (*b"ab", 259)}
    done = answered(make_rig(), thinking(opened=True, end=(259,)), logit_bias={**bias, 98: 50.0, 259: -1e9}, **options)
    assert (done.reasoning, done.text, done.stop_reason) == ("bbbb", "", "b")
    assert done.tokens == (98, 98, 98, 98, 259, 98)
