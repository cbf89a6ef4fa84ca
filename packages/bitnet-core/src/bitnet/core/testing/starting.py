"""Tests of how steps are started and collected, and of what a device refuses whose features it does not list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import DeviceError, InvalidInputError, UnsupportedProgramError
from bitnet.core.hal import (
    LOGPROBS,
    LOOK_AHEAD,
    MAX_COUNT,
    PENALTIES,
    Adjustment,
    Device,
    Executable,
    Limits,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs
from bitnet.core.testing.model import BLOCK, TinyModel

LIMITS = Limits(max_tokens=16, max_seqs=2, max_rows=2, max_blocks=8)
VOCABULARY = 97


class Session:
    """A program, and steps that draw one token for each of two sequences. Nothing has filled the cache before."""

    def __init__(self, device: Device, rng: np.random.Generator) -> None:
        model = TinyModel(rng, layers=1, vocab=VOCABULARY)
        self.executable: Executable = device.compile(model.program(LIMITS, 16))
        firsts, seeds = rng.choice(model.calm(), 2).tolist(), rng.integers(0, 2**63, 2).tolist()
        self._parts = [
            SequenceStep([t], 1, range(8 * i, 8 * i + 8), [0], SamplingParams(1.0, seed=s))
            for i, (t, s) in enumerate(zip(firsts, seeds, strict=True))
        ]

    def step(self, logprobs: int | None = None) -> Step:
        return Step(StepLayout(LIMITS), self._parts, block_size=BLOCK, logits=False, logprobs=logprobs)


def refused(calls: dict[str, Callable[[], Any]], error: type[Exception] = InvalidInputError) -> None:
    """Every call raises this error."""
    for name, call in calls.items():
        with pytest.raises(error):
            pytest.fail(f"{name} gave {call()}")


class SessionTests(DeviceTests):
    @pytest.fixture
    def session(self, device: Device, rng: np.random.Generator) -> Iterator[Session]:
        made = Session(device, rng)
        with closing(made.executable):
            yield made


class StartTests(SessionTests):
    def test_the_most_passes_at_once(self, session: Session) -> None:
        """The most passes of one start give what the same passes give one by one."""
        whole = run(session.executable, session.step(), MAX_COUNT)
        assert whole.shape == (MAX_COUNT, 2)
        for count in (1, MAX_COUNT // 2 + 1):
            assert run(session.executable, session.step(), count).tolist() == whole[:count].tolist()

    def test_nothing_else_is_done_before_tokens_are_collected(self, device: Device, session: Session) -> None:
        executable, step, marks = session.executable, session.step, np.zeros(VOCABULARY, np.int32)
        expected = run(executable, step(), 5).tolist()
        logits = executable.read("logits")
        refused({"collect before a start": executable.collect})
        executable.start(step(), 5)
        executable.prepare(step(), 2)
        early: dict[str, Callable[[], Any]] = {
            "a second start": lambda: executable.start(step()),
            "a read": lambda: executable.read("logits"),
            "a write": lambda: executable.write("logits", logits),
        }
        if PENALTIES in device.info.features:
            early["fill_slot"] = lambda: executable.fill_slot(0, marks, marks.astype(np.float32))
        refused(early)
        assert executable.collect().tolist() == expected
        refused({"a second collect": executable.collect})
        executable.write("logits", logits)

    def test_tokens_that_nobody_collects(self, session: Session) -> None:
        executable, step = session.executable, session.step
        executable.start(step(), 3)
        executable.close()
        refused({"collect": executable.collect, "start": lambda: executable.start(step())}, DeviceError)

    def test_features_that_are_not_listed_are_refused(self, device: Device, session: Session) -> None:
        """Before anything runs; the executable stays usable."""
        executable, marks = session.executable, np.zeros(VOCABULARY, np.int32)
        expected = run(executable, session.step(), 2).tolist()
        adjusted = [SequenceStep([1], 1, [0], [0], adjustment=Adjustment(0))]
        uses: list[tuple[str, str, Callable[[], Any]]] = [
            (LOGPROBS, "logprobs", lambda: executable.start(session.step(logprobs=1))),
            (LOOK_AHEAD, "go_on", lambda: executable.go_on(1)),
            (PENALTIES, "fill_slot", lambda: executable.fill_slot(0, marks, marks.astype(np.float32))),
            (PENALTIES, "a slot", lambda: executable.start(Step(StepLayout(LIMITS), adjusted, block_size=BLOCK))),
        ]
        lacking = {name: use for feature, name, use in uses if feature not in device.info.features}
        refused(lacking, UnsupportedProgramError)
        assert run(executable, session.step(), 2).tolist() == expected


class LookAheadTests(SessionTests):
    """Tests of decode steps that begin before the host has the tokens of earlier ones."""

    @needs(LOOK_AHEAD)
    def test_rounds_give_what_one_run_gives(self, session: Session) -> None:
        """Two rounds are in flight at any time; the second writes its tokens where those of the first are."""
        executable, rounds = session.executable, (3, 1, 5, 20)
        for _ in range(2):
            expected = run(executable, session.step(), sum(rounds))
            executable.start(session.step(), rounds[0])
            found = []
            for count in rounds[1:]:
                executable.go_on(count)
                found.append(executable.collect())
            found.append(executable.collect())
            assert [len(tokens) for tokens in found] == [*rounds]
            assert np.concatenate(found).tolist() == expected.tolist()

    @needs(LOOK_AHEAD, LOGPROBS)
    def test_logprobs_are_of_the_round_that_was_taken(self, session: Session) -> None:
        executable = session.executable
        run(executable, session.step(logprobs=2), 9)
        whole = executable.logprobs()
        executable.start(session.step(logprobs=2), 4)
        executable.go_on(5)
        for part in (slice(0, 4), slice(4, 9)):
            executable.collect()
            for mine, its in zip(executable.logprobs(), whole, strict=True):
                assert mine.tobytes() == its[part].tobytes()

    @needs(LOOK_AHEAD)
    def test_what_cannot_be_begun_or_taken(self, session: Session) -> None:
        """The error comes before anything runs, and the executable stays usable."""
        executable, step = session.executable, session.step
        expected = run(executable, step(), 4).tolist()
        refused({"go_on without a start": lambda: executable.go_on(1)})
        executable.start(step(), 2)
        refused({"no passes": lambda: executable.go_on(0), "too many": lambda: executable.go_on(MAX_COUNT + 1)})
        executable.go_on(2)
        assert [*executable.collect().tolist(), *executable.collect().tolist()] == expected
        executable.start(step(), MAX_COUNT)
        executable.go_on(MAX_COUNT - 1)
        refused({"passes beyond the blocks": lambda: executable.go_on(2)})
        executable.collect()
        executable.collect()
        assert run(executable, step(), 4).tolist() == expected
