"""Rotary scalings of files against their papers' formulas in float64; ``tests/oracle`` asks transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.model.rope import rope_frequencies, rope_tables

Make = Callable[..., Any]
PAIRS = 16


def stretched(tiny: Make, kind: str, **keys: Any) -> Any:
    model = tiny("qwen3")
    for layer in range(2):
        for name in ("attn_sub_norm", "ffn_sub_norm"):
            del model.tensors[f"blk.{layer}.{name}.weight"]
    model.metadata |= {"qwen3.rope.scaling.type": kind}
    model.metadata |= {f"qwen3.rope.scaling.{key}": value for key, value in keys.items()}
    return model


def test_yarn(tiny: Make) -> None:
    """Waves that turn more than 32 times in the original context stay; those that turn less than once are stretched."""
    config = stretched(tiny, "yarn", factor=6.0, original_context_length=8192).open().config
    waves = 500_000.0 ** (np.arange(PAIRS) / PAIRS)
    turns = 8192 / (2 * np.pi * waves)
    ratio = rope_frequencies(config, 64) * waves
    kept, gone = np.flatnonzero(turns > 32), np.flatnonzero(turns < 1)
    np.testing.assert_allclose(ratio[kept], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[gone], 1 / 6, rtol=1e-6)
    between = ratio[kept[-1] : gone[0] + 1]
    np.testing.assert_allclose(np.diff(between, 2), 0, atol=1e-6)  # a straight line in the number of the pair
    assert (np.diff(between) < -0.01).all()
    assert config.rope_attention_factor == pytest.approx(1 + 0.1 * math.log(6))
    cos, sin = rope_tables(config, 64)
    np.testing.assert_allclose(np.hypot(cos, sin), config.rope_attention_factor, rtol=1e-6)


def test_the_ramp_of_yarn_is_the_files(tiny: Make) -> None:
    keys = {"factor": 6.0, "original_context_length": 8192, "yarn_beta_fast": 64.0, "yarn_beta_slow": 8.0}
    model = stretched(tiny, "yarn", attn_factor=2.0, **keys)
    config = model.open().config
    waves = 500_000.0 ** (np.arange(PAIRS) / PAIRS)
    turns = 8192 / (2 * np.pi * waves)
    np.testing.assert_allclose((rope_frequencies(config, 64) * waves)[turns < 4], 1 / 6, rtol=1e-6)
    assert config.rope_attention_factor == pytest.approx(2 * (1 + 0.1 * math.log(6)))


@pytest.mark.parametrize("original", [32, 64])
def test_longrope(tiny: Make, original: int) -> None:
    """The requested context decides the factors; the file's own context is 64."""
    model = stretched(tiny, "longrope", original_context_length=original)
    short, long = np.random.default_rng().uniform(1, 9, (2, PAIRS)).astype(np.float32)
    model.tensors |= {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    config = model.open().config
    waves = 500_000.0 ** (np.arange(PAIRS) / PAIRS)
    for positions in (32, 64):
        expected = 1 / (waves * (long if positions > original else short))
        np.testing.assert_allclose(rope_frequencies(config, positions), expected, rtol=1e-6)
    rule = math.sqrt(1 + math.log(64 / original) / math.log(original))
    assert config.rope_attention_factor == pytest.approx(rule)
    model.metadata["qwen3.rope.scaling.attn_factor"] = 1.25
    assert model.open().config.rope_attention_factor == 1.25


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_an_attention_factor_alone(tiny: Make, kind: str) -> None:
    assert stretched(tiny, kind, attn_factor=1.5).open().config.rope_attention_factor == 1.5


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("yarn", {}, "factor", "is missing"),
    ("yarn", {"factor": -1.0}, "factor", "not a positive number"),
    ("yarn", {"factor": 2.0, "original_context_length": 0}, "original_context_length", "not a positive integer"),
    ("yarn", {"factor": 2.0, "yarn_beta_fast": 1.0, "yarn_beta_slow": 2.0}, "type", "below the beta_slow"),
    ("yarn", {"factor": 2.0, "yarn_beta_fast": float("nan")}, "yarn_beta_fast", "not a positive number"),
    ("yarn", {"factor": 2.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor", "only 1 is supported"),
    ("yarn", {"factor": 2.0, "yarn_log_multiplier": 0.1}, "yarn_log_multiplier", "only 0 is supported"),
    ("yarn", {"factor": 2.0, "yarn_attn_factor": 1.0}, "yarn_attn_factor", "only 1.06931 is supported"),
    ("longrope", {"factor": 2.0}, "factor", "only 1 is supported"),
    ("longrope", {"original_context_length": 1}, "original_context_length", "is 1; it must be at least 2"),
    ("longrope", {"attn_factor": "x"}, "attn_factor", "not a positive number"),
]


@pytest.mark.parametrize(("kind", "keys", "key", "message"), WRONG)
def test_scalings_that_cannot_be(tiny: Make, kind: str, keys: dict[str, Any], key: str, message: str) -> None:
    model = stretched(tiny, kind, **keys)
    for name in ("short", "long"):
        model.tensors[f"rope_factors_{name}.weight"] = np.ones(PAIRS, np.float32)
    with pytest.raises(ModelFileError, match=message) as caught:
        model.open()
    assert caught.value.field == f"metadata 'qwen3.rope.scaling.{key}'"


def test_no_ramp_where_all_waves_turn_often(tiny: Make) -> None:
    model = stretched(tiny, "yarn", factor=2.0, original_context_length=2**30)
    model.metadata["qwen3.rope.freq_base"] = 2.0
    with pytest.raises(ModelFileError, match="no ramp"):
        model.open()
    model.metadata["qwen3.rope.freq_base"] = 0.5
    with pytest.raises(ModelFileError, match="to be above 1"):
        model.open()


@pytest.mark.parametrize("factors", [None, np.ones(4), np.zeros(PAIRS), np.full(PAIRS, np.nan)])
def test_impossible_factors_of_longrope(tiny: Make, factors: np.ndarray | None) -> None:
    model = stretched(tiny, "longrope")
    model.tensors["rope_factors_short.weight"] = np.ones(PAIRS, np.float32)
    if factors is not None:
        model.tensors["rope_factors_long.weight"] = factors.astype(np.float32)
    with pytest.raises(ModelFileError, match="rope_factors_long"):
        model.open()


def test_factors_that_nothing_asks_for(tiny: Make) -> None:
    model = stretched(tiny, "none")
    model.tensors["rope_factors_long.weight"] = np.ones(PAIRS, np.float32)
    with pytest.raises(ModelFileError, match="not part of the architecture"):
        model.open()
