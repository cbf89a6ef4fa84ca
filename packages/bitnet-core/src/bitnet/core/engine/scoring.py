"""Scoring: computes the log-probabilities of a text's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.results import FinishReason, Update
from bitnet.core.engine.sampling import TokenLogprob, logsumexp
from bitnet.core.engine.sequence import F32, TokenSequence


class Scoring(TokenSequence):
    """Computes the log-probabilities of tokens from index ``start`` on, each given all tokens before it."""

    def __init__(self, number: int, tokens: Sequence[int], start: int) -> None:
        super().__init__(number, tokens)
        self._start = start
        self._scores: list[npt.NDArray[np.float64]] = []
        self._scored = 0

    @property
    def target(self) -> int:
        return len(self.tokens) - 1

    @property
    def first_row(self) -> int:
        return self._start - 1 + self._scored

    @property
    def needs_logits(self) -> bool:
        return True

    def accept(
        self, sampled: Sequence[int], logits: F32 | None, reported: Sequence[TokenLogprob] = (), drafted: int = 0
    ) -> None:
        assert logits is not None
        first = self._start + self._scored
        wanted = np.asarray(self.tokens[first : first + len(logits)])
        chosen = logits[np.arange(len(wanted)), wanted]
        self._scores.append(chosen - logsumexp(logits))
        self._scored += len(wanted)
        self.finished = self.first_row == self.target

    def update(self) -> Update | None:
        return Update(self.number, result=np.concatenate([*self._scores, np.empty(0)])) if self.finished else None

    def end(self, reason: FinishReason) -> Update:
        self.finished = True
        return Update(self.number, result=np.concatenate([*self._scores, np.empty(0)]))
