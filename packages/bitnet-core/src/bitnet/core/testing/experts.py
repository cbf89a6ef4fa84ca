"""Tests of the operations of mixtures of experts: routing, products whose rows choose their matrix, clamped gates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal import EXPERTS, Device, ExpertMatmul, GluNormQuant, Limits, Op, Route, TensorSpec
from bitnet.core.testing import oracle, oracle_experts
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, log_uniform, needs, over, pick
from bitnet.core.testing.norms import check_codes, norm_weight, varied
from bitnet.core.testing.oracle_experts import Matrices
from bitnet.core.testing.rig import (
    Array,
    Rig,
    assert_same_bits,
    assert_within,
    dense,
    random_ternary,
    tensor,
    ternary,
    tokens,
)

EPS = 1e-6


class Mixture(NamedTuple):
    """``top`` of ``experts`` for ``m`` tokens; matrices of ``n`` rows and ``k`` columns, whose scales ``group`` columns
    share; 0: one for all."""

    m: int
    experts: int
    top: int
    n: int
    k: int
    group: int = 0
    parts: int = 2


def mixtures(size: Size) -> list[Mixture]:
    fixed = [
        Mixture(1, 1, 1, 4, 4),
        Mixture(1, 8, 2, 36, 128, 128),
        Mixture(3, 5, 5, 20, 100),
        Mixture(1, 16, 8, 512, 256, 256),
        Mixture(7, 16, 4, 68, 192, 64),
        Mixture(40, 3, 2, 132, 96, 96, 1),
        Mixture(90, 32, 4, 40, 160, 160, 3),
        Mixture(200, 4, 2, 64, 512, 512),
        Mixture(17, 64, 8, 100, 1024, 128),
    ]

    def draw(rng: np.random.Generator) -> Mixture:
        experts, group = log_uniform(rng, 1, 64), int(rng.choice([0, 32, 64, 128, -1]))
        unit = max(4, group)
        k = max(unit, log_uniform(rng, 4, 768, unit))
        shape = log_uniform(rng, 1, 150), experts, int(rng.integers(1, min(experts, 8) + 1)), log_uniform(rng, 1, 300)
        return Mixture(*shape, k, k if group < 0 else group, int(rng.integers(1, 4)))

    return pick(size, fixed, draw, lambda s: 40 * s.m * s.top * s.n * s.k // 10 + 10 * s.experts * s.n * s.k * s.parts)


def matrices(rng: np.random.Generator, case: Mixture, rows: int) -> Matrices:
    """Matrices of all experts, each with another scale where they have several."""
    codes = random_ternary(rng, case.experts * rows, case.k).reshape(case.experts, rows, case.k)
    if not case.group:
        return Matrices(codes, float(rng.uniform(0.01, 0.1)))
    return Matrices(codes, rng.uniform(0.01, 0.1, (case.experts, rows, case.k // case.group)).astype(np.float16))


def choices(rng: np.random.Generator, case: Mixture) -> Array:
    """The experts of each token, different ones in any order."""
    every = np.stack([rng.permutation(case.experts)[: case.top] for _ in range(case.m)])
    return every.astype(np.int32)


def scales(top: int) -> TensorSpec:
    """The scales of each token's rows."""
    return tensor("s", "f32", "M") if top == 1 else tensor("s", "f32", "M", top)


