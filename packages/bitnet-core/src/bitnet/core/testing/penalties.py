"""Tests of ``sample`` with logits adjusted by the device: penalties, biases, and counts of its own sampled tokens."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import (
    GREEDY,
    IN_OUTPUT,
    IN_PROMPT,
    MAX_COUNT,
    NO_TOKEN,
    PENALTIES,
    Adjustment,
    DenseMatmul,
    Device,
    Limits,
    Op,
    Program,
    Sample,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing import draws
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs, over
from bitnet.core.testing.heads import DRAWS, weights
from bitnet.core.testing.poison import poison_step
from bitnet.core.testing.rig import Array, Rig, dense, tensor
from bitnet.core.testing.sampling import filters, share_left, vocabularies


def exactly_adjusted(logits: Array, marks: Array, biases: Array, adjustment: Adjustment) -> draws.F64:
    """The contract's adjusted logits of a row, in float64."""
    repetition, presence, frequency = (
        float(np.float32(f)) for f in (adjustment.repetition, adjustment.presence, adjustment.frequency)
    )
    out = logits.astype(np.float64)
    for token in np.flatnonzero(marks):
        times = int(marks[token]) // 2
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        if times:
            out[token] -= presence + frequency * times
    result: draws.F64 = out + biases.astype(np.float64)
    return result


def random_marks(rng: np.random.Generator, vocabulary: int) -> Array:
    """Some tokens in a prompt, some in an output."""
    marks = IN_PROMPT * (rng.random(vocabulary) < 0.2)
    return (marks + IN_OUTPUT * rng.poisson(0.3, vocabulary)).astype(np.int32)


def random_biases(rng: np.random.Generator, vocabulary: int) -> Array:
    """Most are 0; some tokens are forbidden, never all."""
    biases = np.where(rng.random(vocabulary) < 0.3, rng.standard_normal(vocabulary) * 2, 0).astype(np.float32)
    biases[(rng.random(vocabulary) < 0.1) & (np.arange(vocabulary) > 0)] = -np.inf
    return biases


def random_adjustment(rng: np.random.Generator, slot: int) -> Adjustment:
    repetition, penalty = float(rng.choice([1.0, 1.1, 1.3, 0.8])), rng.normal(0, 0.7, 2)
    return Adjustment(slot, repetition, *(float(p) if rng.random() < 0.7 else 0.0 for p in penalty))


def allowed(adjusted: draws.F64, params: SamplingParams, position: int) -> list[int]:
    """The tokens that a device may choose: rounding may decide between nearly equal adjusted logits."""
    if params.temperature > 0:
        return draws.allowed(adjusted, params, position)
    close = 2e-6 * max(1.0, float(abs(adjusted[np.isfinite(adjusted)]).max()))
    return [int(v) for v in np.flatnonzero(adjusted >= adjusted.max() - close)]


