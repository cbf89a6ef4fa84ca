"""Tests of ``add_bias`` and ``center_rows``."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import AddBias, CenterRows, Device, Limits
from bitnet.core.testing import oracle
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import over
from bitnet.core.testing.norms import Rows, row_shapes, varied
from bitnet.core.testing.rig import Array, Rig, assert_within, dense, not_yet, tensor, tokens


class RowwiseTests(DeviceTests):
    @over(row_shapes)
    def test_add_bias(self, device: Device, rng: np.random.Generator, case: Rows) -> None:
        """Each sum is rounded once; rows and biases are of all sizes, and some cancel to zero."""
        x = varied(rng, case.m, case.k, 6)
        bias = (rng.standard_normal(case.k) * 10.0 ** rng.uniform(-3, 4, case.k)).astype(np.float32)
        bias[rng.integers(0, case.k)] = -x[0, 0]
        x[0] = -bias
        specs = [tensor("x", "f32", "M", case.k)]
        with not_yet():
            rig = Rig(device, [AddBias("x", "b")], specs, {"b": dense(bias)}, limits=Limits(case.m + case.spare))
        with rig:
            out = rig.run(tokens(case.m), {"x": x}, ["x"])["x"]
        assert not out[0].any()
        larger = np.maximum(abs(x), abs(bias))
        assert_within("x", out, oracle.add_bias(x, bias), np.spacing(larger).astype(np.float64))

    @over(row_shapes)
    def test_center_rows(self, device: Device, rng: np.random.Generator, case: Rows) -> None:
        """Rows far from zero and rows around it, of all sizes."""
        x = varied(rng, case.m, case.k, 6)
        x += (rng.standard_normal((case.m, 1)) * abs(x).max(axis=1, keepdims=True)).astype(np.float32)
        out = self._centered(device, x, case.spare)
        assert_within("out", out, oracle.center(x), 2e-6 * abs(x.astype(np.float64)).max(axis=1, keepdims=True))

    def test_a_centered_row_keeps_no_neighbours_mean(self, device: Device, rng: np.random.Generator) -> None:
        """Rows of a number each, which becomes zero, beside one of NaN."""
        x = np.repeat(2.0 ** rng.integers(-20, 20, (9, 1)), 512, axis=1).astype(np.float32)
        x[4, int(rng.integers(512))] = np.nan
        out = self._centered(device, x, 0)
        assert np.isnan(out[4]).all()
        assert not np.delete(out, 4, axis=0).any()

    def _centered(self, device: Device, x: Array, spare: int) -> Array:
        m, k = x.shape
        specs = [tensor("x", "f32", "M", k), tensor("out", "f32", "M", k)]
        with not_yet():
            rig = Rig(device, [CenterRows("x", "out")], specs, limits=Limits(m + spare))
        with rig:
            out: Array = rig.run(tokens(m), {"x": x}, ["out"])["out"]
        return out

    @pytest.mark.parametrize("op", [AddBias("x", "b"), CenterRows("x", "x"), CenterRows("x", "y")], ids=repr)
    def test_malformed_rows_are_refused(self, device: Device, op: AddBias | CenterRows) -> None:
        """A bias of another length, a result in the place of its input, and one of another width."""
        specs = [tensor("x", "f32", "M", 8), tensor("y", "f32", "M", 4)]
        with pytest.raises(InvalidInputError, match=type(op).__name__):
            Rig(device, [op], specs, {"b": dense(np.zeros(12, np.float32))}, limits=Limits(1))
