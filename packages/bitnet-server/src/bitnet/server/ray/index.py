"""The index of all replicas' KV caches: replicas publish to it, and ingresses follow it for their routers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bitnet.server.ray.summary import Change, Summary
from bitnet.server.ray.work import State

PERIOD_SECONDS = 0.25
"""Seconds between two messages of a replica, and between two questions of an ingress."""
SILENT_SECONDS = 30.0
"""Seconds of silence after which a replica is forgotten."""


@dataclass(frozen=True, slots=True)
class Update:
    """What has changed about a replica.

    Attributes:
        age: Seconds since its last message.
    """

    state: State
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
        self._states: dict[str, tuple[State, float]] = {}

    async def publish(self, state: State, change: Change) -> int:
        """Take a replica's message.

        Returns:
            The version that is known now; the replica sends what has changed since that one.
        """
        replica, now = state.facts.replica, self._clock()
        for other in [one for one, (_, seen) in self._states.items() if now - seen > SILENT_SECONDS]:
            del self._states[other], self._summaries[other]
        self._states[replica] = state, now
        summary = self._summaries.setdefault(replica, Summary())
        summary.apply(change)
        return summary.version

    async def poll(self, versions: Mapping[str, int]) -> dict[str, Update]:
        """What has changed since the versions that a mirror has."""
        now = self._clock()
        return {
            replica: Update(state, self._summaries[replica].since(versions.get(replica, 0)), now - seen)
            for replica, (state, seen) in self._states.items()
        }


class Mirror:
    """A copy of the index, with the age of each replica's part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._summaries: dict[str, Summary] = {}
        self._seen: dict[str, float] = {}
        self._states: list[State] = []

    def states(self, deployment: str) -> list[State]:
        """What the replicas of a deployment last said of themselves."""
        return [state for state in self._states if state.facts.deployment == deployment]

    def versions(self) -> dict[str, int]:
        return {replica: summary.version for replica, summary in self._summaries.items()}

    def update(self, updates: Mapping[str, Update]) -> None:
        """Take over an answer of :meth:`Index.poll`."""
        self._summaries = {replica: self._summaries.get(replica, Summary()) for replica in updates}
        for replica, one in updates.items():
            if not self._summaries[replica].apply(one.change):
                self._summaries[replica] = Summary()  # the next answer has all
        self._seen = {replica: self._clock() - one.age for replica, one in updates.items()}
        self._states = [one.state for one in updates.values()]

    def hashes(self, replica: str, seconds: float) -> set[int] | None:
        """What a replica holds; None: it is not known, or its last message is older than this."""
        if replica not in self._seen or self._clock() - self._seen[replica] > seconds:
            return None
        return self._summaries[replica].hashes


MIRROR = Mirror()
"""This process's mirror: its ingress keeps it up to date, and its routers, which Serve makes, read it."""
