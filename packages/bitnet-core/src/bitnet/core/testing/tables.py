"""Tests of ``embed``, ``dense_matmul`` and sampling with ternary tables, which a device may refuse."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.errors import UnsupportedProgramError
from bitnet.core.hal import (
    GREEDY,
    NO_TOKEN,
    TERNARY_TABLES,
    DenseMatmul,
    Device,
    Embed,
    Limits,
    Op,
    Program,
    Sample,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, log_uniform, over, pick
from bitnet.core.testing.heads import DRAWS
from bitnet.core.testing.poison import poison_step
from bitnet.core.testing.rig import Array, Rig, assert_within, random_ternary, tensor, ternary, tokens

F16 = npt.NDArray[np.float16]


class Table(NamedTuple):
    """A table of ``rows`` rows and ``width`` columns with a scale per ``group`` columns, multiplied with ``m`` rows."""

    m: int
    rows: int
    width: int
    group: int
    spare: int = 0


def table_shapes(size: Size) -> list[Table]:
    fixed = [
        Table(1, 1, 32, 32),
        Table(1, 301, 128, 128),
        Table(3, 129, 192, 64, spare=2),
        Table(2, 50, 132, 132),
        Table(7, 1031, 512, 256, spare=1),
        Table(17, 97, 1280, 32),
        Table(5, 2003, 1024, 128, spare=3),
        Table(1, 1001, 4096, 128),
        Table(33, 700, 2048, 2048),
    ]

    def draw(rng: np.random.Generator) -> Table:
        group = 1 << int(rng.integers(5, 10))
        width = log_uniform(rng, group, 4096, group)
        m, rows = log_uniform(rng, 1, 64), log_uniform(rng, 1, 3000)
        return Table(m, rows, width, group, int(rng.integers(0, 5)))

    return pick(size, fixed, draw, lambda s: s.m * s.rows * s.width)


def random_table(rng: np.random.Generator, case: Table) -> tuple[npt.NDArray[np.int8], F16]:
    """Weights, and scales that differ by up to a hundred times, of both signs, some zero, some as small as f16 has."""
    shape = case.rows, case.width // case.group
    scales = 10 ** rng.uniform(-2, 0, shape) * rng.choice([-1, 0, 1, 1, 1, 1, 1, 6e-6], shape)
    return random_ternary(rng, case.rows, case.width), scales.astype(np.float16)


def activations(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Rows that differ in size, some with an element that outweighs all others by far, some with zeros."""
    x = rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-4, 4, (rows, 1))
    x[np.arange(rows), rng.integers(0, width, rows)] *= rng.choice([0, 1, 1, 1000, 1e5], rows)
    x[:, : int(rng.integers(0, width))] *= rng.choice([0, 1, 1, 1e-3])
    return x.astype(np.float32)


def values(codes: npt.NDArray[np.int8], scales: F16) -> npt.NDArray[np.float64]:
    """The table in float64: each code times its group's scale."""
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), codes.shape[1] // scales.shape[1], 1)


def scores(x: Array, codes: npt.NDArray[np.int8], scales: F16) -> tuple[npt.NDArray[np.float64], Array]:
    """``x · Wᵀ`` in float64, and the contract's bound on each element's error."""
    count = scales.shape[1]
    group = x.shape[1] // count
    groups, sizes = abs(x.astype(np.float64)).reshape(len(x), count, group), abs(scales.astype(np.float64)).T
    greatest = 1.5e-6 * np.sqrt(group) * groups.max(axis=2)
    exact = x.astype(np.float64) @ values(codes, scales).T
    return exact, (1e-6 * groups.sum(axis=2) + greatest) @ sizes + 1e-37


def taken(device: Device, feature: str = TERNARY_TABLES) -> AbstractContextManager[None]:
    """Context for programs that a device without the feature may refuse with ``UnsupportedProgramError``."""
    return nullcontext() if feature in device.info.features else suppress(UnsupportedProgramError)


