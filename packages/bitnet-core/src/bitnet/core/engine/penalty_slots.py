"""Penalty slots: device memory for a sequence's penalties and biases, so that logits are not copied to the host."""

from __future__ import annotations

from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.hal import Executable


class PenaltySlots:
    """Assigns slots to sequences. A slot is free once its sequence has ended or released its cache.

    Args:
        count: Number of slots.
        vocab_size: Length V of the arrays that a slot holds.
    """

    def __init__(self, executable: Executable, count: int, vocab_size: int) -> None:
        self._executable, self._vocab_size = executable, vocab_size
        self._owners: list[TokenSequence | None] = [None] * count

    def claim(self, sequence: TokenSequence) -> None:
        """Give a sequence that wants a slot one, if any is free, and bring it up to date."""
        if sequence.placement.slot is None:
            sequence.placement.slot = next((i for i, owner in enumerate(self._owners) if self._is_free(i, owner)), None)
            if sequence.placement.slot is None:
                return
            previous = self._owners[sequence.placement.slot]
            if previous is not None and previous.placement.slot == sequence.placement.slot:
                previous.placement.slot = None
            self._owners[sequence.placement.slot] = sequence
        elif not sequence.slot_is_stale:
            return
        self._executable.fill_slot(sequence.placement.slot, *sequence.slot_contents(self._vocab_size))

    @staticmethod
    def _is_free(slot: int, owner: TokenSequence | None) -> bool:
        return owner is None or owner.finished or owner.placement.table is None or owner.placement.slot != slot
