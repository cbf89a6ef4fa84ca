"""Tests of decode steps that begin before the host has the tokens of earlier ones (feature ``look-ahead``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import DeviceError, InvalidInputError
from bitnet.core.hal import (
    LOGPROBS,
    LOOK_AHEAD,
    Device,
    Executable,
    GoesOn,
    Limits,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    TellsLogprobs,
)
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs
from bitnet.core.testing.model import BLOCK, TinyModel

LIMITS = Limits(max_tokens=16, max_seqs=2, max_rows=2, max_blocks=4)
ROUNDS = (3, 1, 5, 20)
"""Passes that are begun at a time."""


def going_on(executable: Executable) -> GoesOn:
    assert isinstance(executable, GoesOn), "the device lists the feature"
    return executable


def decode(rng: np.random.Generator, model: TinyModel) -> Callable[[], Step]:
    """A step that draws one token for each of two sequences. Nothing has filled the cache: its positions are poison."""
    firsts, seeds = rng.choice(model.calm(), 2).tolist(), rng.integers(0, 2**63, 2).tolist()
    parts = [
        SequenceStep([t], 1, range(4 * i, 4 * i + 4), [0], SamplingParams(1.0, seed=s))
        for i, (t, s) in enumerate(zip(firsts, seeds, strict=True))
    ]
    return lambda: Step(StepLayout(LIMITS), parts, block_size=BLOCK, logits=False)


class LookAheadTests(DeviceTests):
    @needs(LOOK_AHEAD)
    def test_rounds_give_what_one_run_gives(self, device: Device, rng: np.random.Generator) -> None:
        """Two rounds are in flight at any time; the second writes its tokens where those of the first are."""
        model = TinyModel(rng, layers=1, vocab=97)
        with closing(device.compile(model.program(LIMITS, 8))) as executable:
            for _ in range(2):
                step, ahead = decode(rng, model), going_on(executable)
                expected = executable.run(step(), sum(ROUNDS))
                ahead.start(step(), ROUNDS[0])
                found = []
                for count in ROUNDS[1:]:
                    ahead.go_on(count)
                    found.append(ahead.collect())
                found.append(ahead.collect())
                assert [len(tokens) for tokens in found] == [*ROUNDS]
                assert np.concatenate(found).tolist() == expected.tolist()

    @needs(LOOK_AHEAD, LOGPROBS)
    def test_logprobs_are_of_the_round_that_was_taken(self, device: Device, rng: np.random.Generator) -> None:
        model = TinyModel(rng, layers=1, vocab=97)
        with closing(device.compile(model.program(LIMITS, 8))) as executable:
            parts = [SequenceStep([3], 1, [0, 1], [0])]

            def step() -> Step:
                return Step(StepLayout(LIMITS), parts, block_size=BLOCK, logits=False, logprobs=2)

            assert isinstance(executable, TellsLogprobs)
            executable.run(step(), 9)
            whole, ahead = executable.logprobs(), going_on(executable)
            ahead.start(step(), 4)
            ahead.go_on(5)
            for part in (slice(0, 4), slice(4, 9)):
                ahead.collect()
                told = executable.logprobs()
                for mine, its in zip(told, whole, strict=True):
                    assert mine.tobytes() == its[part].tobytes()

    @needs(LOOK_AHEAD)
    def test_what_cannot_be_begun_or_taken(self, device: Device, rng: np.random.Generator) -> None:
        """The error comes before anything runs, and the executable stays usable."""
        model = TinyModel(rng, layers=1, vocab=97)
        with closing(device.compile(model.program(LIMITS, 8))) as executable:
            step, ahead = decode(rng, model), going_on(executable)
            expected = executable.run(step(), 4).tolist()
            for wrong in (ahead.collect, lambda: ahead.go_on(1)):
                with pytest.raises(InvalidInputError):
                    wrong()
            ahead.start(step(), 2)
            refused: list[Callable[[], Any]] = [lambda: ahead.start(step()), lambda: executable.run(step())]
            refused += [lambda: ahead.go_on(0), lambda: ahead.go_on(4 * BLOCK)]
            for call in refused:
                with pytest.raises(InvalidInputError):
                    call()
            ahead.go_on(2)
            assert [*ahead.collect().tolist(), *ahead.collect().tolist()] == expected
            assert executable.run(step(), 4).tolist() == expected
            ahead.start(step(), 2)  # its tokens are never collected
        with pytest.raises(DeviceError):
            ahead.collect()
