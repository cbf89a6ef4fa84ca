"""Perplexity of a text, measured as llama.cpp's ``llama-perplexity`` does, so that the numbers can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, sqrt

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Perplexity:
    """``exp`` of the mean negative log-likelihood of ``tokens`` tokens, in ``chunks`` chunks.

    Attributes:
        error: One standard error of ``value``, from the spread of the tokens' log-likelihoods.
    """

    value: float
    error: float
    tokens: int
    chunks: int

    @classmethod
    def of(cls, logprobs: npt.NDArray[np.float64], chunks: int) -> Perplexity:
        """Perplexity of tokens with the natural log-probabilities ``[n]``."""
        n = len(logprobs)
        value = exp(-float(logprobs.mean()))
        return cls(value, value * float(logprobs.std()) / sqrt(n - 1) if n > 1 else 0.0, n, chunks)


def running_perplexity(
    score: Callable[[Sequence[int], int], npt.NDArray[np.float64]],
    tokens: Sequence[int],
    *,
    context: int,
    bos: int | None,
) -> Iterator[Perplexity]:
    """The perplexity after each chunk; the last is the result.

    The text is cut into chunks of ``context`` tokens; an incomplete last chunk is ignored. The second half of each
    chunk is scored, so that every scored token has at least half a context before it. ``bos``, if given, replaces each
    chunk's first token.

    Args:
        score: ``score(tokens, start)``: the log-probabilities of ``tokens[start:]``.

    Raises:
        InvalidInputError: The text is shorter than one chunk, or ``context`` is less than 4.
    """
    if context < 4:
        raise InvalidInputError(f"a chunk has {context} tokens; it must have at least 4.")
    chunks = len(tokens) // context
    if not chunks:
        raise InvalidInputError(
            f"the text has {len(tokens)} tokens; one chunk needs {context}.",
            hint="Use a longer text or a smaller context.",
        )
    logprobs = np.empty(0)
    for i in range(chunks):
        chunk = list(tokens[i * context : (i + 1) * context])
        if bos is not None:
            chunk[0] = bos
        # The first prediction scored is the one made at the first position of the second half.
        logprobs = np.concatenate([logprobs, score(chunk, context // 2 + 1)])
        yield Perplexity.of(logprobs, i + 1)
