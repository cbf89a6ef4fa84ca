"""Log-probabilities from the compact head: within their bound of float64, without all logits; and draws by top-p."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.hal import GREEDY, NO_TOKEN, SamplingParams

from .test_head import LEVELS, Array, HeadAlone, Wide, head, rng

__all__ = ["head", "rng"]  # fixtures

WITHIN = 1 / 64
"""Maximum error of a normaliser: ADR 0129."""
VOCABULARY = 36_000
"""Smaller ones have all logits computed."""


def likely(rng: np.random.Generator, weight: npt.NDArray[np.float16], rows: int, spread: float, peak: float) -> Array:
    """Activations whose logits have this standard deviation, and some tokens that stand out by about ``peak``."""
    width = weight.shape[1]
    x = rng.standard_normal((rows, width)) * spread
    for i in range(rows if peak else 0):
        chosen = weight[rng.integers(0, len(weight), 20)].astype(np.float64)
        x[i] += np.linalg.lstsq(chosen, peak - 1.5 * np.log(1 + np.arange(20)), rcond=None)[0]
    return x.astype(np.float32)


def exact(weight: npt.NDArray[np.float16], x: Array) -> Wide:
    """Log-probabilities in float64."""
    logits = x.astype(np.float64) @ weight.astype(np.float64).T
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("spread", "peak"), [(0.02, 0), (1.25, 0), (2.5, 0), (4, 0), (2, 18)])
def test_logprobs_are_within_their_bound(
    head: Callable[..., HeadAlone], rng: np.random.Generator, level: str, spread: float, peak: float
) -> None:
    """Flat and peaked rows, beside rows of tokens that no text has; every one alone gives the same bits."""
    width, k = 4 * int(rng.integers(30, 40)), int(rng.integers(0, 21))
    weight = (rng.standard_normal((VOCABULARY, width)) / np.sqrt(width)).astype(np.float16)
    x = likely(rng, weight, 5, spread, peak)
    weight[1000:1300] = weight[1000] / 64  # equal rows, which share their errors
    params = SamplingParams(1.0, top_p=0.95, seed=int(rng.integers(2**32))) if spread > 1 else GREEDY
    made, alone, wanted = head(level, weight, 5), head(level, weight, 5), exact(weight, x)
    tokens = made.run(x, params, logits=False, logprobs=k)
    found = made.executable.logprobs()
    assert tokens == made.run(x, params, logits=True)
    for r, token in enumerate(tokens):
        top = np.sort(wanted[r])[::-1][:k]
        ids, values = found.tokens[0, r], found.values[0, r]
        error = float(found.chosen[0, r]) - wanted[r, token]
        assert abs(error) <= WITHIN
        assert len(set(ids.tolist())) == k
        np.testing.assert_allclose(values - wanted[r, ids], error, atol=1e-4)  # one normaliser, and exact logits
        np.testing.assert_allclose(values - top, error, atol=1e-4)  # of the likeliest, in their order
        if params == GREEDY:
            alone.run(x[r : r + 1], params, logits=False, logprobs=k)
            assert alone.executable.logprobs().values[0, 0].tolist() == values.tolist()


def test_errors_of_normalisers_are_centred_and_few_rows_are_read(
    head: Callable[..., HeadAlone], rng: np.random.Generator
) -> None:
    """Without half the variance they would be too great by 0.06; without terms that are missed, too small by 0.02."""
    weight = (rng.standard_normal((VOCABULARY, 256)) / 16).astype(np.float16)
    made, read = head(LEVELS[0], weight, 8), 0
    for spread, peak in ((1.25, 0), (2.5, 0), (2, 18)):
        errors = []
        for _ in range(4):
            x = likely(rng, weight, 8, spread, peak)
            tokens = made.run(x, GREEDY, logits=False, logprobs=1)
            read += made.all_scored
            found, wanted = made.executable.logprobs().chosen[0], exact(weight, x)
            errors += [float(found[r]) - wanted[r, token] for r, token in enumerate(tokens)]
        assert abs(np.mean(errors)) < 0.004
    assert read <= 1, f"{read} of 12 steps computed all logits"  # 1 of 5,800 steps with peaks did


def test_logprobs_of_many_rows_and_of_logits_that_are_no_numbers(
    head: Callable[..., HeadAlone], rng: np.random.Generator
) -> None:
    weight = (rng.standard_normal((VOCABULARY, 64)) / 8).astype(np.float16)
    x = likely(rng, weight, 17, 2, 0)
    made = head(LEVELS[0], weight, 17)
    tokens = made.run(x, GREEDY, logits=False, logprobs=2)
    wanted = exact(weight, x)
    for r, token in enumerate(tokens):  # more rows than are checked: all logits
        assert abs(made.executable.logprobs().chosen[0, r] - wanted[r, token]) < 2e-5
    x[1, 3] = np.nan
    tokens = made.run(x[:3], GREEDY, logits=False, logprobs=2)
    assert tokens[1] == NO_TOKEN
    for r in (0, 2):
        assert abs(made.executable.logprobs().chosen[0, r] - wanted[r, tokens[r]]) <= WITHIN


@pytest.mark.parametrize("top_p", [0.2, 0.4])
def test_draws_whose_first_candidates_do_not_pass(
    head: Callable[..., HeadAlone], rng: np.random.Generator, top_p: float
) -> None:
    """Often all candidates fail that are certain to be the greatest; others that were scored must not be drawn."""
    weight = (rng.standard_normal((VOCABULARY, 64)) / 8).astype(np.float16)
    made = head(LEVELS[0], weight, 8)
    for seed in rng.integers(0, 2**63, 60):
        x = likely(rng, weight, 8, float(rng.choice([1.25, 2, 4])), 0)
        params = SamplingParams(1.0, top_p=top_p, seed=int(seed))
        assert made.run(x, params, logits=False) == made.run(x, params, logits=True)


@pytest.mark.parametrize(("spread", "peak"), [(1.25, 0), (2, 14)])
def test_frequencies_of_draws_are_those_of_float64(
    head: Callable[..., HeadAlone], rng: np.random.Generator, spread: float, peak: float
) -> None:
    """Chi-squared over groups of tokens that top-p keeps; none that it drops is drawn."""
    weight = (rng.standard_normal((VOCABULARY, 64)) / 8).astype(np.float16)
    x, top_p, rows, steps = likely(rng, weight, 1, spread, peak), 0.9, 8, 400
    made = head(LEVELS[0], weight, rows)
    drawn = np.concatenate(
        [
            made.run(np.repeat(x, rows, 0), SamplingParams(1.0, top_p=top_p, seed=int(s)), logits=False)
            for s in rng.integers(0, 2**63, steps)
        ]
    )
    order = np.argsort(-exact(weight, x)[0])
    share = np.exp(exact(weight, x)[0, order])
    kept = int(np.searchsorted(np.cumsum(share), top_p)) + 1
    place = np.empty(VOCABULARY, np.int64)
    place[order] = np.arange(VOCABULARY)
    assert place[drawn].max() <= kept + 1  # rounding to f32 may keep one more
    mass = np.cumsum(share[:kept]) / share[:kept].sum()
    groups = 12
    bounds = np.searchsorted(mass, np.arange(1, groups) / groups)
    expected = np.diff([0, *mass[bounds], 1]) * len(drawn)
    counts = np.bincount(np.searchsorted(bounds, place[drawn]), minlength=groups)
    some = expected > 0
    assert counts[~some].sum() == 0
    chi = ((counts - expected)[some] ** 2 / expected[some]).sum()
    assert chi < 60, f"chi-squared {chi} for {some.sum() - 1} degrees"  # exceeded once in 10^8 times with 11
