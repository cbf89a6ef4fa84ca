"""Prompt lookup decoding (Saxena 2023): drafts the next tokens from an earlier occurrence of the last ones.

A text often repeats a passage: of its prompt, or of itself. A draft is what followed the latest earlier occurrence of
the text's last tokens. The model verifies it in one step: the draft is fed after the next token, and the device samples
a token after each. A sample depends only on seed, position and logits. So the samples are those of single steps as long
as the draft agrees with them; those after the first difference are thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bitnet.core.engine.prediction import NGRAMS, Prediction

MAX_MATCH = 8
"""Longest match whose length is measured; longer ones count as this long."""
PREDICTED = MAX_MATCH + 1
"""What stands for the length of the match where a draft comes from the prediction."""
MIN_REPEATED = 4
"""Drafted tokens that must be right in a row for a passage to count as repeated."""
RECENT = 64
"""Tokens after a repeated passage in which another one is expected."""
MAX_TRIALS = 16
"""Drafted tokens over which the probability of a draft is averaged."""
INDEX_BATCH = 1024
"""Tokens that are indexed in one go, without a chance for other threads to run."""


class Draft(NamedTuple):
    """Tokens that may come next.

    Attributes:
        tokens: The tokens; empty if there is no draft.
        probability: Estimated probability that a token is right, if all before it are.
    """

    tokens: Sequence[int]
    probability: float

    def gain(self, most: int) -> float:
        """Expected number of tokens, besides the usual one, of a step that verifies up to ``most`` of the draft."""
        fed, p = min(most, len(self.tokens)), self.probability
        return fed if p == 1 else p * (1 - p**fed) / (1 - p)


NO_DRAFT = Draft((), 0.0)


class PromptLookup:
    """The n-grams of one sequence, each with the position after its last occurrence; and how often drafts were right.

    Every draft is compared with the tokens that follow, whether it was verified or not. So a text that begins to repeat
    is noticed before any step tries a draft.

    Args:
        tokens: The sequence's tokens, in a list to which its owner appends.
        prediction: Tokens that may follow them; drafts come from there first.
    """

    def __init__(self, tokens: list[int], prediction: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._prediction = Prediction(prediction) if prediction else None
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in NGRAMS}
        self._indexed = 0
        self._draft: list[int] = []
        self._match = 0  # length of the match that gave the draft
        self._repeated = -RECENT  # position at which the last repeated passage ended
        self._probability = [0.5] * (PREDICTED + 1)  # by length of the match
        self._trials = [2] * (PREDICTED + 1)
        self._index()

    @property
    def repeats(self) -> bool:
        """Whether the text repeated a passage less than :data:`RECENT` tokens ago."""
        return len(self._tokens) - self._repeated < RECENT

    @property
    def predicted(self) -> bool:
        """Whether the last draft came from the prediction."""
        return self._match == PREDICTED

    def propose(self, most: int) -> Draft:
        """A draft of ``most`` tokens, fewer at the prediction's end; no draft if the last tokens never occurred
        before."""
        self._compare()
        if self._prediction is not None:
            self._prediction.follow(self._tokens[self._indexed :])
        self._index()
        if self._prediction is not None and (draft := self._prediction.draft(self._tokens, most)):
            self._draft, self._match = draft, PREDICTED
            return Draft(draft, self._probability[PREDICTED])
        tokens, end = self._tokens, len(self._tokens)
        for n in NGRAMS:
            after = self._after[n].get(tuple(tokens[-n:]))
            if after is not None:
                break
        else:
            self._draft = []
            return NO_DRAFT
        self._match = n
        while self._match < min(MAX_MATCH, after) and tokens[after - 1 - self._match] == tokens[end - 1 - self._match]:
            self._match += 1
        self._draft = tokens[after : after + most]
        while len(self._draft) < most:  # the draft reaches the text's end: assume that the text loops
            self._draft += self._draft[: most - len(self._draft)]
        return Draft(self._draft, self._probability[self._match])

    def _compare(self) -> None:
        """Compare the last draft with the tokens that followed."""
        hits = 0
        for token, drafted in zip(self._tokens[self._indexed :], self._draft, strict=False):
            hit = token == drafted
            hits += hit
            self._probability[self._match] += (hit - self._probability[self._match]) / self._trials[self._match]
            self._trials[self._match] = min(MAX_TRIALS, self._trials[self._match] + 1)
            if not hit:
                break
        if hits >= MIN_REPEATED:
            self._repeated = self._indexed + hits

    def _index(self) -> None:
        """Record the position after each n-gram that is followed by a new token."""
        tokens, end = self._tokens, len(self._tokens)
        while self._indexed < end:
            until = min(end, self._indexed + INDEX_BATCH)
            for n, after in self._after.items():
                first = max(self._indexed, n)
                grams = (tokens[first - n + i : max(first, until) - n + i] for i in range(n))
                after.update(zip(zip(*grams, strict=True), range(first, until), strict=True))
            self._indexed = until


def accepted_count(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Number of sampled tokens to accept: those that agree with the draft, and the first one after them."""
    return next((i + 1 for i, token in enumerate(draft) if token != sampled[i]), len(draft) + 1)
