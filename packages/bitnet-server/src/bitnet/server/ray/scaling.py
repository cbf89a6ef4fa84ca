"""How many replicas a model needs: by places, waiting prompt tokens and KV cache, with hysteresis.

This module knows nothing of Ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitnet.core import Load

WAITING_TOKENS = 4096
"""Waiting prompt tokens that are worth one more replica."""
KV_SHARE = 0.9
"""Share of its KV cache that a replica should use at most: beyond it, requests are preempted."""
SLACK = 0.7
"""Share of what one replica less could do, below which there are too many."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a replica, or an average one, has to do.

    Attributes:
        running: Requests that are computed, by its places.
        waiting_tokens: Prompt tokens that wait.
        kv: Share of its KV cache that requests hold.
    """

    running: float
    waiting_tokens: float
    kv: float

    @classmethod
    def of(cls, load: Load, places: int) -> Use:
        """That of a load."""
        return cls(load.running / places, float(load.waiting_tokens), load.kv_used / max(1, load.kv_blocks))

    @classmethod
    def together(cls, uses: Sequence[Use]) -> Use:
        """That of a replica with several models: their work is added up, and the fullest of their caches counts."""
        return cls(
            sum(use.running for use in uses),
            sum(use.waiting_tokens for use in uses),
            max((use.kv for use in uses), default=0.0),
        )

    def metrics(self) -> dict[str, float]:
        """It as numbers by name."""
        return asdict(self)

    @classmethod
    def read(cls, metrics: dict[str, Any]) -> Use:
        """That of :meth:`metrics`; what is missing is 0."""
        return cls(*(float(metrics.get(name, 0.0)) for name in cls.__dataclass_fields__))


def needed(uses: Sequence[Use], queued: float, places: int) -> float:
    """The number of replicas that could do all work with nothing left over.

    Args:
        queued: Requests that no replica has yet.
        places: Requests that a replica computes at the same time.
    """
    waiting = max(sum(use.waiting_tokens for use in uses) / WAITING_TOKENS, queued / places)
    return max(sum(use.running for use in uses) + waiting, sum(use.kv for use in uses) / KV_SHARE)


def wanted(replicas: int, need: float) -> int:
    """The number of replicas to have, which changes only if there are clearly too few or too many.

    Args:
        replicas: How many there are.
        need: As :func:`needed` has it.
    """
    if need > replicas:
        return math.ceil(need)
    if replicas == 1:
        return 1 if need > 0 else 0
    return replicas - 1 if need < SLACK * (replicas - 1) else replicas