class ExpertTests(DeviceTests):
    @needs(EXPERTS)
    @pytest.mark.parametrize(
        "shape", [(1, 1, 1, 4), (1, 256, 8, 2048), (3, 5, 5, 36), (19, 33, 4, 260), (70, 256, 8, 640)], ids=str
    )
    def test_route(self, device: Device, rng: np.random.Generator, shape: tuple[int, int, int, int]) -> None:
        """Experts in the order of their logits, which may differ only where the bound leaves it open."""
        m, experts, top, k = shape
        x, weight = varied(rng, m, k, 4), norm_weight(rng, k)
        router = (rng.standard_normal((experts, k)) * 2 / np.sqrt(k)).astype(np.float32)
        ids, shares = self._route(device, x, weight, router, top)
        logits, bound = oracle_experts.route(x, weight, EPS, router)
        chosen, off = (np.take_along_axis(a, ids.astype(np.int64), axis=1) for a in (logits, bound))
        assert (np.sort(ids, axis=1)[:, 1:] > np.sort(ids, axis=1)[:, :-1]).all(), "an expert is chosen twice"
        best = -np.sort(-logits, axis=1)[:, :top]
        assert_within("logits of the experts chosen", chosen.astype(np.float32), best, 2 * bound.max(1)[:, None] + 1e-6)
        exact = oracle_experts.shares(logits, ids)
        assert_within("shares", shares, exact, exact * (2e-6 + 2 * off.max(1)[:, None]))

    @needs(EXPERTS)
    def test_equal_logits_take_the_lower_expert(self, device: Device, rng: np.random.Generator) -> None:
        """Equal rows of the router, far from each other and next to each other, and rows of zeros."""
        k, experts, top, m = 132, 70, 6, 33
        rows = rng.integers(-3, 4, (7, k)).astype(np.float32)
        rows[3] = 0
        router = rows[rng.integers(0, 7, experts)]
        x, weight = varied(rng, m, k, 2), norm_weight(rng, k)
        ids, shares = self._route(device, x, weight, router, top)
        logits, bound = oracle_experts.route(x, weight, EPS, router)
        apart = [np.diff(np.unique(row)).min(initial=np.inf) for row in logits]
        clear = np.array(apart) > 4 * bound.max(axis=1)
        assert clear.sum() > m // 2
        assert_same_bits("experts", ids[clear], np.argsort(-logits, 1, kind="stable")[clear, :top].astype(np.int32))
        equal = np.take_along_axis(logits, ids.astype(np.int64), axis=1)
        ties = equal[:, 1:] == equal[:, :-1]
        assert (~ties | (shares[:, 1:] == shares[:, :-1]))[clear].all(), "ties share unequally"

    @needs(EXPERTS)
    def test_route_of_numbers_that_are_not_finite(self, device: Device, rng: np.random.Generator) -> None:
        """Experts stay valid and different; shares say that something is wrong."""
        x = varied(rng, 3, 64, 2)
        router = rng.standard_normal((9, 64)).astype(np.float32)
        broken, spoilt = x.copy(), router.copy()
        broken[1, 7] = spoilt[5, 3] = np.nan
        for rows, matrix, wrong in ((broken, router, [1]), (x, spoilt, [0, 1, 2])):
            ids, shares = self._route(device, rows, norm_weight(rng, 64), matrix, 4)
            assert ((ids >= 0) & (ids < 9)).all()
            assert all(len(set(row)) == 4 for row in ids.tolist())
            assert np.flatnonzero(np.isnan(shares).any(1)).tolist() == wrong

    def _route(self, device: Device, x: Array, weight: Array, router: Array, top: int) -> tuple[Array, Array]:
        m, k = x.shape
        specs = [tensor("x", "f32", "M", k), tensor("ids", "i32", "M", top), tensor("shares", "f32", "M", top)]
        weights = {"w": dense(weight), "router": dense(router)}
        with Rig(
            device, [Route("x", "w", EPS, "router", "ids", "shares")], specs, weights, limits=Limits(m + 2)
        ) as rig:
            out = rig.run(tokens(m), {"x": x}, ["ids", "shares"])
        return out["ids"], out["shares"]

    @needs(EXPERTS)
    @over(mixtures)
    def test_expert_matmul(self, device: Device, rng: np.random.Generator, case: Mixture) -> None:
        """One row of each token by several experts."""
        self._products(device, rng, case, choices(rng, case))

    @needs(EXPERTS)
    @over(mixtures)
    def test_expert_matmul_adds(self, device: Device, rng: np.random.Generator, case: Mixture) -> None:
        """A row for each expert of a token, summed with their shares in the order of the experts."""
        self._sums(device, rng, case, choices(rng, case))

    @needs(EXPERTS)
    @pytest.mark.parametrize(
        ("m", "k", "group"), [(1, 128, 128), (2, 128, 128), (9, 128, 128), (70, 128, 128), (21, 256, 64)]
    )
    def test_all_rows_on_the_same_experts(
        self, device: Device, rng: np.random.Generator, m: int, k: int, group: int
    ) -> None:
        """The last experts of many, while the others have no rows; in one case, with several scales a row."""
        case = Mixture(m, 40, 2, 52, k, group)
        ids = np.tile(np.array([[39, 38]], np.int32), (m, 1))
        self._products(device, rng, case, ids)
        self._sums(device, rng, case, ids)

    def _products(self, device: Device, rng: np.random.Generator, case: Mixture, ids: Array) -> None:
        m, top = ids.shape
        held = [matrices(rng, case, case.n + 4 * i) for i in range(case.parts)]
        each = sum(w.codes.shape[1] for w in held)
        x, scale = _codes(rng, (m, case.k)), rng.uniform(0.001, 0.1, (m,)).astype(np.float32)
        specs = [
            tensor("x", "i8", "M", case.k),
            tensor("s", "f32", "M"),
            tensor("ids", "i32", "M", top),
            tensor("out", "f32", "M", top * each),
        ]
        names = tuple(f"w{i}" for i in range(case.parts))
        op = ExpertMatmul("x", "s", "ids", case.experts, names, "out")
        with self._rig(device, case, op, specs, held) as rig:
            out = rig.run(tokens(m), {"x": x, "s": scale, "ids": ids}, ["out"])["out"]
        rows, units = x[:, None].repeat(top, axis=1), scale[:, None].repeat(top, axis=1)
        assert_same_bits("out", out, oracle_experts.products(rows, units, ids, held).reshape(m, -1))

    def _sums(self, device: Device, rng: np.random.Generator, case: Mixture, ids: Array) -> None:
        m, top = ids.shape
        held = [matrices(rng, case, case.n + 4 * i) for i in range(case.parts)]
        each = sum(w.codes.shape[1] for w in held)
        x, scale = _codes(rng, (m, top, case.k)), rng.uniform(0.001, 0.1, (m, top)).astype(np.float32)
        shares, before = rng.dirichlet(np.ones(top), m).astype(np.float32), varied(rng, m, each, 2)
        specs = [
            tensor("x", "i8", "M", top * case.k),
            scales(top),
            tensor("ids", "i32", "M", top),
            tensor("shares", "f32", "M", top),
            tensor("out", "f32", "M", each),
        ]
        names = tuple(f"w{i}" for i in range(case.parts))
        op = ExpertMatmul("x", "s", "ids", case.experts, names, "out", "shares")
        inputs = {"x": x.reshape(m, -1), "s": scale[:, 0] if top == 1 else scale, "ids": ids, "shares": shares}
        with self._rig(device, case, op, specs, held) as rig:
            out = rig.run(tokens(m), {**inputs, "out": before}, ["out"])["out"]
        parts = oracle_experts.products(x, scale, ids, held)
        assert_same_bits("out", out, oracle_experts.added(before, parts, shares))

    def _rig(self, device: Device, case: Mixture, op: Op, specs: list[TensorSpec], held: list[Matrices]) -> Rig:
        weights = {}
        for i, (codes, scale) in enumerate(held):
            flat = codes.reshape(-1, case.k)
            weights[f"w{i}"] = ternary(flat, scale if isinstance(scale, float) else scale.reshape(len(flat), -1))
        return Rig(device, [op], specs, weights, limits=Limits(case.m + 3))

    @needs(EXPERTS)
    @pytest.mark.parametrize("shape", [(1, 1, 64), (5, 3, 36), (2, 8, 512), (33, 4, 100)], ids=str)
    @pytest.mark.parametrize("clamp", [None, 7.0, 0.5], ids=str)
    def test_glu_of_several_experts(
        self, device: Device, rng: np.random.Generator, shape: tuple[int, int, int], clamp: float | None
    ) -> None:
        """Each expert's row has its own scale; many gates and values are at their limits."""
        m, top, f = shape
        gate_up = (rng.standard_normal((m, top, 2 * f)) * rng.choice([0.3, 5.0, 40.0], (m, top, 1))).astype(np.float32)
        specs = [
            tensor("gu", "f32", "M", top * 2 * f),
            tensor("out", "i8", "M", top * f),
            scales(top),
        ]
        op = GluNormQuant("gu", None, EPS, "silu", "out", "s", clamp=clamp, parts=top)
        with Rig(device, [op], specs, limits=Limits(m + 2)) as rig:
            out = rig.run(tokens(m), {"gu": gate_up.reshape(m, -1)}, ["out", "s"])
        rows = gate_up.reshape(m * top, 2 * f).copy()
        if clamp is not None:
            rows[:, :f] = np.minimum(rows[:, :f], clamp)
            rows[:, f:] = np.clip(rows[:, f:], -clamp, clamp)
        exact = oracle.absmax(oracle.glu(rows, "silu"))
        check_codes(out["out"].reshape(m * top, f), out["s"].reshape(-1), exact)

    def test_a_device_without_experts_refuses(self, device: Device, rng: np.random.Generator) -> None:
        specs = [tensor("x", "f32", "M", 8), tensor("ids", "i32", "M", 2), tensor("shares", "f32", "M", 2)]
        ops = [Route("x", "w", EPS, "router", "ids", "shares")]
        weights = {"w": dense(np.ones(8, np.float32)), "router": dense(np.ones((4, 8), np.float32))}
        if EXPERTS in device.info.features:
            specs[1] = tensor("ids", "i32", "M", 5)
            specs[2] = tensor("shares", "f32", "M", 5)
            with pytest.raises(InvalidInputError, match="has 5 of 4 experts"):
                Rig(device, ops, specs, weights, limits=Limits(1))
            return
        with pytest.raises(UnsupportedProgramError, match="mixtures of experts"):
            Rig(device, ops, specs, weights, limits=Limits(1))


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.integers(-127, 128, shape).astype(np.int8)
