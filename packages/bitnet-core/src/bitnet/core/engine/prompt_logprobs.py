"""Log-probabilities of a prompt's own tokens, taken from the logits of its positions while it is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.sampling import TokenLogprob, token_logprob


class PromptLogprobs:
    """Collects an entry for each token of a prompt but the first, given those before it.

    Args:
        top: Number of likeliest tokens in each entry.

    Attributes:
        entries: The entries so far, in the prompt's order.
    """

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._wanted, self._top = tuple(prompt[1:]), top
        self.entries: list[TokenLogprob] = []

    @property
    def left(self) -> int:
        """Number of entries to come."""
        return len(self._wanted) - len(self.entries)

    def take(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Take the next rows of ``logits[rows, V]`` that precede a token of the prompt; return the other rows."""
        count = min(self.left, len(logits))
        tokens = self._wanted[len(self.entries) :][:count]
        self.entries += [token_logprob(row, token, self._top) for row, token in zip(logits, tokens, strict=False)]
        return logits[count:]
