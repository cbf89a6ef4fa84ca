"""Tests of ``sample``: greedy choices exactly, draws against the oracle's noise, and what a draw may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core.hal import GREEDY, NO_TOKEN, Device, Limits, Sample, SamplingParams, SequenceStep
from bitnet.core.testing import draws
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, over
from bitnet.core.testing.rig import Array, Rig, tensor


def vocabularies(size: Size) -> list[int]:
    most = {"small": 1000, "quick": 40_000, "full": 128_256}[size]
    return [v for v in (1, 2, 3, 5, 127, 256, 1000, 32003, 128_256) if v <= most]


def choose(
    device: Device, logits: Array, params: Sequence[SamplingParams], positions: Sequence[int], spare: int = 0
) -> list[int]:
    """Sample each row of ``logits[R, V]`` in one step, with parameters and a position of its own."""
    rows, vocabulary = logits.shape
    specs = [tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
    step = [SequenceStep([0], at + 1, rows=[0], sampling=p) for at, p in zip(positions, params, strict=True)]
    limits = Limits(rows + spare, rows + spare, rows + spare)
    with Rig(device, [Sample("logits", "out")], specs, limits=limits) as rig:
        out = rig.run(step, {"logits": logits}, ["out"])["out"]
    return [int(token) for token in out]


def check(out: Sequence[int], logits: Array, params: Sequence[SamplingParams], positions: Sequence[int]) -> None:
    """Each row's token is one that the contract's noise allows."""
    for row, token in enumerate(out):
        wanted = draws.allowed(logits[row], params[row], positions[row])
        assert token in wanted, f"row {row} gave {token}, not one of {wanted}, with {params[row]}"


def filters(rng: np.random.Generator) -> SamplingParams:
    """Parameters with any of the filters on or off."""
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.5, 4.0])),
        top_k=int(rng.choice([0, 1, 2, 5, 40, 100_000])),
        top_p=float(rng.choice([1.0, 0.99, 0.9, 0.5, 0.01])),
        min_p=float(rng.choice([0.0, 0.02, 0.3, 1.0])),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
    )


COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_p": 0.35},
    {"top_k": 9},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.8},
    {"top_p": 0.85, "min_p": 0.05},
    {"top_k": 15, "min_p": 0.08},
    {"top_k": 14, "top_p": 0.85, "min_p": 0.06},
)
"""Every combination of filters."""


def share_left(logits: Array, params: SamplingParams) -> draws.F64 | None:
    """The expected frequency of each token, in float64; None if rounding could decide which tokens pass the filters."""
    z = logits.astype(np.float64) / float(np.float32(params.temperature))
    kept = draws.kept(z, params, -draws.TOLERANCE)
    if (kept != draws.kept(z, params, draws.TOLERANCE)).any():
        return None
    share: draws.F64 = np.where(kept, np.exp(z - z.max()), 0.0)
    share /= share.sum()
    return share


def comes_as_often(device: Device, logits: Array, params: Sequence[SamplingParams], share: draws.F64) -> bool:
    """Whether tokens drawn from one row of logits with each of the parameters have the expected frequencies."""
    return draws.come_as_often(choose(device, np.tile(logits, (len(params), 1)), params, [7] * len(params)), share)


class SampleTests(DeviceTests):
    @over(vocabularies)
    def test_greedy(self, device: Device, rng: np.random.Generator, case: int) -> None:
        """The lowest index among the greatest: random rows, ties, minus infinities, extremes, the last column."""
        logits = (rng.standard_normal((8, case)) * 10).astype(np.float32)
        logits[1] = logits[1].round()  # ties
        logits[2] = -3.5
        logits[3] = -np.inf
        logits[3, case // 2] = -1e30
        logits[4, -1] = 1e30
        logits[5] = -abs(logits[5]) - 1e6
        logits[6, case // 3 :] = logits[6].max() + 1
        params = [GREEDY] * 7 + [SamplingParams(0.0, top_k=3, top_p=0.1, min_p=0.5, seed=7)]
        out = choose(device, logits, params, range(8), spare=3)
        assert out == [int(np.flatnonzero(row == row.max())[0]) for row in logits]

    @over(vocabularies)
    def test_draws(self, device: Device, rng: np.random.Generator, case: int) -> None:
        """Every row with its own parameters and position; the token is the one the contract's noise decides on."""
        rows = 40 if case <= 1000 else 12
        logits = (rng.standard_normal((rows, case)) * rng.choice([0.5, 3, 10], (rows, 1))).astype(np.float32)
        logits[0] = 1.0
        logits[1, 1:] = -np.inf
        params = [filters(rng) for _ in range(rows)]
        positions = [int(p) for p in rng.integers(0, 100_000, rows)]
        positions[-1] = 2**31 - 2
        check(choose(device, logits, params, positions, spare=1), logits, params, positions)

    @over(vocabularies)
    def test_a_row_with_a_nan_has_no_token(self, device: Device, rng: np.random.Generator, case: int) -> None:
        """Wherever the NaN stands, of either sign, whatever else is in the row, and whatever filters would leave."""
        logits = (rng.standard_normal((14, case)) * 5).astype(np.float32)
        logits[8, ::2] = np.inf
        logits[9] = -np.inf
        places = [slice(0, 1), slice(case - 1, case), slice(case // 2, case // 2 + 1), slice(0, case, 3), slice(None)]
        for row in range(10):
            logits[row, places[row % 5]] = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)[row // 5]
        sound = range(10, 14)
        for params in (GREEDY, SamplingParams(1.0, seed=3), *(filters(rng) for _ in range(6))):
            rows = [params] * len(logits)
            out = choose(device, logits, rows, range(len(logits)), spare=2)
            assert out[:10] == [NO_TOKEN] * 10, f"{params}"
            check([out[r] for r in sound], logits[10:], rows[10:], sound)

    def test_draws_from_a_flat_distribution(self, device: Device, rng: np.random.Generator) -> None:
        """The noise alone decides, its ``u`` next to 1: a logarithm that is only absolutely accurate fails here."""
        vocabulary = {"small": 4096, "quick": 32003, "full": 128_256}[self.run_size]
        logits = np.full((64, vocabulary), 0.25, np.float32)
        params = [SamplingParams(1.0, seed=int(s)) for s in rng.integers(0, 2**64, 64, dtype=np.uint64)]
        positions = [int(p) for p in rng.integers(0, 4096, 64)]
        check(choose(device, logits, params, positions), logits, params, positions)

    def test_filters_keep_all_ties(self, device: Device) -> None:
        """With four equal greatest logits, top-k 1 and a small top-p keep all four, and so does min-p 1."""
        logits = np.tile(np.array([2, 5, 1, 5, 5, 0, 5, 4.9], np.float32), (300, 1))
        settings = [{"top_k": 1}, {"top_p": 0.05}, {"min_p": 1.0}]
        for setting in settings:
            params = [SamplingParams(1.0, seed=seed, **setting) for seed in range(300)]  # type: ignore[arg-type]
            assert set(choose(device, logits, params, [3] * 300)) == {1, 3, 4, 6}

    def test_zeros_of_both_signs_are_ties(self, device: Device) -> None:
        """A threshold at 0 keeps -0 too, and one at -0 keeps no less than it should."""
        logits = np.tile(np.array([0.0, -0.0, 1.0, -0.0, 0.0, -3.0], np.float32), (200, 1))
        settings = [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.45}, {"min_p": 0.3}]
        for setting in settings:
            params = [SamplingParams(1.0, seed=seed, **setting) for seed in range(200)]  # type: ignore[arg-type]
            assert set(choose(device, logits, params, [3] * 200)) == {0, 1, 2, 3, 4}, f"{setting}"

    def test_filters_apply_in_order(self, device: Device) -> None:
        """Top-p counts its mass over what top-k left: half of two equal tokens is one tie of two, not all four."""
        logits = np.tile(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), (300, 1))
        params = [SamplingParams(1.0, top_k=2, top_p=0.6, seed=seed) for seed in range(300)]
        assert set(choose(device, logits, params, [0] * 300)) == {0, 1}  # 0.4 / 0.7 < 0.6
        params = [SamplingParams(1.0, top_k=2, top_p=0.55, seed=seed) for seed in range(300)]
        assert set(choose(device, logits, params, [0] * 300)) == {0}
        params = [SamplingParams(2.0, min_p=0.6, seed=seed) for seed in range(300)]
        assert set(choose(device, logits, params, [0] * 300)) == {0, 1, 2}  # sqrt(0.2 / 0.4) > 0.6 > sqrt(0.1 / 0.4)

    @pytest.mark.parametrize("vary", ["seed", "position"])
    def test_distribution(self, device: Device, vary: str) -> None:
        """Over seeds, and over positions of one seed, tokens come as often as softmax says."""
        count = 1500 if self.run_size == "small" else 12_000
        logits = np.log(np.array([0.02, 0.3, 0.08, 0.25, 0.05, 0.1, 0.2], np.float32))
        out = []
        for first in range(0, count, 500):
            numbers = range(first, first + 500)
            params = [SamplingParams(1.0, seed=n if vary == "seed" else 2**40 + 7) for n in numbers]
            positions = list(numbers) if vary == "position" else [12] * 500
            out += choose(device, np.tile(logits, (500, 1)), params, positions)
        counts = np.bincount(out, minlength=len(logits))
        probabilities = np.exp(logits.astype(np.float64))
        assert draws.chi_square_is_plausible(counts, probabilities / probabilities.sum())

    def test_distribution_of_what_filters_leave(self, device: Device, rng: np.random.Generator) -> None:
        """On random logits: what filters leave comes as often as softmax says, and nothing else comes.

        Frequencies that are implausible (1 in 10,000 each time) are drawn once more: a wrong device fails again.
        """
        count = 500 if self.run_size == "small" else 4000
        for setting in COMBINATIONS:
            temperature, share = float(rng.uniform(0.6, 1.6)), None
            while share is None or np.count_nonzero(share * count >= 5) < 3:
                logits = (rng.standard_normal(24) * 2).astype(np.float32)
                share = share_left(logits, SamplingParams(temperature, **setting))
            seeds = rng.integers(0, 2**64, 2 * count, dtype=np.uint64)
            params = [SamplingParams(temperature, seed=int(s), **setting) for s in seeds]
            first, second = params[:count], params[count:]
            plausible = comes_as_often(device, logits, first, share) or comes_as_often(device, logits, second, share)
            assert plausible, f"{setting}, temperature {temperature}: {share}"

    def test_a_draw_depends_on_seed_position_and_logits_only(self, device: Device, rng: np.random.Generator) -> None:
        """Not on the row, the company in the step, or the size of the program."""
        logits = rng.standard_normal((24, 301)).astype(np.float32)
        params = [SamplingParams(1.0, seed=int(s)) for s in rng.integers(0, 2**63, 24)]
        positions = [int(p) for p in rng.integers(0, 5000, 24)]
        together = choose(device, logits, params, positions, spare=5)
        order = rng.permutation(24)
        mixed = choose(device, logits[order], [params[i] for i in order], [positions[i] for i in order])
        assert mixed == [together[i] for i in order]
        for i in range(4):
            assert choose(device, logits[i : i + 1], params[i : i + 1], positions[i : i + 1]) == together[i : i + 1]

    def test_both_halves_of_the_seed_and_the_position_count(self, device: Device) -> None:
        logits = np.zeros((64, 4096), np.float32)
        by_low = choose(device, logits, [SamplingParams(1.0, seed=s) for s in range(64)], [5] * 64)
        by_high = choose(device, logits, [SamplingParams(1.0, seed=s << 32) for s in range(64)], [5] * 64)
        by_position = choose(device, logits, [SamplingParams(1.0, seed=9)] * 64, range(64))
        for out in (by_low, by_high, by_position):
            assert len(set(out)) > 50  # of 4096 equally likely tokens 64 draws repeat hardly ever
