"""Drafts by a model's own extra layer: its executable, its cache, and how often it is right (ADR 0123).

The layer continues the target's hidden states, so it can begin at any token whose hidden state is at hand: those that
had a row in the last step. Its cache holds the tokens since then, at positions of its own from 0 on. It is never
shared, and begins anew whenever a token is missing in between, as after several passes or a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.prompt_lookup import MAX_TRIALS, NO_DRAFT, Draft
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.hal import Executable, KVSpec, Limits, SequenceStep, Step, StepLayout, run

MAX_LAYER_DRAFT = 7
"""Maximum tokens of a layer's draft: each is computed from the one before, and errors add up."""
MAX_POSITIONS = 2048
"""Maximum positions of a sequence in the layer's cache; it then begins anew."""
OPTIMISM = 1 / 1024
"""Share by which the probability for new sequences rises towards 1 each time that the layer is passed over. So a layer
that was wrong for a while is tried again some day."""


@dataclass(slots=True)
class _Followed:
    """A sequence in the layer's cache.

    Attributes:
        slot: Its number among the sequences of the cache, which has blocks for each.
        length: Its tokens in the cache, without drafted ones.
        end: Number of the sequence's tokens up to the last one of them.
        drafted: The last draft, which began after ``end`` tokens, if it was not compared with later tokens yet.
        probability: Estimated probability that a drafted token is right, if all before it are.
        trials: Drafted tokens over which it is averaged, plus 1.
    """

    slot: int
    probability: float
    length: int = 0
    end: int = -1
    drafted: list[int] = field(default_factory=list)
    trials: int = 2


class Drafter:
    """Makes drafts with a draft layer.

    Args:
        executable: Of a program of :func:`~bitnet.core.model.draft.build_draft_program`.
        target: The model's executable, whose program has the tensor ``hidden``.
        limits, kv: Of the layer's program; the cache has ``max_blocks`` for each of ``max_seqs`` sequences.
    """

    def __init__(self, executable: Executable, target: Executable, *, limits: Limits, kv: KVSpec) -> None:
        self.executable, self._target = executable, target
        self._layout, self._block_size, self._blocks = StepLayout(limits), kv.block_size, limits.max_blocks
        self._free = list(range(limits.max_seqs))
        self._followed: dict[TokenSequence, _Followed] = {}
        self._probability = 0.5  # of new sequences
        self._rows: dict[TokenSequence, range] = {}  # of the last step, those of each sequence's newest tokens
        self._read = 0  # number of rows of the last step

    def next_rows(self, count: int) -> None:
        """The target has run a pass with ``count`` rows; :meth:`accepted` says what became of them."""
        self._rows.clear()
        self._read = count

    def accepted(self, sequence: TokenSequence, rows: range, tokens: Sequence[int]) -> None:
        """A sequence has accepted ``tokens``, which were sampled from the last pass's first ``rows``."""
        count = min(len(rows), len(tokens))
        if sequence.tokens[-count:] == list(tokens[-count:]):  # not so if it chose otherwise, or cut them off
            self._rows[sequence] = rows[:count]
        if (followed := self._followed.get(sequence)) is not None:
            self._compare(followed, sequence.tokens)

    def expected(self, sequences: Sequence[TokenSequence]) -> list[Draft]:
        """What drafts of these sequences would be worth: each has some numbers in the place of tokens. None is expected
        where a sequence's last hidden state is not at hand."""
        for sequence in [s for s in self._followed if s not in sequences]:
            self._free.append(self._followed.pop(sequence).slot)
        drafts = []
        for sequence in sequences:
            room = sequence.draft_room(MAX_LAYER_DRAFT) if sequence in self._rows else 0
            followed = self._followed.get(sequence)
            probability = self._probability if followed is None else followed.probability
            drafts.append(Draft(range(room), probability) if room > 0 else NO_DRAFT)
        return drafts

    def passed_over(self) -> None:
        """The layer was not worth its time."""
        self._probability += (1 - self._probability) * OPTIMISM
        for followed in self._followed.values():
            followed.probability += (1 - followed.probability) * OPTIMISM

    def draft(self, sequences: Sequence[TokenSequence], size: int) -> list[list[int]]:
        """Drafts of ``size`` tokens for sequences of which :meth:`expected` expects some; fewer if logits are NaN."""
        hidden, parts = self._target.read("hidden", self._read), []
        for sequence in sequences:
            rows = self._rows[sequence]
            parts.append((self._follow(sequence, len(rows), size), sequence.tokens[-len(rows) :], rows))
        self.executable.write("state", np.concatenate([hidden[rows.start : rows.stop] for _, _, rows in parts]))
        fed = [tokens for _, tokens, _ in parts]
        # A pass leaves the states for the next one, so the device drafts as far as it is fed one token of each.
        drawn = self._passes(parts, fed, 0, size if max(map(len, fed)) == 1 else 1)
        if len(drawn) < size and drawn.min() >= 0:
            again = self._passes(parts, drawn[-1:].T.tolist(), len(drawn), size - len(drawn))
            drawn = np.concatenate([drawn, again])
        valid = int((drawn >= 0).all(axis=1).cumprod().sum())
        drafts: list[list[int]] = drawn[:valid].T.tolist()
        for (followed, _, _), draft in zip(parts, drafts, strict=True):
            followed.drafted = draft
        return drafts

    def _passes(
        self, parts: Sequence[tuple[_Followed, list[int], range]], fed: Sequence[list[int]], done: int, count: int
    ) -> npt.NDArray[np.int32]:
        """The tokens of ``count`` passes, ``int32[count, sequences]``, of which the first is fed ``fed`` after ``done``
        drafted tokens."""
        step = [
            SequenceStep(
                tokens,
                followed.length + done,
                range(followed.slot * self._blocks, (followed.slot + 1) * self._blocks),
                range(len(tokens) - 1, len(tokens)),
            )
            for (followed, _, _), tokens in zip(parts, fed, strict=True)
        ]
        return run(self.executable, Step(self._layout, step, block_size=self._block_size, logits=False), count)

    def _follow(self, sequence: TokenSequence, new: int, size: int) -> _Followed:
        """A sequence's part of the cache, with its ``new`` last tokens counted, and room for a draft behind them."""
        followed = self._followed.get(sequence)
        if followed is None:
            followed = self._followed[sequence] = _Followed(self._free.pop(), self._probability)
        if followed.end != len(sequence.tokens) - new or followed.length + new + size > self._blocks * self._block_size:
            followed.length = 0
        followed.length += new
        followed.end = len(sequence.tokens)
        return followed

    def _compare(self, followed: _Followed, tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that came instead."""
        for drafted, token in zip(followed.drafted, tokens[followed.end :], strict=False):
            hit = drafted == token
            followed.probability += (hit - followed.probability) / followed.trials
            followed.trials = min(MAX_TRIALS, followed.trials + 1)
            self._probability += (hit - self._probability) / MAX_TRIALS
            if not hit:
                break
        followed.drafted = []