def check_embed(device: Device, rng: np.random.Generator, case: Table) -> None:
    """The exact rows of a table.

    Raises:
        UnsupportedProgramError: The device refuses such tables. So does :func:`check_head`.
    """
    codes, scales = random_table(rng, case)
    ids = rng.integers(0, case.rows, case.m).astype(np.int32)
    ids[-1] = case.rows - 1
    specs, weights = [tensor("out", "f32", "M", case.width)], {"t": ternary(codes, scales)}
    with Rig(device, [Embed("t", "out")], specs, weights, limits=Limits(case.m + case.spare)) as rig:
        out = rig.run([SequenceStep(ids, case.m)], {}, ["out"])["out"]
    assert_within("out", out, values(codes, scales)[ids], 0.0)


def check_head(device: Device, rng: np.random.Generator, case: Table) -> None:
    """Products with a table, within the contract's bound of float64."""
    codes, scales = random_table(rng, case)
    x = activations(rng, case.m, case.width)
    specs = [tensor("x", "f32", "R", case.width), tensor("out", "f32", "R", case.rows)]
    limits, weights = Limits(case.m + case.spare, max_rows=case.m + case.spare), {"w": ternary(codes, scales)}
    with Rig(device, [DenseMatmul("x", "w", "out")], specs, weights, limits=limits) as rig:
        out = rig.run(tokens(case.m, range(case.m)), {"x": x}, ["out"])["out"]
    assert_within("out", out, *scores(x, codes, scales))


class TableTests(DeviceTests):
    @over(table_shapes)
    def test_embed_of_a_ternary_table(self, device: Device, rng: np.random.Generator, case: Table) -> None:
        with taken(device):
            check_embed(device, rng, case)

    @over(table_shapes)
    def test_dense_matmul_of_a_ternary_table(self, device: Device, rng: np.random.Generator, case: Table) -> None:
        with taken(device):
            check_head(device, rng, case)

    @pytest.mark.parametrize("kind", ["random", "copies", "nan", "infinite"])
    @pytest.mark.parametrize("rows", [1, 7])
    def test_sampling_from_a_ternary_head(self, device: Device, rng: np.random.Generator, rows: int, kind: str) -> None:
        """Tied as an embedding; tokens are those of the step with its logits, greedy ones the best in float64."""
        vocabulary, width = {"small": (301, 256), "quick": (2003, 512), "full": (151_936, 4096)}[self.run_size]
        codes, scales = random_table(rng, Table(rows, vocabulary, width, 128))
        codes[: vocabulary // 3, 3] = 0  # an infinity gives them a NaN
        if kind == "copies":  # ties: the lowest index wins
            rows_of = np.arange(vocabulary) % (vocabulary // 3)
            codes, scales = codes[rows_of], scales[rows_of]
        specs = [
            tensor("e", "f32", "M", width),
            tensor("x", "f32", "R", width),
            tensor("logits", "f32", "R", vocabulary),
            tensor("out", "i32", "R"),
        ]
        ops: list[Op] = [Embed("head", "e"), DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
        limits = Limits(rows, rows, rows)
        program = Program(ops, {s.name: s for s in specs}, {"head": ternary(codes, scales)}, limits, name="head")
        with taken(device), closing(device.compile(program)) as executable:
            for params in (GREEDY, *DRAWS):
                x = activations(rng, rows, width)
                odd = np.zeros(rows, bool)
                if kind in ("nan", "infinite"):
                    odd[rng.integers(rows)] = True
                    x[odd, 3] = np.nan if kind == "nan" else np.inf
                parts = [SequenceStep([0], int(at) + 1, rows=[0], sampling=params) for at in rng.integers(0, 99, rows)]
                executable.write("x", x)
                roughly, exactly = (
                    run(executable, poison_step(Step(StepLayout(limits), parts, logits=logits)))[0]
                    for logits in (False, True)
                )
                assert roughly.tolist() == exactly.tolist(), f"{params} chose another token where no logits are read"
                assert ((roughly == NO_TOKEN) == odd).all(), f"{params}: {roughly.tolist()}, NaN in {odd.tolist()}"
                if params is not GREEDY:
                    continue
                exact, bounds = scores(x[~odd], codes, scales)
                chosen = exact[np.arange(len(exact)), roughly[~odd]]
                assert (chosen >= exact.max(axis=1) - 2 * bounds.max(axis=1)).all(), "a better token is there"
                if kind == "copies":
                    assert (roughly[~odd] < vocabulary // 3).all()
