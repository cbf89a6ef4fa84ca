"""Constraints: a generation contains only allowed tokens, and ends without an answer if its constraint fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.engine.constraint import ConstraintError, masked


class Cycle:
    """Allows one of a few tokens each time."""

    def __init__(self, sets: Sequence[Sequence[int]], vocabulary: int) -> None:
        self._sets, self._vocabulary = sets, vocabulary
        self.accepted: list[int] = []

    def allowed(self) -> bytes:
        bits = np.zeros(self._vocabulary, np.uint8)
        bits[list(self._sets[len(self.accepted) % len(self._sets)])] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.fixture(scope="module")
def model() -> Any:
    with load_model(device="cpu:numpy") as model:
        yield model


def test_only_allowed_tokens_are_said_beside_free_ones(model: Any) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    free = model.generate("Once upon a time", max_tokens=8).tokens
    sets = [chance.sample(range(3, 3000), 5) for _ in range(4)]
    made: list[Cycle] = []

    def constraint() -> Cycle:
        made.append(Cycle(sets, model.config.vocab_size))
        return made[-1]

    options = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.0, "seed": seed}
    requests = model.submit("Once upon a time", n=3, constraint=constraint, **options)
    beside = model.submit("Once upon a time", max_tokens=8)[0]
    for request, mine in zip(requests, made, strict=True):
        tokens = request.result().tokens
        assert list(tokens) == mine.accepted
        assert all(token in sets[i % 4] for i, token in enumerate(tokens))
        assert len(tokens) == 8
    assert beside.result().tokens == free


def test_every_way_to_generate_takes_one(model: Any) -> None:
    given: dict[str, Any] = {"constraint": lambda: Cycle([[7], [9]], model.config.vocab_size), "max_tokens": 3}
    talk = [{"role": "user", "content": "Hello"}]
    done = [
        model.generate("x", **given),
        model.stream("x", **given).result(),
        *model.generate_batch(["x", "y"], **given),
    ]
    done += [model.chat(talk, **given), model.chat_stream(talk, **given).result()]
    assert [completion.tokens for completion in done] == [(7, 9, 7)] * 6


@pytest.mark.parametrize("method", ["allowed", "accept"])
def test_one_that_fails_ends_its_generation_alone(model: Any, method: str) -> None:
    class Failing(Cycle):
        pass

    def fail(*arguments: Any) -> Any:
        raise ValueError("out of fuel")

    def constraint() -> Cycle:
        failing = Failing([[5, 6]], model.config.vocab_size)
        setattr(failing, method, fail)
        return failing

    done = model.submit("x", constraint=constraint, max_tokens=5)[0].result()
    assert (done.finish_reason, done.stop_reason, done.tokens) == ("failed", "ValueError: out of fuel", ())
    assert model.generate("x", max_tokens=2).finish_reason == "length"


def test_nothing_allowed_fails(model: Any) -> None:
    nothing: Callable[[], Cycle] = lambda: Cycle([[]], model.config.vocab_size)  # noqa: E731
    assert model.submit("x", constraint=nothing)[0].result().finish_reason == "failed"
    with pytest.raises(ConstraintError):
        masked(np.zeros(20, np.float32), b"\0\0")


def test_ids_beyond_the_mask_are_not_allowed() -> None:
    logits = np.arange(20, dtype=np.float32)
    assert np.isfinite(masked(logits, b"\xff\xff")).tolist() == [True] * 16 + [False] * 4
    assert np.flatnonzero(np.isfinite(masked(logits, b"\x01\x80"))).tolist() == [0, 15]


def test_a_mask_that_is_no_bytes_fails(model: Any) -> None:
    class Booleans(Cycle):
        def allowed(self) -> Any:
            return np.ones(model.config.vocab_size, bool)

    done = model.submit("a", max_tokens=4, constraint=lambda: Booleans([], 0))[0].result()
    assert (done.finish_reason, done.tokens) == ("failed", ())
    assert done.stop_reason == "TypeError: allowed() gave ndarray; it must give bytes, one bit for each token id."
