"""Penalties and log-probabilities against their definitions, in plain Python."""

from __future__ import annotations

import math

import numpy as np

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.sampling import adjusted_logits, sibling_seed, token_logprob


def test_penalties_one_token_at_a_time() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(0, 3, 50).astype(np.float32)
        kept = logits.copy()
        prompt = rng.integers(0, 50, 12).tolist()
        output = rng.integers(0, 50, 9).tolist()
        counts = {token: output.count(token) for token in output}
        options = GenerationOptions(
            repetition_penalty=float(rng.uniform(0.5, 2)),
            presence_penalty=float(rng.normal()),
            frequency_penalty=float(rng.normal()),
            logit_bias={3: 1.5, 4: -math.inf},
        )
        out = adjusted_logits(logits, options, prompt=prompt, counts=counts, forbidden=[7])
        for token in range(50):
            value = float(logits[token])
            if token in prompt or token in output:
                value = value / options.repetition_penalty if value > 0 else value * options.repetition_penalty
            if token in output:
                value -= options.presence_penalty + options.frequency_penalty * output.count(token)
            value += {3: 1.5, 4: -math.inf}.get(token, 0)
            value = -math.inf if token == 7 else value
            assert math.isclose(out[token], value, rel_tol=1e-5, abs_tol=1e-5)
        assert np.array_equal(logits, kept), "the model's own logits were changed"


def test_nothing_asked_changes_nothing() -> None:
    logits = np.arange(5, dtype=np.float32)
    assert adjusted_logits(logits, GenerationOptions(), prompt=[1], counts={2: 3}) is logits


def test_logprobs_against_float64() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 5, 1000).astype(np.float32)
    logits[[10, 20]] = logits.max() + 1  # a tie: the lower id first
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    entry = token_logprob(logits, 33, 4)
    assert math.isclose(entry.logprob, exact[33], abs_tol=1e-5)
    assert [token for token, _ in entry.top] == np.argsort(-exact, kind="stable")[:4].tolist()
    assert np.allclose([value for _, value in entry.top], sorted(exact)[::-1][:4], atol=1e-5)
    assert token_logprob(logits, 33, 0).top == ()
    assert len(token_logprob(logits[:3], 0, 5).top) == 3


def test_sibling_seeds() -> None:
    # SplitMix64 from state 1234567, as published with the generator (its first outputs).
    assert sibling_seed(1234567, 0) == 1234567
    assert [sibling_seed(1234567, i) for i in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
