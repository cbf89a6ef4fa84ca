"""A simulation: conversations against replicas, with a router between them, and perhaps a node that fails."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import simpy

from bitnet.server.ray.gauges import Readings
from bitnet.server.ray.index import PERIOD_SECONDS, Mirror, Update
from bitnet.server.ray.work import Held
from cluster_model.autoscaling import Decision, Scale
from cluster_model.replica import Job, Lost, Replica, Speed
from cluster_model.routing import Asked, Router
from cluster_model.traces import Conversation

HELD = Held((), Readings("", "", "", 0.0, 0.0, 0.0))


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
        replicas: Times in seconds at which the number of replicas changed, and the number from then on.
        busy: Seconds for which replicas were there, added up.
    """

    ttft: np.ndarray[Any, np.dtype[np.float64]]
    seconds: float
    cached: int
    prompts: int
    tokens: int
    goodput: float
    lost: int
    repeated: int
    replicas: list[tuple[float, int]]
    busy: float

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
    delay: float = 0.0,
    failure: Failure | None = None,
    scale: Scale | None = None,
) -> Outcome:
    """Run conversations to their end.

    Args:
        replicas: Number of replicas, at first if ``scale`` is given.
        limit: Seconds to the first token within which an answer is good.
        delay: Seconds that a request takes to reach its replica.
    """
    environment = simpy.Environment()
    cluster = _Cluster(environment, replicas, speed, way, rng, delay)
    ends = [environment.process(cluster.talk(one)) for one in conversations]
    if failure is not None:
        environment.process(cluster.fail(failure))
    if scale is not None:
        environment.process(cluster.follow(scale, speed.places))
    environment.run(environment.all_of(ends))
    return cluster.outcome(limit)


class _Cluster:
    def __init__(
        self, environment: simpy.Environment, replicas: int, speed: Speed, way: str, rng: random.Random, delay: float
    ) -> None:
        self._environment, self._speed, self._delay = environment, speed, delay
        self._mirror = Mirror(lambda: environment.now)
        self._router = Router(way, speed, rng, self._mirror, lambda: environment.now)
        self._pool: list[Replica] = []
        self._answered: list[Job] = []
        self._lost = self._repeated = self._requests = self._started = 0
        self._counts: list[tuple[float, int]] = []
        self._change(replicas)
        environment.process(self._publish())

    def _change(self, more: int) -> None:
        for _ in range(more):
            self._pool.append(Replica(self._environment, str(self._started), self._speed))
            self._started += 1
        self._counts.append((self._environment.now, len(self._pool)))

    def _publish(self) -> Generator[simpy.Event, Any, None]:
        """Replicas say what they hold as often as the server's do, and the mirror hears of it at once."""
        while True:
            self._mirror.update({one.name: Update(HELD, one.message(), 0.0) for one in self._pool})
            yield self._environment.timeout(PERIOD_SECONDS)

    def follow(self, scale: Scale, places: int) -> Generator[simpy.Event, Any, None]:
        """Let the number of replicas follow the load."""
        decision = Decision(scale, places)
        while True:
            yield self._environment.timeout(1.0)
            change = decision.second([one.use for one in self._pool])
            if change > 0:
                self._environment.process(self._start(scale.start, change))
            elif change < 0:  # they finish what they have
                del self._pool[change:]
                self._change(0)

    def _start(self, seconds: float, count: int) -> Generator[simpy.Event, Any, None]:
        yield self._environment.timeout(seconds)
        self._change(count)

    def talk(self, conversation: Conversation) -> Generator[simpy.Event, Any, None]:
        yield self._environment.timeout(conversation.start)
        dispatch = self._router.dispatch
        for turn in conversation.turns:
            yield self._environment.timeout(turn.pause)
            sent = self._environment.now
            while True:
                self._requests += 1
                asked = Asked.of(str(self._requests), conversation.key, turn)
                replica = self._router.choose(self._pool, asked)
                dispatch.begin(asked.id, replica.name, asked.work)
                job = Job(turn, sent, self._environment.event())
                if self._delay:
                    yield self._environment.timeout(self._delay)
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
                    dispatch.end(asked.id)
                break

    def fail(self, failure: Failure) -> Generator[simpy.Event, Any, None]:
        yield self._environment.timeout(failure.at)
        count = max(1, round(failure.share * len(self._pool)))
        lost, self._pool = self._pool[:count], self._pool[count:]
        for replica in lost:
            replica.fail()
        self._change(0)

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
            replicas=self._counts,
            busy=sum((end - start) * count for (start, count), (end, _) in pairwise([*self._counts, (seconds, 0)])),
        )
