"""``dense_matmul`` into ``sample`` where the host reads no logits: a device may score most tokens roughly."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.hal import (
    GREEDY,
    NO_TOKEN,
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
)
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


class HeadTests(DeviceTests):
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
        vocabulary, width = {"small": (301, 256), "quick": (5003, 512), "full": (128_256, 2560)}[self.run_size]
        w = weights(rng, kind, vocabulary, width)
        specs = [
            tensor("x", "f32", "R", width),
            tensor("logits", "f32", "R", vocabulary),
            tensor("out", "i32", "R"),
        ]
        limits = Limits(most, most, most)
        ops: list[Op] = [DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
        program = Program(ops, {s.name: s for s in specs}, {"head": dense(w)}, limits, name="head")
        layout = StepLayout(limits)
        executable = device.compile(program)
        try:
            for params in (GREEDY, GREEDY, GREEDY, *DRAWS):
                x = (rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-2, 2)).astype(np.float32)
                x[0] = rng.permutation(x[0]) if params is not GREEDY else w[rng.integers(vocabulary)] * 40.0
                x[-1, rng.integers(width)] *= rng.choice([1, 1000])  # an activation that outweighs all others
                parts = [SequenceStep([0], int(at) + 1, rows=[0], sampling=params) for at in rng.integers(0, 99, rows)]
                executable.write("x", x)
                executable.write("out", np.full(rows, -1, np.int32))
                roughly = executable.run(poison_step(Step(layout, parts, logits=False)))[0]
                exactly = executable.run(poison_step(Step(layout, parts, logits=True)))[0]
                assert roughly.tolist() == exactly.tolist(), f"{params} chose another token where no logits are read"
                if params is GREEDY:
                    logits, magnitudes = exact_scores(x, w)
                    chosen = logits[np.arange(rows), roughly]
                    assert (chosen >= logits.max(axis=1) - 2e-6 * magnitudes.max(axis=1)).all()
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
            rig.executable.run(Step(rig.layout, [SequenceStep([0], 3, rows=[0])] * rows, logits=False))
            assert_products("logits", rig.executable.read("logits", rows), x, w)

    @pytest.mark.parametrize("rows", [1, 3, 16])
    @pytest.mark.parametrize("where", ["activations", "weights", "a weight of an unlikely token"])
    def test_head_with_a_nan(self, device: Device, rng: np.random.Generator, where: str, rows: int) -> None:
        """A row with a NaN among its logits has no token, where they are left out as where they are not."""
        vocabulary, width = {"small": (301, 256), "quick": (5003, 512), "full": (128_256, 2560)}[self.run_size]
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
                    out = executable.run(Step(StepLayout(limits), parts, logits=logits))[0]
                    assert ((out == NO_TOKEN) == odd).all(), f"{params}, logits {logits}: {out.tolist()}"
        finally:
            executable.close()