def chooser(device: Device, vocabulary: int, limits: Limits) -> Rig:
    """A program that only samples."""
    specs = [tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
    return Rig(device, [Sample("logits", "out")], specs, limits=limits)


def slots_of(rng: np.random.Generator, rows: int, limits: Limits) -> list[int | None]:
    """A slot of its own for most rows, in any order."""
    order = [int(slot) for slot in rng.permutation(limits.slots)]
    return [order.pop() if order and rng.random() < 0.8 else None for _ in range(rows)]


class PenaltyTests(DeviceTests):
    @needs(PENALTIES)
    @over(vocabularies)
    def test_adjusted_choices(self, device: Device, rng: np.random.Generator, case: int) -> None:
        """Rows with slots and rows without, greedy and drawn with any filters, against the contract in float64."""
        rows = 20 if case <= 1000 else 9
        limits = Limits(rows + 2, rows + 2, rows + 2)
        logits = (rng.standard_normal((rows, case)) * 3).astype(np.float32)
        with chooser(device, case, limits) as rig:
            for greedy in (True, False):
                params = [GREEDY if greedy else filters(rng) for _ in range(rows)]
                positions = [int(p) for p in rng.integers(0, 9999, rows)]
                slots = slots_of(rng, rows, limits)
                slots[0] = slots[0] if any(s is not None for s in slots) else 0
                steps, exact = [], []
                for r, slot in enumerate(slots):
                    adjustment, changed = None, logits[r].astype(np.float64)
                    if slot is not None:
                        adjustment = random_adjustment(rng, slot)
                        marks, biases = random_marks(rng, case), random_biases(rng, case)
                        rig.executable.fill_slot(slot, marks, biases)
                        changed = exactly_adjusted(logits[r], marks, biases, adjustment)
                    exact.append(changed)
                    steps.append(SequenceStep([0], positions[r] + 1, (), [0], params[r], adjustment))
                out = rig.run(steps, {"logits": logits}, ["out"])["out"]
                for r, token in enumerate(out):
                    wanted = allowed(exact[r], params[r], positions[r])
                    assert token in wanted, f"row {r} gave {token}, not one of {wanted}: {steps[r]}"

    @needs(PENALTIES)
    def test_chosen_tokens_count(self, device: Device, rng: np.random.Generator) -> None:
        """In a run of many passes, and in the run after it. All numbers are exact in f32, so that ties are ties."""
        vocabulary, rows, limits = 37, 6, Limits(7, 7, 7)
        logits = (rng.integers(-16, 48, (rows, vocabulary)) / 8).astype(np.float32)
        slots = [4, None, 0, 6, 2, None]
        adjustments = [None if s is None else Adjustment(s, 2.0, 0.5, float(rng.choice([0.25, 0.75]))) for s in slots]
        marks = [random_marks(rng, vocabulary) for _ in range(rows)]
        biases = [(rng.integers(-8, 8, vocabulary) / 4).astype(np.float32) for _ in range(rows)]
        with chooser(device, vocabulary, limits) as rig:
            rig.executable.write("logits", logits)
            for r, slot in enumerate(slots):
                if slot is not None:
                    rig.executable.fill_slot(slot, marks[r], biases[r])
            for count in (9, MAX_COUNT, 1):
                steps = [SequenceStep([1], 5, (), [0], GREEDY, adjustment) for adjustment in adjustments]
                out = run(rig.executable, rig.step(steps), count)
                for turn in range(count):
                    for r, adjustment in enumerate(adjustments):
                        row = logits[r].astype(np.float64)
                        if adjustment is not None:
                            row = exactly_adjusted(logits[r], marks[r], biases[r], adjustment)
                        wanted = int(np.argmax(row))
                        assert out[turn, r] == wanted, f"pass {turn} of {count}, row {r}: {out[turn, r]}, not {wanted}"
                        if adjustment is not None:
                            marks[r][wanted] += IN_OUTPUT

    @needs(PENALTIES)
    def test_slots_are_apart_and_can_be_filled_anew(self, device: Device) -> None:
        """A slot holds zeros at first; what one sequence chose does not count in another's; filling one forgets all."""
        logits = np.array([[3.0, 2.0, 1.0, 0.0]] * 2, np.float32)
        zeros = np.zeros(4, np.int32), np.zeros(4, np.float32)
        limits = Limits(2, 2, 2)

        def step(*slots: int) -> list[SequenceStep]:
            return [SequenceStep([0], 1, (), [0], GREEDY, Adjustment(slot, frequency=1.5)) for slot in slots]

        with chooser(device, 4, limits) as rig:
            rig.executable.write("logits", logits)
            assert run(rig.executable, rig.step(step(0)), 4)[:, 0].tolist() == [0, 1, 0, 2]
            assert run(rig.executable, rig.step(step(1, 0)), 2).tolist() == [[0, 1], [1, 0]]
            rig.executable.fill_slot(0, *zeros)
            assert run(rig.executable, rig.step(step(1, 0)), 1).tolist() == [[0, 0]]
            plain = [SequenceStep([0], 1, (), [0])] * 2
            assert run(rig.executable, rig.step(plain), 2).tolist() == [[0, 0]] * 2
            assert run(rig.executable, rig.step(step(0)), 1).tolist() == [[1]]

    @needs(PENALTIES)
    def test_a_row_with_a_nan_counts_nothing(self, device: Device) -> None:
        logits = np.array([[1.0, 2.0, np.nan, 0.0], [1.0, 2.0, 1.5, 0.0]], np.float32)
        with chooser(device, 4, Limits(2, 2, 2)) as rig:
            rig.executable.write("logits", logits)
            steps = [SequenceStep([0], 1, (), [0], GREEDY, Adjustment(slot, 1.5, 0.6)) for slot in (1, 0)]
            assert run(rig.executable, rig.step(steps), 3).tolist() == [[NO_TOKEN, 1], [NO_TOKEN, 2], [NO_TOKEN, 0]]
            rig.executable.write("logits", logits[1:])
            assert run(rig.executable, rig.step(steps[:1]), 1).tolist() == [[1]]

    @needs(PENALTIES)
    def test_distribution_of_adjusted_logits(self, device: Device, rng: np.random.Generator) -> None:
        """What filters leave of adjusted logits comes as often as softmax says, and nothing else comes.

        Frequencies that are implausible (1 in 10,000 each time) are drawn once more: a wrong device fails again.
        """
        count = 500 if self.run_size == "small" else 3000
        settings: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.85}, {"top_k": 9, "min_p": 0.05})
        for setting in settings:
            share, temperature = None, float(rng.uniform(0.6, 1.6))
            while share is None or np.count_nonzero(share * count >= 5) < 3:
                logits = (rng.standard_normal(24) * 2).astype(np.float32)
                marks, biases = random_marks(rng, 24), random_biases(rng, 24)
                adjustment = random_adjustment(rng, 0)
                exact = exactly_adjusted(logits, marks, biases, adjustment)
                share = share_left(exact, SamplingParams(temperature, **setting))

            slots = [replace(adjustment, slot=slot) for slot in range(50)]
            plausible = False
            with chooser(device, 24, Limits(50, 50, 50)) as rig:
                rig.executable.write("logits", np.tile(logits, (50, 1)))
                for _ in range(2):
                    out: list[int] = []
                    while len(out) < count:
                        seeds = rng.integers(0, 2**64, 50, dtype=np.uint64)
                        params = [SamplingParams(temperature, seed=int(s), **setting) for s in seeds]
                        for slot in range(50):
                            rig.executable.fill_slot(slot, marks, biases)
                        steps = [SequenceStep([0], 8, (), [0], p, a) for p, a in zip(params, slots, strict=True)]
                        out += run(rig.executable, rig.step(steps))[0].tolist()
                    plausible = plausible or draws.come_as_often(out, share)
                    if plausible:
                        break
            assert plausible, f"{setting}, temperature {temperature}, {adjustment}: {share}"

    @needs(PENALTIES)
    @pytest.mark.parametrize("rows", [1, 3, 16])
    def test_adjusted_head_without_logits(self, device: Device, rng: np.random.Generator, rows: int) -> None:
        """The tokens are those of the same step with its logits, however a device scores those that cannot win."""
        vocabulary, width = {"small": (301, 256), "quick": (5003, 512), "full": (128_256, 2560)}[self.run_size]
        w = weights(rng, "plain", vocabulary, width)
        specs = [tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
        limits = Limits(rows, rows, rows)
        ops: list[Op] = [DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
        program = Program(ops, {s.name: s for s in specs}, {"head": dense(w)}, limits, name="head with penalties")
        with closing(device.compile(program)) as executable:
            for params in (GREEDY, GREEDY, *DRAWS):
                x = (rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-1, 2)).astype(np.float32)
                executable.write("x", x)
                # The likeliest tokens are those that the output has.
                logits = x.astype(np.float64) @ w.astype(np.float64).T
                contents, parts = [], []
                for r in range(rows):
                    marks, biases = random_marks(rng, vocabulary), random_biases(rng, vocabulary)
                    marks[np.argsort(-logits[r])[: rng.integers(40)]] |= IN_OUTPUT
                    contents.append((marks, biases))
                    adjustment = random_adjustment(rng, r) if r % 3 < 2 else None
                    position = int(rng.integers(0, 99))
                    parts.append(SequenceStep([0], position + 1, (), [0], params, adjustment))
                out = {}
                for logits_read in (False, True):
                    for r, (marks, biases) in enumerate(contents):
                        executable.fill_slot(r, marks, biases)
                    executable.write("out", np.full(rows, -1, np.int32))
                    step = Step(StepLayout(limits), parts, logits=logits_read)
                    out[logits_read] = run(executable, poison_step(step), 2).tolist()
                assert out[False] == out[True], f"{params} chose another token where no logits are read"
                for r, part in enumerate(parts):
                    if part.adjustment is not None and params is GREEDY:
                        exact = exactly_adjusted(logits[r], *contents[r], part.adjustment)
                        magnitude = (abs(x[r].astype(np.float64)) @ abs(w.astype(np.float64)).T).max()
                        assert exact[out[False][0][r]] >= exact.max() - 4e-6 * magnitude

    @needs(PENALTIES)
    def test_bad_slots_are_refused(self, device: Device) -> None:
        """Before anything runs; the executable stays usable."""
        limits, sound = Limits(3, 3, 3), (np.zeros(5, np.int32), np.zeros(5, np.float32))
        with chooser(device, 5, limits) as rig:
            wrong: list[tuple[int, Any, Any]] = [
                (3, *sound),
                (-1, *sound),
                (0, sound[0][:4], sound[1]),
                (0, sound[0].astype(np.int64), sound[1]),
                (0, sound[0], sound[1].astype(np.float64)),
            ]
            for slot, marks, biases in wrong:
                with pytest.raises(InvalidInputError):
                    rig.executable.fill_slot(slot, marks, biases)
            for slots in ((3,), (1, 1), (-2,)):
                steps = [SequenceStep([0], 1, (), [0], GREEDY, Adjustment(slot)) for slot in slots]
                with pytest.raises(InvalidInputError, match="slots"):
                    run(rig.executable, Step(rig.layout, steps))
            rig.executable.write("logits", np.arange(5, dtype=np.float32)[None])
            step = [SequenceStep([0], 1, (), [0], GREEDY, Adjustment(2, 2.0, frequency=3.0))]
            assert run(rig.executable, rig.step(step), 2).tolist() == [[4], [3]]
