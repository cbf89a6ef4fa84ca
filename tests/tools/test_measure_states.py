"""``tools/measure_states.py`` computes the gated delta rule, and rounds as it says."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import measure_states
from bitnet.core.reference.recurrent import Heads, delta_rule
from measure_states import D_K, D_V, EPS, Inputs, codes, f16, gates, heads, int8, nearest, outputs, scaled_f16


def layer(n: int) -> Inputs:
    """Every group of heads, with states that have met more than their first writes."""
    rng = np.random.default_rng()
    decay, beta, _ = gates(rng, n)
    return heads(rng.standard_normal((n, measure_states.WIDTH)).astype(np.float32), decay, beta, 1)


@pytest.mark.parametrize("outside", [False, True])
def test_outputs_are_those_of_the_contract(outside: bool) -> None:
    inputs = layer(40)
    n, count, _ = inputs.q.shape
    qkv = np.concatenate([x.reshape(n, -1) for x in (inputs.q, inputs.k, inputs.v)], axis=1)
    both = np.concatenate([np.log(inputs.decay), inputs.beta], axis=1)
    state = np.zeros((count, D_K, D_V), np.float32)
    exact, _ = delta_rule(qkv, both, state, Heads(count, tiled=False, values=count, d_k=D_K, d_v=D_V), eps=0)
    exact = exact.reshape(n, count, D_V).astype(np.float64)
    exact /= np.sqrt((exact * exact).mean(axis=-1, keepdims=True) + EPS)
    found = outputs(inputs, np.float64, lambda state: state, outside)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)


def test_states_are_rounded_after_every_token() -> None:
    seen: list[int] = []

    def forget(state: np.ndarray) -> np.ndarray:
        seen.append(1)
        return np.zeros_like(state)

    inputs = layer(5)
    found = outputs(inputs, np.float64, forget)
    alone = outputs(Inputs(*(x[4:] for x in inputs)), np.float64, lambda state: state)
    assert len(seen) == 5
    np.testing.assert_allclose(found[4:], alone)


def test_roundings() -> None:
    rng = np.random.default_rng()
    state = (rng.standard_normal((3, D_V, D_K)) * np.exp(rng.uniform(-5, 5, (3, 1, 1)))).astype(np.float32)
    normal = np.abs(state) > 2.0**-14
    np.testing.assert_array_equal(nearest(13)(state)[normal], f16(state)[normal])
    exponents = np.exp2(np.floor(np.log2(np.abs(state))))
    assert np.all(np.abs(nearest(16)(state) - state) <= exponents * 2.0**-8)
    least = np.abs(state).max(axis=(1, 2), keepdims=True) * 2.0**-25
    assert np.all(np.abs(scaled_f16(state) - state) <= np.maximum(exponents * 2.0**-10, least))
    assert np.count_nonzero(scaled_f16(state * np.float32(1e-12))) > 0.99 * state.size
    for axes, most in (((2,), 127), ((1, 2), 32767)):
        unit = np.abs(state).max(axis=axes, keepdims=True) / most
        rounded = codes(most, axes)(state) / unit
        assert np.all(np.abs(rounded - state / unit) < 0.51)
        assert np.all(np.abs(rounded - np.rint(rounded)) < 0.01)
        assert np.unique(np.rint(rounded)).size > min(most, state.size) / 4


def test_stochastic_rounding_has_the_right_mean() -> None:
    value = np.full((1, D_V, D_K), 1 + 0.3 * 2.0**-10, np.float32)
    rounded = measure_states.stochastic_f16(1)(value)
    assert set(np.unique(rounded)) == {1.0, 1 + 2.0**-10}
    assert abs((rounded - 1).mean() / 2.0**-10 - 0.3) < 0.05  # fourteen standard errors


def test_codes_of_activations_are_absmax() -> None:
    rows = np.random.default_rng().standard_normal((4, 64)).astype(np.float32)
    unit = np.abs(rows).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(int8(rows) - rows) <= 0.501 * unit)


def test_a_coarser_state_is_farther_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_states", "--tokens", "40"])
    measure_states.main()
    strong = capsys.readouterr().out.split("\n\n")[0].splitlines()
    errors = {row.split(" | ")[0][2:]: float(row.split(" | ")[4]) for row in strong[2:]}
    order = (
        "f32",
        "f16 and 8 bits of its error",
        "i16, a scale for each column",
        "f16",
        "bf16",
        "i8, a scale for each column",
    )
    assert [errors[kind] for kind in order] == sorted(errors[kind] for kind in order)
    assert errors["f32"] < 1e-6
    assert 5e-3 < errors["int8, f32"] < 0.02
