"""Which replica gets a request: at random, by load, by a hash of the conversation, or as the server's router has it."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from bitnet.server.ray.holders import Holders
from bitnet.server.ray.scoring import BETA, Candidate, Loads, rank
from bitnet.server.ray.work import EXPECTED_TOKENS
from cluster_model.replica import Replica, Speed
from cluster_model.traces import BLOCK, Turn

Choose = Callable[[Sequence[Replica], int, Turn], Replica]
"""Chooses a replica for a turn of the conversation with a key."""
POINTS = 64
"""Points of a replica on the ring of consistent hashing."""


class Router:
    """A way to choose, and the work that it has given out.

    Args:
        way: One of :data:`WAYS`.
        known: Which replicas hold which blocks, or will soon.
    """

    def __init__(self, way: str, speed: Speed, rng: random.Random, known: Holders) -> None:
        self._choose, self._rng, self._places, self._known = WAYS[way], rng, speed.places, known
        self.loads = Loads()
        self._ring: tuple[tuple[str, ...], list[tuple[int, int]]] = ((), [])

    def choose(self, replicas: Sequence[Replica], key: int, turn: Turn) -> Replica:
        return self._choose(self, replicas, key, turn)

    def at_random(self, replicas: Sequence[Replica], key: int, turn: Turn) -> Replica:
        return self._rng.choice(replicas)

    def least_loaded(self, replicas: Sequence[Replica], key: int, turn: Turn) -> Replica:
        return min(replicas, key=lambda one: (self.loads.of(one.name), self._rng.random()))

    def by_hash(self, replicas: Sequence[Replica], key: int, turn: Turn) -> Replica:
        names = tuple(one.name for one in replicas)
        if self._ring[0] != names:
            points = sorted((_digest(f"{name}/{p}"), i) for i, name in enumerate(names) for p in range(POINTS))
            self._ring = names, points
        points = self._ring[1]
        at = bisect.bisect(points, (_digest(str(key)), 0)) % len(points)
        return replicas[points[at][1]]

    def by_prefix(self, replicas: Sequence[Replica], key: int, turn: Turn) -> Replica:
        held = self._known.leading(turn.blocks)
        candidates = [Candidate(one.name, held.get(one.name, 0) * BLOCK, self.loads.of(one.name)) for one in replicas]
        full = self._places * self.loads.typical
        choices = rank(candidates, turn.prompt, full_load=full, beta=BETA, draw=self._rng.random)
        by_name = {one.name: one for one in replicas}
        return by_name[choices[0].name]

    def work(self, turn: Turn, cached: int) -> float:
        """The tokens of work that a turn counts as."""
        return max(0, turn.prompt - cached) + EXPECTED_TOKENS


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


WAYS: dict[str, Callable[[Router, Sequence[Replica], int, Turn], Replica]] = {
    "random": Router.at_random,
    "least loaded": Router.least_loaded,
    "consistent hashing": Router.by_hash,
    "prefix": Router.by_prefix,
}
