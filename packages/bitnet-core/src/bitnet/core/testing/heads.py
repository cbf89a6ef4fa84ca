"""Tests of ``dense_matmul`` into ``sample`` without logits for the host: devices may score tokens approximately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core.hal import (
    GREEDY,
    NO_TOKEN,
    DenseMatmul,
    Device,
    Executable,
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
from bitnet.core.testing import draws, sampling
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.poison import poison_step
from bitnet.core.testing.rig import Array, Rig, assert_products, dense, tensor

DRAWS = (
    SamplingParams(0.7, top_k=5, seed=1),
    SamplingParams(1.0, top_k=40, top_p=0.9, seed=2**40),
    SamplingParams(0.8, min_p=0.05, seed=3),
    SamplingParams(1.3, top_p=0.95, seed=4),
    SamplingParams(1.0, seed=5),
)
"""Every way to reach tokens: few, those above a share of the best, a mass, all."""


def weights(rng: np.random.Generator, kind: str, vocabulary: int, width: int) -> Array:
    """A head whose winners are hard to tell apart, or whose rows differ much in size."""
    w = rng.standard_normal((vocabulary, width)) * 0.02
    if kind == "twins":  # pairs of rows that differ in one element, by little
        w[1::2] = w[: vocabulary // 2 * 2 : 2][: len(w[1::2])]
        w[1::2, rng.integers(width)] += 1e-4
    elif kind == "copies":  # ties: the lowest index wins
        w = w[np.arange(vocabulary) % (vocabulary // 3)]
    elif kind == "outliers":  # one element sets a row's scale
        w[np.arange(vocabulary), rng.integers(0, width, vocabulary)] *= 300
        w *= 10.0 ** rng.uniform(-3, 1, (vocabulary, 1))
    return w.astype(np.float16)


def exact_scores(x: Array, w: Array) -> tuple[Array, Array]:
    """``x · wᵀ`` and ``|x| · |w|ᵀ`` in float64, some of the rows of ``w`` at a time."""
    y = x.astype(np.float64)
    parts = (w[n : n + 4096].astype(np.float64).T for n in range(0, len(w), 4096))
    pairs = [(y @ part, abs(y) @ abs(part)) for part in parts]
    return np.concatenate([a for a, _ in pairs], axis=1), np.concatenate([b for _, b in pairs], axis=1)


def _compile(device: Device, w: Array, rows: int) -> tuple[Executable, StepLayout]:
    """Compile a head and sampling for a maximum number of rows."""
    vocabulary, width = w.shape
    specs = [tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
    limits = Limits(rows, rows, rows)
    ops: list[Op] = [DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
    program = Program(ops, {s.name: s for s in specs}, {"head": dense(w)}, limits, name="head")
    return device.compile(program), StepLayout(limits)


def _draw(
    executable: Executable, layout: StepLayout, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """The sampled token of each row, with logits not requested."""
    rows = len(params)
    parts = [SequenceStep([0], at + 1, rows=[0], sampling=p) for p, at in zip(params, positions, strict=True)]
    executable.write("out", np.full(rows, -7, np.int32))
    return [int(token) for token in run(executable, poison_step(Step(layout, parts, logits=False)))[0]]


def _near(rng: np.random.Generator, logits: Array, position: int) -> SamplingParams:
    """Filters near the token that wins without them: some of the three at random, each on either side of the token."""
    temperature, seed = float(rng.uniform(0.6, 1.2)), int(rng.integers(0, 2**64, dtype=np.uint64))
    z = logits.astype(np.float64) / float(np.float32(temperature))
    winner = z[np.argmax(z + draws.gumbel(len(z), position, seed))]
    k = int(np.count_nonzero(z > winner)) + int(rng.integers(0, 3))  # 0: no top-k
    left = z >= np.sort(z)[-k] if (by_count := bool(k and rng.random() < 0.3)) else np.ones(len(z), bool)
    share = np.exp(z - z.max()) * left
    mass = share[z > winner].sum() / share.sum() + rng.choice([-0.2, -0.02, -1e-3, -1e-4, 1e-4, 1e-3, 0.02, 0.2])
    apart = winner - z.max() + rng.choice([-1, -0.01, -1e-3, 1e-3, 0.01, 1])
    return SamplingParams(
        temperature,
        top_k=k if by_count else 0,
        top_p=float(np.clip(mass, 1e-4, 1)) if rng.random() < 0.8 else 1.0,
        min_p=float(np.exp(min(apart, 0))) if rng.random() < 0.3 else 0.0,
        seed=seed,
    )


class HeadTests(DeviceTests):
    def _head_shape(self) -> tuple[int, int]:
        """Rows and columns of a head."""
        return {"small": (301, 256), "quick": (5003, 512), "full": (128_256, 2560)}[self.run_size]

    @pytest.mark.parametrize("kind", ["plain", "twins", "copies", "outliers"])
    @pytest.mark.parametrize("rows", [1, 3, 16, 52])
    def test_head_without_logits(self, device: Device, rng: np.random.Generator, kind: str, rows: int) -> None:
        """The tokens are those of the same step with its logits; greedy ones are the best there is in float64."""
        self._check_head(device, rng, kind, rows, rows)

    @pytest.mark.parametrize(("rows", "most"), [(1, 8), (3, 8), (5, 8), (9, 16), (33, 64)])
    def test_head_with_rows_to_spare(self, device: Device, rng: np.random.Generator, rows: int, most: int) -> None:
        """The same where the program has more rows than the step: what is past them is not looked at."""
        self._check_head(device, rng, "plain", rows, most)

    def _check_head(self, device: Device, rng: np.random.Generator, kind: str, rows: int, most: int) -> None:
        vocabulary, width = self._head_shape()
        w = weights(rng, kind, vocabulary, width)
        executable, layout = _compile(device, w, most)
        try:
            for params in (*[GREEDY] * (1 if self.run_size == "small" else 3), *DRAWS):
                x = (rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-2, 2)).astype(np.float32)
                x[0] = rng.permutation(x[0]) if params is not GREEDY else w[rng.integers(vocabulary)] * 40.0
                x[-1, rng.integers(width)] *= rng.choice([1, 1000])  # an activation that outweighs all others
                parts = [SequenceStep([0], int(at) + 1, rows=[0], sampling=params) for at in rng.integers(0, 99, rows)]
                executable.write("x", x)
                executable.write("out", np.full(rows, -1, np.int32))
                roughly = run(executable, poison_step(Step(layout, parts, logits=False)))[0]
                exactly = run(executable, poison_step(Step(layout, parts, logits=True)))[0]
                assert roughly.tolist() == exactly.tolist(), f"{params} chose another token where no logits are read"
                if params is GREEDY:
                    logits, magnitudes = exact_scores(x, w)
                    chosen = logits[np.arange(rows), roughly]
                    assert (chosen >= logits.max(axis=1) - 2e-6 * magnitudes.max(axis=1)).all()
        finally:
            executable.close()

    @pytest.mark.parametrize("rows", [1, 8])
    def test_filters_that_just_let_a_token_pass(self, device: Device, rng: np.random.Generator, rows: int) -> None:
        """Top-p, top-k and min-p on either side of the token that would win without them, near and far.

        A device that looks at some of the logits only, and guesses, takes that token where it does not pass, or another
        one where it does.
        """
        vocabulary, width = self._head_shape()
        w = weights(rng, "plain", vocabulary, width)
        executable, layout = _compile(device, w, rows)
        try:
            for spread in (0.05, 1.0, 2.5, 6.0, 30.0):
                x = rng.standard_normal((rows, width)) * spread / (0.02 * width**0.5)
                x = x.astype(np.float32)
                executable.write("x", x)
                run(executable, Step(layout, [SequenceStep([0], 1, rows=[0])] * rows, logits=True))
                logits = executable.read("logits", rows)
                for _ in range({"small": 2, "quick": 4, "full": 12}[self.run_size]):
                    at = [int(p) for p in rng.integers(0, 5000, rows)]
                    params = [_near(rng, logits[r], at[r]) for r in range(rows)]
                    out = _draw(executable, layout, params, at)
                    sampling.check(out, logits, params, at)
        finally:
            executable.close()

    def test_distribution_without_logits(self, device: Device, rng: np.random.Generator) -> None:
        """With every combination of filters the tokens left come as often as softmax says, and no others come.

        Frequencies that are implausible (1 in 10,000 each time) are drawn once more: a wrong device fails again.
        """
        rows, steps = 8, {"small": 40, "quick": 100, "full": 500}[self.run_size]
        vocabulary, width = self._head_shape()
        w = weights(rng, "plain", vocabulary, width)
        executable, layout = _compile(device, w, rows)

        def plausible(x: Array, temperature: float, setting: dict[str, Any], share: draws.F64) -> bool:
            executable.write("x", np.tile(x, (rows, 1)))
            tokens: list[int] = []
            for _ in range(steps):
                seeds = rng.integers(0, 2**64, rows, dtype=np.uint64)
                params = [SamplingParams(temperature, seed=int(seed), **setting) for seed in seeds]
                tokens += _draw(executable, layout, params, [7] * rows)
            return draws.come_as_often(tokens, share)

        try:
            for setting in sampling.COMBINATIONS:
                temperature, share = float(rng.uniform(0.6, 1.6)), None
                while share is None or np.count_nonzero(share * rows * steps >= 5) < 3:
                    spread = rng.uniform(3, 6) * temperature / (0.02 * width**0.5)
                    x = (rng.standard_normal(width) * spread).astype(np.float32)
                    logits, _ = exact_scores(x[None], w)
                    share = sampling.share_left(logits[0], SamplingParams(temperature, **setting))
                often = plausible(x, temperature, setting, share) or plausible(x, temperature, setting, share)
                assert often, f"{setting}, temperature {temperature}"
        finally:
            executable.close()

    def test_logits_that_are_kept(self, device: Device, rng: np.random.Generator) -> None:
        """A program that keeps its tensors has all logits, also after a step that asks for none."""
        rows, vocabulary, width = 2, 301, 256
        w, x = weights(rng, "plain", vocabulary, width), rng.standard_normal((rows, width)).astype(np.float32)
        specs = [tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
        ops: list[Op] = [DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
        with Rig(device, ops, specs, {"head": dense(w)}, limits=Limits(rows, rows, rows)) as rig:
            rig.executable.write("x", x)
            rig.executable.write("logits", np.full((rows, vocabulary), np.nan, np.float32))
            run(rig.executable, Step(rig.layout, [SequenceStep([0], 3, rows=[0])] * rows, logits=False))
            assert_products("logits", rig.executable.read("logits", rows), x, w)

    @pytest.mark.parametrize("rows", [1, 3, 16])
    @pytest.mark.parametrize("where", ["activations", "weights", "a weight of an unlikely token"])
    def test_head_with_a_nan(self, device: Device, rng: np.random.Generator, where: str, rows: int) -> None:
        """A row with a NaN among its logits has no token, where they are left out as where they are not."""
        vocabulary, width = self._head_shape()
        w = weights(rng, "plain", vocabulary, width)
        token, column = int(rng.integers(vocabulary)), int(rng.integers(width))
        if where != "activations":
            w[token] *= 1 if where == "weights" else 1e-3
            w[token, column] = np.nan
        specs = [tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
        limits = Limits(rows, rows, rows)
        ops: list[Op] = [DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
        executable = device.compile(
            Program(ops, {s.name: s for s in specs}, {"head": dense(w)}, limits, name="head with a NaN")
        )
        x = (rng.standard_normal((rows, width)) * 3).astype(np.float32)
        if where == "activations":
            x[rows // 2, column] = np.nan
        odd = np.isnan(x).any(axis=1) | (where != "activations")
        try:
            for params in (GREEDY, *DRAWS):
                parts = [SequenceStep([0], 3, rows=[0], sampling=params)] * rows
                for logits in (False, True):
                    executable.write("x", x)
                    out = run(executable, Step(StepLayout(limits), parts, logits=logits))[0]
                    assert ((out == NO_TOKEN) == odd).all(), f"{params}, logits {logits}: {out.tolist()}"
        finally:
            executable.close()
