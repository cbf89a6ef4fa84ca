"""Where a sequence is in an engine: its device, its part of the KV cache, and its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitnet.core.engine.blocks import BlockTable
from bitnet.core.engine.states import SequenceStates


@dataclass(eq=False, slots=True)
class Placement:
    """The scheduler's state of one sequence. The engine replaces it when the sequence moves to another device.

    Attributes:
        device: Name of the device; empty before an engine has the sequence.
        max_logprobs: Maximum likeliest tokens whose log-probabilities the device can report; -1: it reports none.
        computed: Positions in the cache.
        table: Blocks of the cache; None while the sequence waits.
        states: Entries of the states of recurrent layers; None while the sequence waits, or without such layers.
        slot: Index of its penalty slot (:mod:`bitnet.core.engine.penalty_slots`).
    """

    device: str = ""
    max_logprobs: int = -1
    computed: int = 0
    table: BlockTable | None = None
    states: SequenceStates | None = None
    slot: int | None = None

    @property
    def tables(self) -> Sequence[Sequence[int]]:
        """The blocks of the cache in order of position, in each block table."""
        return self.table.tables if self.table else ((),)
