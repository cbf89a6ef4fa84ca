"""Which drafts a step verifies: those that the text promises, or those that a draft layer makes, or none."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bitnet.core.engine.drafter import Drafter
from bitnet.core.engine.pacing import DRAFT_SIZES, DraftOption, Pace
from bitnet.core.engine.prompt_lookup import NO_DRAFT, Draft
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.hal import Limits


def _keeps_its_entry(sequence: TokenSequence) -> bool:
    """Whether the next step of a sequence reads no snapshot."""
    states = sequence.placement.states
    return states is None or states.source == states.entry


class Drafts:
    """Chooses the drafts of steps.

    Args:
        drafter: Makes drafts with a draft layer, if there is one.

    Attributes:
        making: Seconds that it took to make the last drafts.
    """

    def __init__(self, limits: Limits, pace: Pace, drafter: Drafter | None) -> None:
        self._most, self._pace, self._drafter = min(limits.max_rows, limits.max_tokens), pace, drafter
        self.making = 0.0

    def at_hand(self, sequences: Sequence[TokenSequence]) -> list[Sequence[int]]:
        """Drafts from text to feed decoding sequences besides their next tokens; empty if none are worth feeding."""
        drafts = self._looked_up(sequences)
        if not any(draft.tokens for draft in drafts):
            return []
        size = self._pace.drafts.choose(drafts, self._most - len(sequences))
        return [draft.tokens[:size] for draft in drafts] if size else []

    def made(self, sequences: Sequence[TokenSequence]) -> list[Sequence[int]]:
        """As :meth:`at_hand`, but the draft layer makes drafts where they promise more tokens a second."""
        self.making = 0.0
        if self._drafter is None:
            return self.at_hand(sequences)
        looked_up, drafter, costs = self._looked_up(sequences), self._drafter, self._pace.drafts
        if not looked_up:
            return []
        budget, better = self._most - len(sequences), list(looked_up)
        for i, expected in enumerate(drafter.expected(sequences)):
            sequence = sequences[i]
            gains = expected.gain(budget) > looked_up[i].gain(budget)
            sequence.layer_draft = gains and _keeps_its_entry(sequence)
            if sequence.layer_draft:
                better[i] = expected
        by_layer = [sequence for sequence in sequences if sequence.layer_draft]
        rooms = [len(draft.tokens) for sequence, draft in zip(sequences, better, strict=True) if sequence.layer_draft]
        options = [DraftOption(looked_up)]
        if by_layer:
            options.append(DraftOption(better, costs.making(len(by_layer))))
        which, size = costs.choose_from(options, budget)
        if not which:
            drafter.passed_over()
            for sequence in by_layer:
                sequence.layer_draft = False
            return [draft.tokens[:size] for draft in looked_up] if size else []
        began = time.perf_counter()
        longest = min(size, max(rooms))
        made = zip(drafter.draft(by_layer, longest), rooms, strict=True)
        drafts = {sequence: draft[:room] for sequence, (draft, room) in zip(by_layer, made, strict=True)}
        self.making = time.perf_counter() - began
        costs.made(len(by_layer), longest, self.making)
        found = [drafts.get(sequence, draft.tokens[:size]) for sequence, draft in zip(sequences, better, strict=True)]
        return found if any(found) else []

    def _looked_up(self, sequences: Sequence[TokenSequence]) -> list[Draft]:
        """The drafts that text promises, one for each sequence; none at all if a step has no room for them."""
        if self._most < 2 * len(sequences):  # looking for drafts takes time, too
            return []
        return [sequence.draft(DRAFT_SIZES[-1]) if _keeps_its_entry(sequence) else NO_DRAFT for sequence in sequences]
