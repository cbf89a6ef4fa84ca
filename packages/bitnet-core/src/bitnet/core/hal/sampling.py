"""The operation ``sample`` in numpy, for the engine and for devices that sample on the host.

It is greedy, or a Gumbel-max draw from the tokens that top-k, top-p and min-p leave, after penalties and biases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitnet.core.hal.program import NO_TOKEN
from bitnet.core.hal.step import IN_OUTPUT

_ROUND_0, _ROUND_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counters: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al. 2011): ``counters[n, 4]`` under a 64-bit key to ``[n, 4]``, each value 32 bits."""
    c0, c1, c2, c3 = counters.T
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * _ROUND_0, c2 * _ROUND_1
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & 0xFFFFFFFF, (k1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def gumbel(count: int, position: int, seed: int) -> npt.NDArray[np.float64]:
    """Gumbel noise of vocabulary entries ``0 … count - 1`` for the token that follows ``position``."""
    counters = np.zeros((-(-count // 4), 4), np.uint64)
    counters[:, 0] = np.arange(len(counters), dtype=np.uint64)
    counters[:, 1] = position + 1
    lanes = philox(counters, seed).reshape(-1)[:count]
    u = ((lanes >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    noise: npt.NDArray[np.float64] = -np.log(-np.log(u))
    return noise


def adjusted(
    logits: npt.NDArray[np.float32],
    marks: npt.NDArray[np.int32],
    biases: npt.NDArray[np.float32],
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> npt.NDArray[np.float32]:
    """``logits[V]`` adjusted by a slot's marks and biases and by a row's penalties."""
    factor, times = np.float32(repetition), marks // IN_OUTPUT
    changed = np.where(marks != 0, np.where(logits > 0, logits / factor, logits * factor), logits)
    subtracted = np.float32(presence) + np.float32(frequency) * times.astype(np.float32)
    result: npt.NDArray[np.float32] = np.where(times > 0, changed - subtracted, changed) + biases
    return result


def logprobs(logits: npt.NDArray[np.float32], token: int, k: int) -> npt.NDArray[np.int32]:
    """``int32[1 + 2 k]`` for ``logits[V]``, in the format of :meth:`~bitnet.core.hal.Logprobs.of_words`."""
    words = np.full(1 + 2 * k, -1, np.int32)
    exact = logits.astype(np.float64)
    normaliser = exact.max() + np.log(np.exp(exact - exact.max()).sum())
    top = np.argsort(-exact, kind="stable")[:k]
    words[1 : 1 + len(top)] = top
    floats = words.view(np.float32)
    floats[0], floats[1 + k : 1 + k + len(top)] = exact[token] - normaliser, exact[top] - normaliser
    return words


def choose(
    logits: npt.NDArray[np.float32],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """Sample from one row ``logits[V]``, computed for the token at ``position``; ``NO_TOKEN`` if a logit is NaN."""
    if np.isnan(logits).any():
        return NO_TOKEN
    if temperature == 0:
        return int(np.argmax(logits))
    z = logits.astype(np.float64) / temperature
    keep = survivors(z, top_k=top_k, top_p=top_p, min_p=min_p)
    return int(np.argmax(np.where(keep, z + gumbel(len(z), position, seed), -np.inf)))


def survivors(z: npt.NDArray[np.float64], *, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Which of the logits ``z[V]``, divided by the temperature, top-k, top-p and min-p leave."""
    keep = np.ones(len(z), bool)
    if 0 < top_k < len(z):
        keep &= z >= np.partition(z, -top_k)[-top_k]
    if top_p < 1:
        left = np.sort(z[keep])[::-1]
        mass = np.cumsum(np.exp(left - left[0]))
        keep &= z >= left[np.searchsorted(mass, top_p * mass[-1])]
    if min_p > 0:
        keep &= np.exp(z - z.max()) >= min_p
    return keep
