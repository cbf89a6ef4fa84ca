"""Token sampling on the host, for requests that change or read the logits.

The draw itself is the one that the device contract defines, so a token does not depend on where it was sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.options import GenerationOptions
from bitnet.core.hal import Logprobs, SamplingParams
from bitnet.core.hal.sampling import choose

F32 = npt.NDArray[np.float32]


class TokenLogprob(NamedTuple):
    """A chosen token's natural log-probability, and the likeliest tokens' (id, log-probability), greatest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def adjusted_logits(
    logits: F32,
    options: GenerationOptions,
    *,
    prompt: Collection[int],
    counts: Mapping[int, int],
    forbidden: Sequence[int] = (),
) -> F32:
    """``logits[V]`` after penalties, bias and exclusions; a new array if anything changes.

    Args:
        prompt: Token ids of the prompt.
        counts: How often each token is in the output.
        forbidden: Token ids that must not be chosen now.
    """
    if not options.changes_logits and not forbidden:
        return logits
    logits = logits.copy()
    if options.repetition_penalty != 1:
        seen = np.fromiter({*prompt, *counts}, np.int64)
        penalty = np.float32(options.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if counts and (options.presence_penalty or options.frequency_penalty):
        times = np.fromiter(counts.values(), np.float32)
        logits[list(counts)] -= options.presence_penalty + options.frequency_penalty * times
    for token, bias in (options.logit_bias or {}).items():
        logits[token] += bias
    logits[list(forbidden)] = -np.inf
    return logits


def sample(logits: F32, params: SamplingParams, position: int) -> int:
    """Sample from ``logits[V]`` the token that follows ``position``, as the contract's ``sample`` does."""
    return choose(
        logits,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        position=position,
    )


def logsumexp(logits: F32) -> npt.NDArray[np.float64]:
    """log(sum(exp(logits))) over the last axis, in float64."""
    peak = logits.max(axis=-1)
    total = np.exp(logits - peak[..., None], dtype=np.float32).sum(axis=-1, dtype=np.float64)
    result: npt.NDArray[np.float64] = np.log(total) + peak
    return result


def token_logprob(logits: F32, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of ``token`` and of the ``top`` likeliest tokens, from ``logits[V]``; ties are in order of
    id."""
    normaliser = float(logsumexp(logits))
    top = min(top, len(logits))
    likeliest: list[int] = []
    if top:
        threshold = np.partition(logits, -top)[-top]
        candidates = np.flatnonzero(logits >= threshold)
        likeliest = candidates[np.argsort(-logits[candidates], kind="stable")][:top].tolist()
    return TokenLogprob(
        token, float(logits[token]) - normaliser, tuple((i, float(logits[i]) - normaliser) for i in likeliest)
    )


def device_logprobs(found: Logprobs, rows: slice, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The log-probabilities of ``tokens`` from a device's results for each pass of a run and each of ``rows``."""
    chosen, ids, values = (np.concatenate(part[:, rows]).tolist() for part in found)
    return [
        TokenLogprob(
            token, chosen[i], tuple(pair for pair in zip(ids[i][:top], values[i], strict=False) if pair[0] >= 0)
        )
        for i, token in enumerate(tokens)
    ]


def sibling_seed(seed: int, index: int) -> int:
    """The seed of a request's completion ``index``: ``seed`` for the first, then derived by SplitMix64 (Steele et al.
    2014)."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
