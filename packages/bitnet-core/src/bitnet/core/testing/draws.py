"""The oracle of ``sample``: Philox4x32-10, and the tokens a device may choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import SamplingParams

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

TOLERANCE = 1e-5
"""How far float rounding may move a threshold or a tie (of the greatest |z|, where that is above 1)."""


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[int, int]) -> tuple[U64, U64, U64, U64]:
    """Ten rounds of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Words are arrays of 32-bit values; ``PUBLISHED`` in the suite's own tests holds the authors' test vectors.
    """
    high, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    c, (k0, k1) = counter, key
    for turn in range(10):
        keys = (k0 + turn * 0x9E3779B9) % 2**32, (k1 + turn * 0xBB67AE85) % 2**32
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = (b >> high) ^ c[1] ^ np.uint64(keys[0]), b & low, (a >> high) ^ c[3] ^ np.uint64(keys[1]), a & low
    return c


def gumbel(vocabulary: int, position: int, seed: int) -> F64:
    """The noise of each vocabulary entry, for the token after ``position``."""
    entry = np.arange(vocabulary, dtype=np.uint64)
    zero = np.zeros_like(entry)
    words = philox4x32((entry >> np.uint64(2), zero + np.uint64(position + 1), zero, zero), (seed % 2**32, seed >> 32))
    word = np.choose((entry & np.uint64(3)).astype(np.intp), words)
    uniform = ((word >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    noise: F64 = -np.log(-np.log(uniform))
    return noise


def kept(z: F64, params: SamplingParams, slack: float) -> npt.NDArray[np.bool_]:
    """Tokens that pass top-k, top-p and min-p, with each threshold loosened by ``slack`` (tightened if negative).

    Rounding keeps the order of two logits, or makes them a tie: so the place of a threshold in that order may move only
    outwards, while the mass and the share that top-p and min-p compare with their parameters may err either way.
    """
    keep = np.ones(len(z), bool)
    margin = slack * max(1.0, float(abs(z[np.isfinite(z)]).max()))
    if 0 < params.top_k < len(z):
        keep &= z >= np.sort(z)[-params.top_k] - max(margin, 0)
    if params.top_p < 1:
        falling = -np.sort(-z[keep])
        share = np.exp(falling - falling[0])
        reached = np.cumsum(share) / share.sum() >= float(np.float32(params.top_p)) + slack
        keep &= z >= (falling[np.argmax(reached)] if reached.any() else falling[-1]) - max(margin, 0)
    if params.min_p > 0:
        keep &= z - z.max() >= np.log(np.float32(params.min_p)) - margin
    keep[z == z.max()] = True
    return keep


def allowed(logits: npt.NDArray[Any], params: SamplingParams, position: int) -> list[int]:
    """The tokens that a device may choose: one, or several if rounding can decide between them."""
    if params.temperature == 0:
        return [int(np.flatnonzero(logits == logits.max())[0])]
    z = np.asarray(logits, np.float64) / float(np.float32(params.temperature))
    scores = z + gumbel(len(z), position, params.seed)
    least = scores[kept(z, params, -TOLERANCE)].max() - TOLERANCE * max(1.0, float(abs(z[np.isfinite(z)]).max()))
    return [int(v) for v in np.flatnonzero((scores >= least) & kept(z, params, TOLERANCE))]


FEWEST = 5.001
"""Expected draws of a class of tokens: the 5 of Pearson's test, and room for rounding."""


def come_as_often(tokens: Sequence[int], share: F64) -> bool:
    """Whether tokens occur with the frequencies ``share[V]``; a token with share 0 must never occur."""
    counts = np.bincount(tokens, minlength=len(share))
    assert not counts[share == 0].any(), "a token came that the filters leave out"
    order = np.argsort(-share)
    often = np.count_nonzero(share * len(tokens) >= FEWEST)
    starts = np.arange(often + 1)  # of classes: each token that occurs often, and all others together
    if share[order[often:]].sum() * len(tokens) < FEWEST:
        starts = starts[:-1]  # or together with the rarest of the frequent ones
    wanted = np.add.reduceat(share[order], starts)
    return chi_square_is_plausible(np.add.reduceat(counts[order], starts), wanted / wanted.sum())


def chi_square_is_plausible(counts: npt.NDArray[np.int64], probabilities: F64) -> bool:
    """Whether counts fit probabilities: Pearson's test at 1 in 10,000 (Wilson and Hilferty's approximation)."""
    expected = probabilities * counts.sum()
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    spread = 2 / (9 * freedom)
    return bool((statistic / freedom) ** (1 / 3) < 1 - spread + 3.719 * spread**0.5)
