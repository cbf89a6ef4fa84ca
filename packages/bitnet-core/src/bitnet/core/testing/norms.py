"""Tests of ``norm_quant``, ``glu_norm_quant`` and ``norm_rows``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import pytest

from bitnet.core.hal import (
    DenseMatmul,
    Device,
    GluNormQuant,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    Sample,
    SequenceStep,
    Step,
    StepLayout,
    TernaryMatmul,
    Weight,
    run,
)
from bitnet.core.testing import oracle
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, log_uniform, over, pick
from bitnet.core.testing.rig import (
    Array,
    Rig,
    assert_rel,
    assert_within,
    dense,
    random_ternary,
    tensor,
    ternary,
    tokens,
)


class Rows(NamedTuple):
    """``m`` rows of ``k``; ``spare`` rows of the tensors are left unused."""

    m: int
    k: int
    spare: int = 0


def row_shapes(size: Size) -> list[Rows]:
    fixed = [
        Rows(1, 4),
        Rows(1, 128),
        Rows(3, 132, 1),
        Rows(2, 252, 2),
        Rows(16, 640),
        Rows(5, 2560, 3),
        Rows(4, 5460),
        Rows(2, 6912, 1),
        Rows(512, 256),
        Rows(1, 16384),
    ]

    def draw(rng: np.random.Generator) -> Rows:
        return Rows(log_uniform(rng, 1, 512), log_uniform(rng, 4, 8192, 4), int(rng.integers(0, 9)))

    return pick(size, fixed, draw, lambda s: 20 * s.m * s.k)


def varied(rng: np.random.Generator, rows: int, columns: int, most: float) -> Array:
    """Rows of all sizes up to 10**most, with outliers, and among them one of zeros, one tiny and one constant."""
    x = rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-6, most - 2, (rows, 1))
    x[np.arange(rows), rng.integers(0, columns, rows)] *= 30
    for row, value in zip(rng.permutation(rows)[: rows // 4], (0.0, 1e-20, -3.25), strict=False):
        x[row] = value
    return x.astype(np.float32)


def norm_weight(rng: np.random.Generator, columns: int) -> Array:
    weight: Array = rng.uniform(-2, 2, columns).astype(np.float32)
    return weight


def check_codes(codes: Array, scale: Array, exact: oracle.Quantised) -> None:
    """Check codes and scale against the bound of absmax int8."""
    assert_rel("scale", scale[:, None], exact.scale[:, None], 1e-5)
    assert_within("out", codes, exact.quotient, 0.5 + 2e-3)
    assert codes.min() >= -127, "absmax int8 reached -128"


class NormTests(DeviceTests):
    @over(row_shapes)
    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    def test_norm_quant(self, device: Device, rng: np.random.Generator, case: Rows, normed: bool) -> None:
        weight = norm_weight(rng, case.k) if normed else None
        x = varied(rng, case.m, case.k, 6)
        codes, scale = self._norm_quant(device, x, weight, 1e-5, case.spare)
        check_codes(codes, scale, oracle.absmax(oracle.rms_norm(x, weight, 1e-5)))

    @pytest.mark.parametrize("eps", [1e-6, 1e-2])
    def test_norm_quant_uses_eps(self, device: Device, rng: np.random.Generator, eps: float) -> None:
        x = (rng.standard_normal((4, 256)) * eps**0.5).astype(np.float32)
        weight = norm_weight(rng, 256)
        check_codes(*self._norm_quant(device, x, weight, eps, 0), oracle.absmax(oracle.rms_norm(x, weight, eps)))

    def test_norm_quant_rounds_ties_to_even(self, device: Device) -> None:
        """With a greatest value of 127 a quotient is the value itself, and halves are exact."""
        x = np.arange(-127, 127.5, 0.5, dtype=np.float32)[None, :508]
        x = np.concatenate([x, -x])
        codes, scale = self._norm_quant(device, x, None, 1e-5, 0)
        assert_within("out", codes, np.rint(x.astype(np.float64)), 0)
        assert_within("scale", scale, np.ones(2), 0)

    def test_norm_quant_saturates_at_127(self, device: Device) -> None:
        """The greatest value is 127 and its opposite -127, whatever 127/a rounds to."""
        rows = np.float32(10.0) ** np.arange(-4, 5, 0.25, dtype=np.float32) * np.float32(1.1)
        x = rows[:, None] * np.array([1, -1, 0.999999, 0], np.float32)
        codes, _ = self._norm_quant(device, x, None, 1e-5, 0)
        assert_within("out", codes, np.tile([127.0, -127.0, 127.0, 0.0], (len(rows), 1)), 0)

    def _norm_quant(
        self, device: Device, x: Array, weight: Array | None, eps: float, spare: int
    ) -> tuple[Array, Array]:
        m, k = x.shape
        specs = [tensor("x", "f32", "M", k), tensor("out", "i8", "M", k), tensor("s", "f32", "M")]
        op = NormQuant("x", None if weight is None else "w", eps, "out", "s")
        weights = {} if weight is None else {"w": dense(weight)}
        with Rig(device, [op], specs, weights, limits=Limits(m + spare)) as rig:
            out = rig.run(tokens(m), {"x": x}, ["out", "s"])
        return out["out"], out["s"]

    @over(row_shapes)
    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    @pytest.mark.parametrize("activation", ["relu2", "silu"])
    def test_glu_norm_quant(
        self,
        device: Device,
        rng: np.random.Generator,
        case: Rows,
        normed: bool,
        activation: Literal["relu2", "silu"],
    ) -> None:
        weight = norm_weight(rng, case.k) if normed else None
        gate_up = varied(rng, case.m, 2 * case.k, 3)
        codes, scale = self._glu(device, gate_up, weight, activation, case.spare)
        check_codes(codes, scale, oracle.absmax(oracle.rms_norm(oracle.glu(gate_up, activation), weight, 1e-5)))

    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    @pytest.mark.parametrize("activation", ["relu2", "silu"])
    def test_glu_norm_quant_beyond_f16(
        self, device: Device, rng: np.random.Generator, normed: bool, activation: Literal["relu2", "silu"]
    ) -> None:
        """Products far above 65,504; their squares still fit float32 where there is a norm, else they need not."""
        size = 3e5 if normed else 5e11
        gate_up = (rng.standard_normal((6, 2 * 384)) * size).astype(np.float32)
        gate_up[3, :384] = -abs(gate_up[3, :384])  # every gate shut: a row of zeros under relu2
        weight = norm_weight(rng, 384) if normed else None
        codes, scale = self._glu(device, gate_up, weight, activation, 0)
        check_codes(codes, scale, oracle.absmax(oracle.rms_norm(oracle.glu(gate_up, activation), weight, 1e-5)))

    def _glu(
        self,
        device: Device,
        gate_up: Array,
        weight: Array | None,
        activation: Literal["relu2", "silu"],
        spare: int,
    ) -> tuple[Array, Array]:
        m, k = gate_up.shape[0], gate_up.shape[1] // 2
        specs = [tensor("gu", "f32", "M", 2 * k), tensor("out", "i8", "M", k), tensor("s", "f32", "M")]
        op = GluNormQuant("gu", None if weight is None else "w", 1e-5, activation, "out", "s")
        weights = {} if weight is None else {"w": dense(weight)}
        with Rig(device, [op], specs, weights, limits=Limits(m + spare)) as rig:
            out = rig.run(tokens(m), {"gu": gate_up}, ["out", "s"])
        return out["out"], out["s"]

    @over(row_shapes)
    def test_norm_rows(self, device: Device, rng: np.random.Generator, case: Rows) -> None:
        """Rows of several sequences: the one wanted comes out in the order asked for."""
        weight, x = norm_weight(rng, case.k), varied(rng, case.m, case.k, 6)
        first = case.m // 3
        parts = [(0, first), (first, case.m)] if first else [(0, case.m)]
        rows = [sorted(set(rng.integers(0, b - a, 3).tolist()), reverse=True) for a, b in parts]
        step = [SequenceStep(np.zeros(b - a, np.int32), b - a, rows=r) for (a, b), r in zip(parts, rows, strict=True)]
        wanted = [a + row for (a, _), r in zip(parts, rows, strict=True) for row in r]
        specs = [tensor("x", "f32", "M", case.k), tensor("out", "f32", "R", case.k)]
        limits = Limits(case.m + case.spare, 2, len(wanted) + case.spare)
        with Rig(device, [NormRows("x", "w", 1e-5, "out")], specs, {"w": dense(weight)}, limits=limits) as rig:
            out = rig.run(step, {"x": x}, ["out"])["out"]
        assert_rel("out", out, oracle.rms_norm(x[wanted], weight, 1e-5), 1e-5)

    @pytest.mark.parametrize("seqs", [1, 3])
    def test_rows_that_the_next_pass_reads(self, device: Device, rng: np.random.Generator, seqs: int) -> None:
        """Four passes at once give the tokens and the states of four steps between which the host hands on the states:
        what ``norm_rows`` stores in a tensor that the program reads first is there in the next pass."""
        width, limits = 64, Limits(8, 4, 4)
        ops: list[Op] = [
            NormQuant("state", "w", 1e-5, "q", "s"),
            TernaryMatmul("q", "s", ("m",), "x"),
            NormRows("x", "w", 1e-5, "state"),
            NormRows("x", "w", 1e-5, "last"),
            DenseMatmul("last", "head", "logits"),
            Sample("logits", "next"),
        ]
        specs = [
            tensor("state", "f32", "M", width),
            tensor("q", "i8", "M", width),
            tensor("s", "f32", "M"),
            tensor("x", "f32", "M", width),
            tensor("last", "f32", "R", width),
            tensor("logits", "f32", "R", 97),
            tensor("next", "i32", "R"),
        ]
        weights: dict[str, Weight] = {
            "w": dense(norm_weight(rng, width)),
            "m": ternary(random_ternary(rng, width, width), 0.5),
            "head": dense(rng.standard_normal((97, width)).astype(np.float32)),
        }
        program = Program(ops, {spec.name: spec for spec in specs}, weights, limits, None, "states handed on")
        state = rng.standard_normal((seqs, width)).astype(np.float32)
        step = Step(StepLayout(limits), [SequenceStep([0], 1, rows=[0]) for _ in range(seqs)], logits=False)
        executable = device.compile(program)
        try:
            single, states, handed = [], [], state
            for _ in range(4):
                executable.write("state", handed)
                single.append(run(executable, step)[0].tolist())
                handed = executable.read("state", seqs)
                states.append(handed)
                executable.write("state", np.full((8, width), np.nan, np.float32))
            assert not np.array_equal(states[0], states[1])
            executable.write("state", state)
            assert run(executable, step, 4).tolist() == single
            np.testing.assert_array_equal(executable.read("state", seqs), states[3])
        finally:
            executable.close()
