"""Prompts that begin alike: what one of them is computing, the others wait for rather than compute it, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bitnet.core.engine.sequence import TokenSequence

MIN_SHARED = 64
"""Positions of a common prefix for which a prompt waits. To wait costs it a step, whose fixed part takes as long as
some 64 tokens of a prompt on an H200 (docs/measurements/cuda.md)."""


class Leader(NamedTuple):
    """A running prompt whose KV blocks a waiting one is going to share.

    Attributes:
        length: Positions of the prefix that both have, in full blocks.
    """

    sequence: TokenSequence
    length: int

    @property
    def computing(self) -> bool:
        """Whether the prefix is still being computed. It is not if the prompt was cancelled or preempted, either."""
        placement = self.sequence.placement
        return placement.table is not None and placement.computed < self.length


def find_leader(
    sequence: TokenSequence, cached: int, running: Iterable[TokenSequence], block_size: int
) -> Leader | None:
    """The running prompt that computes most of what a waiting one needs.

    Args:
        cached: Positions of the waiting prompt that are in the cache.

    Returns:
        None if no prompt computes at least :data:`MIN_SHARED` positions more.
    """
    best, least = None, cached + MIN_SHARED
    for other in running:
        end = min(sequence.first_row, other.target - 1)
        if end >= least and other.placement.computed < end and sequence.tokens[:least] == other.tokens[:least]:
            length = _common(sequence, other, least // block_size * block_size, end, block_size)
            found = Leader(other, length)
            if length >= least and found.computing:
                best, least = found, length + 1
    return best


def _common(one: TokenSequence, other: TokenSequence, length: int, end: int, block_size: int) -> int:
    """Positions of full blocks up to ``end`` that two sequences have in common, of which ``length`` are known."""
    while length + block_size <= end:
        after = length + block_size
        if one.tokens[length:after] != other.tokens[length:after]:
            break
        length = after
    return length
