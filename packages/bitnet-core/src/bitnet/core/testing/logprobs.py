"""Tests of log-probabilities that a device reports with the sampled tokens."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import (
    GREEDY,
    LOGPROBS,
    MAX_COUNT,
    MAX_LOGPROBS,
    NO_TOKEN,
    PENALTIES,
    Adjustment,
    DenseMatmul,
    Device,
    Embed,
    Limits,
    NormRows,
    Op,
    Program,
    Sample,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.hal import Logprobs as Reported
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs, over
from bitnet.core.testing.penalties import chooser
from bitnet.core.testing.poison import poison_step
from bitnet.core.testing.rig import Array, dense, tensor
from bitnet.core.testing.sampling import filters, vocabularies

BOUND = 2e-5
"""Greatest error of a log-probability, times its magnitude where that is above 1."""


def check(reported: Reported, turn: int, row: int, logits: Array, token: int, k: int) -> None:
    """One row's log-probabilities, against those of its logits in float64."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())

    def near(value: float, wanted: float) -> bool:
        return value == wanted or bool(abs(value - wanted) <= BOUND * max(1.0, abs(wanted)))

    assert near(reported.chosen[turn, row], exact[token]), (
        f"{reported.chosen[turn, row]} of {token}, not {exact[token]}"
    )
    top = np.argsort(-logits.astype(np.float64), kind="stable")[:k]
    ids, values = reported.tokens[turn, row], reported.values[turn, row]
    assert len(ids) == len(values) == k
    assert ids[: len(top)].tolist() == top.tolist()
    assert (ids[len(top) :] == -1).all()
    for i, v in enumerate(top):
        assert near(values[i], exact[v]), f"{values[i]} of {v}, not {exact[v]}"


class LogprobTests(DeviceTests):
    @needs(LOGPROBS)
    @over(vocabularies)
    def test_logprobs(self, device: Device, rng: np.random.Generator, case: int) -> None:
        """Chosen and likeliest tokens: random rows, ties, zeros of both signs, minus infinities, great sizes."""
        rows = 9
        logits = (rng.standard_normal((rows, case)) * rng.choice([0.5, 3, 10], (rows, 1))).astype(np.float32)
        logits[1] = logits[1].round()
        logits[2] = 0.0
        logits[2, ::2] = -0.0
        logits[3, : case // 2] = -np.inf
        logits[4] += 5e4
        logits[5] = -abs(logits[5]) - 2e3
        logits[6, case - 1] = 60.0
        limits = Limits(rows + 2, rows + 2, rows + 2)
        with chooser(device, case, limits) as rig:
            rig.executable.write("logits", logits)
            for k in (0, 1, 5, MAX_LOGPROBS):
                steps = [SequenceStep([0], int(rng.integers(1, 99)), (), [0], filters(rng)) for _ in range(rows)]
                step = poison_step(Step(rig.layout, steps, logprobs=k))
                tokens, reported = run(rig.executable, step), rig.executable.logprobs()
                assert reported.tokens.shape == reported.values.shape == (1, rows, k)
                for r in range(rows):
                    check(reported, 0, r, logits[r], int(tokens[0, r]), k)

    @needs(LOGPROBS)
    def test_logprobs_of_every_pass(self, device: Device, rng: np.random.Generator) -> None:
        """A run of the most passes, each fed what the one before chose."""
        vocabulary, rows, count, width = 53, 3, MAX_COUNT, 16
        table = rng.standard_normal((vocabulary, width)).astype(np.float32)
        head = rng.standard_normal((vocabulary, width)).astype(np.float16)
        specs = [tensor("x", "f32", "M", width), tensor("last", "f32", "R", width)]
        specs += [tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
        ops: list[Op] = [
            Embed("table", "x"),
            NormRows("x", "norm", 1e-5, "last"),
            DenseMatmul("last", "head", "logits"),
            Sample("logits", "out"),
        ]
        given = {"table": dense(table), "norm": dense(np.ones(width, np.float32)), "head": dense(head)}
        limits = Limits(rows, rows, rows)
        program = Program(ops, {s.name: s for s in specs}, given, limits, name="a chain")
        params = [SamplingParams(1.0, seed=int(s)) for s in rng.integers(0, 2**63, rows)]
        first = rng.integers(0, vocabulary, rows).tolist()
        with closing(device.compile(program)) as executable:
            steps = [SequenceStep([t], 1, (), [0], p) for t, p in zip(first, params, strict=True)]
            tokens = run(executable, Step(StepLayout(limits), steps, logits=False, logprobs=4), count)
            reported = executable.logprobs()
        assert reported.chosen.shape == (count, rows)
        fed = np.array(first)
        for turn in range(count):
            x = table[fed].astype(np.float64)
            x /= np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
            logits = x @ head.astype(np.float64).T
            for r in range(rows):
                exact = logits[r] - logits[r].max()
                exact -= np.log(np.exp(exact).sum())
                assert abs(reported.chosen[turn, r] - exact[tokens[turn, r]]) <= 1e-4
                assert abs(reported.values[turn, r] - np.sort(exact)[::-1][:4]).max() <= 1e-4
                assert abs(exact[reported.tokens[turn, r]] - reported.values[turn, r]).max() <= 1e-4
            fed = tokens[turn]

    @needs(LOGPROBS, PENALTIES)
    def test_logprobs_are_of_logits_before_they_are_adjusted(self, device: Device, rng: np.random.Generator) -> None:
        logits = rng.standard_normal((2, 41)).astype(np.float32)
        biases = np.where(np.arange(41) == 7, 100, 0).astype(np.float32)
        with chooser(device, 41, Limits(2, 2, 2)) as rig:
            rig.executable.write("logits", logits)
            rig.executable.fill_slot(1, np.zeros(41, np.int32), biases)
            steps = [SequenceStep([0], 1, (), [0], GREEDY, adjustment) for adjustment in (Adjustment(1), None)]
            tokens = run(rig.executable, Step(rig.layout, steps, logprobs=3))[0].tolist()
            assert tokens == [7, int(logits[1].argmax())]
            for r in range(2):
                check(rig.executable.logprobs(), 0, r, logits[r], tokens[r], 3)

    @needs(LOGPROBS)
    def test_logprobs_beside_a_row_with_a_nan(self, device: Device) -> None:
        """What is reported of that row means nothing; the other's are right."""
        logits = np.array([[1.0, np.nan, 0.5, 2.0], [1.0, 2.0, 0.5, 2.0]], np.float32)
        with chooser(device, 4, Limits(2, 2, 2)) as rig:
            rig.executable.write("logits", logits)
            steps = [SequenceStep([0], 1, (), [0])] * 2
            assert run(rig.executable, Step(rig.layout, steps, logprobs=2), 3).tolist() == [[NO_TOKEN, 1]] * 3
            for turn in range(3):
                check(rig.executable.logprobs(), turn, 1, logits[1], 1, 2)

    @needs(LOGPROBS)
    def test_logprobs_that_were_not_asked_for(self, device: Device) -> None:
        with chooser(device, 4, Limits(2, 2, 2)) as rig:
            with pytest.raises(InvalidInputError):
                rig.executable.logprobs()
            rig.executable.write("logits", np.zeros((2, 4), np.float32))
            steps = [SequenceStep([0], 1, (), [0])] * 2
            for asked in (2, None):
                run(rig.executable, Step(rig.layout, steps, logprobs=asked))
            with pytest.raises(InvalidInputError):
                rig.executable.logprobs()
        for asked in (-1, MAX_LOGPROBS + 1):
            with pytest.raises(InvalidInputError, match="logprobs is"):
                Step(rig.layout, steps, logprobs=asked)
