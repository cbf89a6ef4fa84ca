"""One of the engines behind a worker's queue, and the cost of sending it a request."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from bitnet.core.engine.engine import Engine
from bitnet.core.engine.sequence import TokenSequence

REQUEST_TOKENS = 256
"""Tokens of a prompt that weigh as much as one more request in a replica's batch: on an H200 (2B4T), 256 tokens of a
prompt and 64 decoded tokens of the 65th sequence both take about 2 ms."""


@dataclass(eq=False)
class PromptGroup:
    """Sequences of one prompt. They go to the same replica, since they share the prompt's cache.

    Attributes:
        digests: Digests of the prompt's full blocks, with which a replica's cache finds them.
    """

    sequences: list[TokenSequence]
    digests: tuple[bytes, ...]


@dataclass(eq=False)
class Replica:
    """An engine, the thread that steps it, and its requests.

    The worker's lock guards everything except the engine, which belongs to the thread.

    Attributes:
        held: Requests that have not ended, keyed by number.
        added: Requests that the thread has not yet passed to the engine.
        cancelled: Requests that the thread is to end.
        lost: Whether its device has failed.
    """

    engine: Engine
    thread: threading.Thread | None = None
    held: dict[int, TokenSequence] = field(default_factory=dict)
    added: list[PromptGroup] = field(default_factory=list)
    cancelled: list[TokenSequence] = field(default_factory=list)
    lost: bool = False

    @property
    def full(self) -> bool:
        """Whether it holds as many requests as it can run, plus one that waits for a place."""
        return len(self.held) > self.engine.limits.max_seqs

    @property
    def has_work(self) -> bool:
        """Whether there are requests to pass on, or steps to run."""
        return bool(self.added or self.cancelled or self.engine.busy)

    def cost(self, group: PromptGroup) -> int:
        """Prompt tokens to compute there before the first token of ``group``, plus :data:`REQUEST_TOKENS` per
        request."""
        prompt = len(group.sequences[0].tokens) - self.engine.cached(group.digests)
        begun = sum(max(0, s.target - s.placement.computed) for s in tuple(self.held.values()))
        return prompt + begun + REQUEST_TOKENS * len(self.held)

    def take(self, group: PromptGroup) -> None:
        """Give it a group."""
        self.held.update((sequence.number, sequence) for sequence in group.sequences)
        self.added.append(group)
