"""A simulation: conversations against replicas, with a router between them, and perhaps a node that fails."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from bitnet.server.ray.holders import Holders
from cluster_model.replica import Job, Lost, Replica, Speed
from cluster_model.routing import Router
from cluster_model.traces import BLOCK, Conversation


@dataclass(frozen=True, slots=True)
class Failure:
    """Replicas that are lost together.

    Attributes:
        at: Seconds.
        share: Share of the replicas.
    """

    at: float
    share: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a simulation.

    Attributes:
        ttft: Seconds to the first token of each request that was answered.
        cached, prompts: Tokens of prompts that were cached, and of all.
        tokens: Generated tokens of answers that are complete.
        goodput: Answers a second whose first token came within the limit.
        lost: Streams that ended early with their replica.
        repeated: Requests that were sent again, as their replica was lost before they began to stream.
    """

    ttft: np.ndarray[Any, np.dtype[np.float64]]
    seconds: float
    cached: int
    prompts: int
    tokens: int
    goodput: float
    lost: int
    repeated: int

    @property
    def hits(self) -> float:
        """Share of the prompts' tokens that were cached."""
        return self.cached / max(1, self.prompts)


def simulate(
    conversations: Sequence[Conversation],
    replicas: int,
    speed: Speed,
    way: str,
    rng: random.Random,
    *,
    limit: float = 1.0,
    failure: Failure | None = None,
) -> Outcome:
    """Run conversations to their end.

    Args:
        limit: Seconds to the first token within which an answer is good.
    """
    environment = simpy.Environment()
    known = Holders()
    pool = [Replica(environment, str(i), speed, known) for i in range(replicas)]
    cluster = _Cluster(environment, pool, Router(way, speed, rng, known), known)
    ends = [environment.process(cluster.talk(one)) for one in conversations]
    if failure is not None:
        environment.process(cluster.fail(failure))
    environment.run(environment.all_of(ends))
    return cluster.outcome(limit)


class _Cluster:
    def __init__(self, environment: simpy.Environment, pool: list[Replica], router: Router, known: Holders) -> None:
        self._environment, self._pool, self._router, self._known = environment, pool, router, known
        self._answered: list[Job] = []
        self._lost = self._repeated = self._requests = 0

    def talk(self, conversation: Conversation) -> Generator[simpy.Event, Any, None]:
        yield self._environment.timeout(conversation.start)
        for turn in conversation.turns:
            yield self._environment.timeout(turn.pause)
            sent = self._environment.now
            while True:
                self._requests += 1
                request = str(self._requests)
                replica = self._router.choose(self._pool, conversation.key, turn)
                cached = self._known.leading(turn.blocks).get(replica.name, 0) * BLOCK
                self._router.loads.begin(request, replica.name, self._router.work(turn, cached))
                job = Job(turn, sent, self._environment.event())
                replica.send(job)
                try:
                    yield job.done
                    self._answered.append(job)
                except Lost:
                    if job.first is None:
                        self._repeated += 1
                        continue
                    self._lost += 1
                finally:
                    self._router.loads.end(request)
                break

    def fail(self, failure: Failure) -> Generator[simpy.Event, Any, None]:
        yield self._environment.timeout(failure.at)
        count = max(1, round(failure.share * len(self._pool)))
        lost, self._pool = self._pool[:count], self._pool[count:]
        for replica in lost:
            replica.fail()

    def outcome(self, limit: float) -> Outcome:
        ttft = np.array([job.first - job.sent for job in self._answered if job.first is not None])
        seconds = float(self._environment.now)
        return Outcome(
            ttft=ttft,
            seconds=seconds,
            cached=sum(job.cached for job in self._answered),
            prompts=sum(job.turn.prompt for job in self._answered),
            tokens=sum(job.turn.output for job in self._answered),
            goodput=float((ttft <= limit).sum()) / seconds,
            lost=self._lost,
            repeated=self._repeated,
        )
