"""Perplexity of a text, measured as llama.cpp's ``llama-perplexity`` does, so that the numbers can be compared."""

from __future__ import annotations

from collections.abc import Sequence
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


class Running:
    """The perplexity of a text, chunk by chunk.

    The text is cut into chunks of ``context`` tokens; an incomplete last chunk is ignored. The second half of each
    chunk is scored, so that every scored token has at least half a context before it.

    Args:
        bos: If given, it replaces each chunk's first token.

    Attributes:
        chunks: The chunks, in order.
        start: Index in a chunk of its first scored token.

    Raises:
        InvalidInputError: The text is shorter than one chunk, or ``context`` is less than 4.
    """

    def __init__(self, tokens: Sequence[int], *, context: int, bos: int | None) -> None:
        if context < 4:
            raise InvalidInputError(f"a chunk has {context} tokens; it must have at least 4.")
        if len(tokens) < context:
            raise InvalidInputError(
                f"the text has {len(tokens)} tokens; one chunk needs {context}.",
                hint="Use a longer text or a smaller context.",
            )
        first = [] if bos is None else [bos]
        begins = range(0, len(tokens) - context + 1, context)
        self.chunks = [[*first, *tokens[at + len(first) : at + context]] for at in begins]
        self.start = context // 2 + 1  # the first prediction scored is that at the first position of the second half
        self._scores: list[npt.NDArray[np.float64]] = []

    def add(self, logprobs: npt.NDArray[np.float64]) -> Perplexity:
        """The perplexity so far, given the log-probabilities of the next chunk's tokens from ``start`` on."""
        self._scores.append(logprobs)
        return Perplexity.of(np.concatenate(self._scores), len(self._scores))
