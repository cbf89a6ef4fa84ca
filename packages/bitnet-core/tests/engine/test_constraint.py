"""Constraints: a generation contains only allowed tokens, and ends without an answer if its constraint fails."""

from __future__ import annotations

import random
import threading
import time
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

    def allowed(self) -> bytes | None:
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


class Late(Cycle):
    """Does not know yet what it allows for the first few times that it is asked."""

    def __init__(self, sets: Sequence[Sequence[int]], vocabulary: int, asks: int) -> None:
        super().__init__(sets, vocabulary)
        self._asks = self._left = asks
        self.open = threading.Event()

    def allowed(self) -> bytes | None:
        if self._left or not self.open.is_set():
            self._left = max(0, self._left - 1)
            return None
        self._left = self._asks
        return super().allowed()


def test_one_that_is_late_holds_nobody_up_and_says_the_same(model: Any) -> None:
    sets = [random.sample(range(3, 3000), 5) for _ in range(4)]
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    size = model.config.vocab_size
    expected = model.generate("Once upon a time", constraint=lambda: Cycle(sets, size), **options).tokens
    made: list[Late] = []

    def late() -> Late:
        made.append(Late(sets, size, 3))
        return made[-1]

    held = model.submit("Once upon a time", n=2, constraint=late, **options)
    beside = model.submit("Once upon a time", max_tokens=40, ignore_eos=True)[0]
    assert len(beside.result().tokens) == 40  # while both are held
    assert not any(constraint.accepted for constraint in made)
    for constraint in made:
        constraint.open.set()
    assert held[0].result().tokens == expected
    assert len(held[1].result().tokens) == 12


def test_one_that_is_held_can_be_cancelled(model: Any) -> None:
    (request,) = model.submit("Once upon a time", constraint=lambda: Late([[5]], model.config.vocab_size, 1))
    time.sleep(0.2)
    request.cancel()
    assert request.result().finish_reason == "cancelled"
    assert model.generate("Once upon a time", max_tokens=2).finish_reason == "length"


def test_one_that_fails_while_it_is_held_gives_no_answer(model: Any) -> None:
    class Fails(Late):
        def allowed(self) -> bytes | None:
            if self.open.is_set():
                raise ValueError("its process has ended")
            return None

    made = Fails([[5]], model.config.vocab_size, 1)
    (request,) = model.submit("Once upon a time", constraint=lambda: made)
    time.sleep(0.1)
    made.open.set()
    done = request.result()
    assert (done.finish_reason, done.tokens) == ("failed", ())
    assert "its process has ended" in str(done.stop_reason)


class Lazy(Cycle):
    """Waits for a token, then allows one of a few, twice, and waits again."""

    def __init__(self, begins: int, sets: Sequence[Sequence[int]], vocabulary: int) -> None:
        super().__init__(sets, vocabulary)
        self._begins = begins
        self.waiting = self.watching = True
        self.seen: list[int] = []

    def watch(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens, 1):
            self.accept(token)
            if not self.waiting:
                return count
        return len(tokens)

    def accept(self, token: int) -> None:
        self.seen.append(token)
        if not self.waiting:
            super().accept(token)
            self.waiting = len(self.accepted) % 2 == 0
        elif token == self._begins:
            self.waiting = False


def test_a_constraint_that_waits_is_told_each_token_once() -> None:
    """The tokens up to the one that begins it are the free ones; the device draws them."""
    seed = random.randrange(2**32)
    options: Any = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.3, "seed": seed}
    with load_model(device="cpu", threads=1) as model:
        size = model.config.vocab_size
        free = model.generate("Once upon a time", **options).tokens
        at = next(i for i, token in enumerate(free) if i > 3 and token not in free[:i])
        sets = [[3, 5], [7, 9]]
        for logprobs in (None, 2):
            made: list[Lazy] = []

            def lazy(made: list[Lazy] = made) -> Lazy:
                made.append(Lazy(free[at], sets, size))
                return made[0]

            request = model.submit("Once upon a time", constraint=lazy, logprobs=logprobs, **options)[0]
            tokens = request.result().tokens
            assert list(tokens) == made[0].seen
            assert tokens[: at + 1] == free[: at + 1]
            assert tokens[at + 1] in sets[0]
            assert tokens[at + 2] in sets[1]
        never = Lazy(-1, sets, size)
        assert model.submit("Once upon a time", constraint=lambda: never, **options)[0].result().tokens == free
        never.watching = False
        never.seen = []
        assert model.submit("Once upon a time", constraint=lambda: never, **options)[0].result().tokens == free
