"""Log-probabilities of an answer's tokens, without those of the thought before it."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet.core import Chunk, Completion
from bitnet.core.engine.sampling import TokenLogprob


class AnswerLogprobs:
    """Those of one streamed answer. What may still become a thought is held until that is known."""

    def __init__(self) -> None:
        self._held: list[TokenLogprob] = []
        self._passed = 0  # tokens that are no longer held

    def add(self, chunk: Chunk) -> Sequence[TokenLogprob] | None:
        """Those that a chunk adds; None: none are wanted."""
        if chunk.logprobs is None:
            return None
        self._held += chunk.logprobs
        if chunk.before_answer is None:
            return ()
        found, self._held = self._held[max(0, chunk.before_answer - self._passed) :], []
        self._passed = chunk.before_answer
        return found


def answer_logprobs(completion: Completion) -> Sequence[TokenLogprob] | None:
    """Those of a whole answer; None: none are wanted."""
    return None if completion.logprobs is None else completion.logprobs[completion.before_answer :]
