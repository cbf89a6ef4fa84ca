"""Which replica gets a request: at random, by load, by a hash of the conversation, or as the server's router has it."""

from __future__ import annotations

import bisect
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from bitnet.server.ray.dispatch import Dispatch
from bitnet.server.ray.index import Mirror
from bitnet.server.ray.work import Work
from cluster_model.replica import Replica, Speed
from cluster_model.traces import BLOCK, Turn


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn on its way to a replica.

    Attributes:
        id: The request's.
        key: The conversation's.
        work: What the server's router sees of it.
    """

    id: str
    key: int
    work: Work

    @classmethod
    def of(cls, id: str, key: int, turn: Turn) -> Asked:
        """Make the request of a turn."""
        about = Work.embedding([array("i", bytes(4 * turn.prompt))], 0)
        return cls(id, key, replace(about, options={}, blocks=turn.blocks, block_size=BLOCK))


Choose = Callable[[Sequence[Replica], Asked], Replica]
"""Chooses a replica for a request."""
POINTS = 64
"""Points of a replica on the ring of consistent hashing."""


class Router:
    """A way to choose, and what it has sent.

    Args:
        way: One of :data:`WAYS`.
        mirror: What replicas said last.
    """

    def __init__(self, way: str, speed: Speed, rng: random.Random, mirror: Mirror, clock: Callable[[], float]) -> None:
        self._choose, self._rng = WAYS[way], rng
        self.dispatch = Dispatch(mirror, speed.places, clock=clock, draw=rng.random)
        self._ring: tuple[tuple[str, ...], list[tuple[int, int]]] = ((), [])

    def choose(self, replicas: Sequence[Replica], asked: Asked) -> Replica:
        return self._choose(self, replicas, asked)

    def at_random(self, replicas: Sequence[Replica], asked: Asked) -> Replica:
        return self._rng.choice(replicas)

    def least_loaded(self, replicas: Sequence[Replica], asked: Asked) -> Replica:
        return min(replicas, key=lambda one: (self.dispatch.loads.of(one.name), self._rng.random()))

    def by_hash(self, replicas: Sequence[Replica], asked: Asked) -> Replica:
        names = tuple(one.name for one in replicas)
        if self._ring[0] != names:
            points = sorted((_digest(f"{name}/{p}"), i) for i, name in enumerate(names) for p in range(POINTS))
            self._ring = names, points
        points = self._ring[1]
        at = bisect.bisect(points, (_digest(str(asked.key)), 0)) % len(points)
        return replicas[points[at][1]]

    def by_prefix(self, replicas: Sequence[Replica], asked: Asked) -> Replica:
        by_name = {one.name: one for one in replicas}
        return by_name[self.dispatch.choose(by_name.keys(), asked.id, asked.work)[0].name]


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


WAYS: dict[str, Callable[[Router, Sequence[Replica], Asked], Replica]] = {
    "random": Router.at_random,
    "least loaded": Router.least_loaded,
    "consistent hashing": Router.by_hash,
    "prefix": Router.by_prefix,
}
