"""Tests of what only models for embeddings have: ``norm_tokens``, GELU, and products that fill some columns."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal import EMBEDDERS, Device, GluNormQuant, Limits, NormTokens, Op, TernaryMatmul, Weight
from bitnet.core.testing import oracle
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs, over
from bitnet.core.testing.norms import Rows, check_codes, norm_weight, row_shapes, varied
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


class EmbedderTests(DeviceTests):
    @needs(EMBEDDERS)
    @over(row_shapes)
    @pytest.mark.parametrize("add", [False, True], ids=["replaced", "added"])
    def test_norm_tokens(self, device: Device, rng: np.random.Generator, case: Rows, add: bool) -> None:
        """Rows of all sizes, and sums of all sizes that they are added to."""
        x, before = varied(rng, case.m, case.k, 6), varied(rng, case.m, case.k, 3)
        weight = norm_weight(rng, case.k)
        out = self._norm_tokens(device, x, weight, 1e-5, before if add else None, case.spare)
        exact = oracle.rms_norm(x, weight, 1e-5)
        bound = np.broadcast_to(1e-5 * abs(exact).max(axis=1, keepdims=True), exact.shape)
        if add:
            exact += before
            bound = bound + np.spacing(np.maximum(abs(exact), abs(before)).astype(np.float32))
        assert_within("out", out, exact, bound)

    @needs(EMBEDDERS)
    @pytest.mark.parametrize("eps", [1e-6, 1e-2])
    def test_norm_tokens_uses_eps(self, device: Device, rng: np.random.Generator, eps: float) -> None:
        x, weight = (rng.standard_normal((4, 256)) * eps**0.5).astype(np.float32), norm_weight(rng, 256)
        exact = oracle.rms_norm(x, weight, eps)
        out = self._norm_tokens(device, x, weight, eps, None, 0)
        assert_within("out", out, exact, 1e-5 * abs(exact).max(axis=1, keepdims=True))

    def _norm_tokens(
        self, device: Device, x: Array, weight: Array, eps: float, before: Array | None, spare: int
    ) -> Array:
        m, k = x.shape
        specs, op = [tensor("x", "f32", "M", k), tensor("out", "f32", "M", k)], NormTokens("x", "w", eps, "out")
        inputs = {"x": x}
        if before is not None:
            inputs["out"], op = before, NormTokens("x", "w", eps, "out", add=True)
        with Rig(device, [op], specs, {"w": dense(weight)}, limits=Limits(m + spare)) as rig:
            out: Array = rig.run(tokens(m), inputs, ["out"])["out"]
        return out

    @needs(EMBEDDERS)
    @over(row_shapes)
    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    def test_gelu(self, device: Device, rng: np.random.Generator, case: Rows, normed: bool) -> None:
        """Gates of all sizes: most of those of a row are within a few units of zero, where GELU bends."""
        weight = norm_weight(rng, case.k) if normed else None
        gate_up = varied(rng, case.m, 2 * case.k, 3)
        gate_up[:, : case.k] = rng.standard_normal((case.m, case.k)) * rng.choice([0.1, 1, 3, 100], (case.m, 1))
        specs = [tensor("gu", "f32", "M", 2 * case.k), tensor("out", "i8", "M", case.k), tensor("s", "f32", "M")]
        op = GluNormQuant("gu", None if weight is None else "w", 1e-5, "gelu_tanh", "out", "s")
        weights = {} if weight is None else {"w": dense(weight)}
        with Rig(device, [op], specs, weights, limits=Limits(case.m + case.spare)) as rig:
            out = rig.run(tokens(case.m), {"gu": gate_up}, ["out", "s"])
        exact = oracle.rms_norm(oracle.glu(gate_up, "gelu_tanh"), weight, 1e-5)
        check_codes(out["out"], out["s"], oracle.absmax(exact))

    @needs(EMBEDDERS)
    @pytest.mark.parametrize(
        "shape", [(1, 128, (7,)), (3, 132, (33, 12)), (40, 256, (577,)), (33, 640, (5, 64))], ids=str
    )
    @pytest.mark.parametrize("grouped", [False, True], ids=["one scale", "groups"])
    @pytest.mark.parametrize("add", [False, True], ids=["replaced", "added"])
    def test_products_fill_some_columns(
        self,
        device: Device,
        rng: np.random.Generator,
        shape: tuple[int, int, tuple[int, ...]],
        grouped: bool,
        add: bool,
    ) -> None:
        """The columns before and after stay as they are."""
        m, k, rows = shape
        n, first = sum(rows), 4 * int(rng.integers(0, 20))
        x, scale = rng.integers(-127, 128, (m, k)).astype(np.int8), rng.uniform(0.01, 1, m).astype(np.float32)
        matrices = [random_ternary(rng, r, k) for r in rows]
        before = rng.standard_normal((m, first + n + int(rng.integers(0, 50)))).astype(np.float32)
        if grouped:
            units = [rng.uniform(0.01, 0.1, (r, 1)).astype(np.float16) for r in rows]
            product = oracle.group_matmul(x, scale, list(zip(matrices, units, strict=True)))
            weights = {f"w{i}": ternary(*both) for i, both in enumerate(zip(matrices, units, strict=True))}
        else:
            single = [(matrix, float(np.float32(rng.uniform(0.01, 0.1)))) for matrix in matrices]
            product = oracle.ternary_matmul(x, scale, single)
            weights = {f"w{i}": ternary(*both) for i, both in enumerate(single)}
        specs = [tensor("x", "i8", "M", k), tensor("s", "f32", "M"), tensor("out", "f32", "M", before.shape[1])]
        op = TernaryMatmul("x", "s", tuple(weights), "out", add=add, column=first)
        with Rig(device, [op], specs, weights, limits=Limits(m + 3)) as rig:
            out = rig.run(tokens(m), {"x": x, "s": scale, "out": before}, ["out"])["out"]
        exact = before.copy()
        exact[:, first : first + n] = product + (before[:, first : first + n] if add else 0)
        if add:
            larger = np.maximum(abs(product), abs(before[:, first : first + n]))
            assert_within("sums", out[:, first : first + n], exact[:, first : first + n], np.spacing(larger))
            exact[:, first : first + n] = out[:, first : first + n]
        assert_same_bits("out", out, exact)

    @pytest.mark.parametrize(
        "op",
        [NormTokens("x", "w", 1e-5, "x"), NormTokens("x", "w", 1e-5, "y")]
        + [TernaryMatmul("x8", "s", ("t",), "x", column=column) for column in (2, 8, -4)],
        ids=repr,
    )
    def test_malformed_operations_of_embedders_are_refused(self, device: Device, op: Op) -> None:
        """A result in the place of its input or of another width, and columns that are not there."""
        specs = [tensor("x", "f32", "M", 8), tensor("y", "f32", "M", 4), tensor("x8", "i8", "M", 8)]
        weights: dict[str, Weight] = {"w": dense(np.ones(8, np.float32)), "t": ternary(np.ones((4, 8), np.int8), 1.0)}
        with pytest.raises(InvalidInputError, match=type(op).__name__):
            Rig(device, [op], [*specs, tensor("s", "f32", "M")], weights, limits=Limits(1))

    @pytest.mark.parametrize(
        "op",
        [
            NormTokens("x", "w", 1e-5, "y"),
            TernaryMatmul("x8", "s", ("t",), "x", column=4),
            GluNormQuant("x", None, 1e-5, "gelu_tanh", "y8", "s"),
        ],
        ids=lambda op: type(op).__name__,
    )
    def test_a_device_without_embedders_refuses(self, device: Device, op: Op) -> None:
        """One that has them takes each operation."""
        specs = [tensor(name, "f32", "M", 8) for name in "xy"] + [tensor("x8", "i8", "M", 8), tensor("s", "f32", "M")]
        weights: dict[str, Weight] = {"w": dense(np.ones(8, np.float32)), "t": ternary(np.ones((4, 8), np.int8), 1.0)}
        refusal = pytest.raises(UnsupportedProgramError, match="norms before each product")
        with nullcontext() if EMBEDDERS in device.info.features else refusal:
            Rig(device, [op], [*specs, tensor("y8", "i8", "M", 4)], weights, limits=Limits(1)).executable.close()
