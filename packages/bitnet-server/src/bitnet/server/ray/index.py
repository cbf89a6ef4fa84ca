"""The index of all replicas' KV caches: replicas publish to it, and ingresses follow it for their routers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bitnet.server.ray.gauges import Readings
from bitnet.server.ray.holders import Holders
from bitnet.server.ray.summary import Change, Summary
from bitnet.server.ray.work import Held, State

PERIOD_SECONDS = 0.25
"""Seconds between two messages of a replica, and between two questions of an ingress."""
SILENT_SECONDS = 30.0
"""Seconds of silence after which a replica is forgotten."""


@dataclass(frozen=True, slots=True)
class Update:
    """What has changed about a replica.

    Attributes:
        held: Its models.
        age: Seconds since its last message.
    """

    held: Held
    change: Change
    age: float


class Index:
    """Mirrors of the replicas' summaries, and their states.

    It is a deployment of one replica that needs no CPU of its own. Nothing is lost with it: the replicas publish all
    they hold to its successor, and routers go by load until then.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._summaries: dict[str, Summary] = {}
        self._held: dict[str, tuple[Held, float]] = {}

    async def publish(self, replica: str, held: Held, change: Change) -> int:
        """Take a replica's message.

        Returns:
            The version that is known now; the replica sends what has changed since that one.
        """
        now = self._clock()
        for other in [one for one, (_, seen) in self._held.items() if now - seen > SILENT_SECONDS]:
            del self._held[other], self._summaries[other]
        self._held[replica] = held, now
        summary = self._summaries.setdefault(replica, Summary())
        summary.apply(change)
        return summary.version

    async def poll(self, versions: Mapping[str, int]) -> dict[str, Update]:
        """What has changed since the versions that a mirror has."""
        now = self._clock()
        return {
            replica: Update(held, self._summaries[replica].since(versions.get(replica, 0)), now - seen)
            for replica, (held, seen) in self._held.items()
        }


class Mirror:
    """A copy of the index, with the age of each replica's part.

    Attributes:
        holders: Which replicas hold which blocks.
        readings: What the replicas last said of themselves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.holders = Holders()
        self.readings: list[Readings] = []
        self._summaries: dict[str, Summary] = {}
        self._seen: dict[str, float] = {}
        self._states: list[State] = []
        self._models: dict[str, frozenset[int]] = {}

    def states(self, deployment: str, model: str) -> list[State]:
        """What the replicas of a deployment last said of a model."""
        return [one for one in self._states if (one.facts.deployment, one.facts.model) == (deployment, model)]

    def models(self, replica: str) -> frozenset[int]:
        """Hashes of the models that a replica has, or is loading."""
        return self._models.get(replica, frozenset())

    def versions(self) -> dict[str, int]:
        return {replica: summary.version for replica, summary in self._summaries.items()}

    def update(self, updates: Mapping[str, Update]) -> None:
        """Take over an answer of :meth:`Index.poll`."""
        for replica in self._summaries.keys() - updates.keys():
            self.holders.remove(replica, self._summaries.pop(replica).hashes)
        for replica, one in updates.items():
            summary = self._summaries.setdefault(replica, Summary())
            before = summary.hashes
            if not summary.apply(one.change):
                self._summaries[replica] = Summary()  # the next answer has all
                self.holders.remove(replica, before)
            elif one.change.base is None:
                self.holders.remove(replica, before - summary.hashes)
                self.holders.add(replica, summary.hashes)
            else:
                self.holders.remove(replica, one.change.removed)
                self.holders.add(replica, one.change.added)
        self._seen = {replica: self._clock() - one.age for replica, one in updates.items()}
        self._states = [state for one in updates.values() for state in one.held.states]
        self.readings = [one.held.readings for one in updates.values()]
        self._models = {replica: one.held.models for replica, one in updates.items()}

    def seen(self, replica: str) -> float:
        """When a replica last said what it holds, on the clock; minus infinity if it never did."""
        return self._seen.get(replica, -math.inf)


MIRROR = Mirror()
"""This process's mirror: its ingress keeps it up to date, and its routers, which Serve makes, read it."""
