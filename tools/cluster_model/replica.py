"""An engine as the model has it: steps that take a measured time, places, prompts in chunks, and a cache of blocks."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from bitnet.core.engine.common_prefix import MIN_SHARED
from bitnet.core.engine.pacing import PROMPT_SECONDS
from bitnet.core.engine.scheduler import shares
from bitnet.server.ray.scaling import Use
from bitnet.server.ray.scoring import matched_tokens
from bitnet.server.ray.summary import Change
from cluster_model.traces import BLOCK, Turn


@dataclass(frozen=True, slots=True)
class Speed:
    """How long steps take, and what fits.

    Attributes:
        sequences, seconds: Measured seconds of a step of so many sequences; between them, times are interpolated.
        prompt_seconds: Seconds that each token of a prompt adds to a step.
        places: Maximum sequences of a step.
        chunk: Maximum tokens of a step.
        blocks: Blocks of the KV cache.
    """

    sequences: tuple[int, ...]
    seconds: tuple[float, ...]
    prompt_seconds: float
    places: int
    chunk: int
    blocks: int

    def step(self, sequences: int, prompt: int) -> float:
        """Seconds of a step."""
        return float(np.interp(sequences, self.sequences, self.seconds)) + prompt * self.prompt_seconds

    def prompts(self, decoding: int, rate: float) -> int:
        """Maximum tokens of prompts in a step, beside so many sequences that decode.

        Args:
            rate: Tokens a second of the last large step.
        """
        beside = max(self.chunk // 4, int(PROMPT_SECONDS * rate)) if decoding else self.chunk
        return min(self.chunk - decoding, beside)


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: times are seconds of the simulation.

    Attributes:
        uncached: Tokens of the prompt that are still to be computed.
        left: Tokens that are still to be generated.
        done: Succeeds when the answer is complete, and fails with :class:`Lost` if its replica is.
        leader: What it waits for: a job, and the tokens of a common prefix that this one computes.
    """

    turn: Turn
    sent: float
    done: simpy.Event
    cached: int = 0
    uncached: int = 0
    left: int = 0
    first: float | None = None
    leader: tuple[Job, int] | None = None

    @property
    def computed(self) -> int:
        """Tokens of the prompt that are in the cache, once the job runs."""
        return self.turn.prompt - self.uncached


class Lost(Exception):
    """The replica of a request has failed."""


class Replica:
    """A simulated engine.

    Attributes:
        name: Its index in the cluster.
    """

    def __init__(self, environment: simpy.Environment, name: str, speed: Speed) -> None:
        self.name, self._environment, self._speed = name, environment, speed
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._changed: set[int] = set()
        self._version = 0
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._work = environment.event()
        self._lost = False
        self._rate = 0.0
        environment.process(self._run())

    @property
    def jobs(self) -> list[Job]:
        """The requests that it has."""
        return [*self._waiting, *self._running]

    def send(self, job: Job) -> None:
        """Queue a request."""
        if self._lost:
            job.done.fail(Lost())
            return
        self._waiting.append(job)
        if not self._work.triggered:
            self._work.succeed()

    def message(self) -> Change:
        """How the blocks that it holds differ from those at the last message."""
        base, self._version = self._version, self._version + bool(self._changed)
        added = frozenset(block for block in self._changed if block in self._cache)
        change = Change(base, self._version, added, frozenset(self._changed - added))
        self._changed.clear()
        return change

    @property
    def use(self) -> Use:
        """What it has to do, as replicas tell the autoscaler."""
        waiting = sum(job.turn.prompt for job in self._waiting)
        held = sum(len(job.turn.blocks) for job in self._running)
        return Use(len(self._running) / self._speed.places, float(waiting), held / self._speed.blocks)

    def fail(self) -> None:
        """Lose the replica and all that it has."""
        self._lost = True
        for job in self.jobs:
            job.done.fail(Lost())
        self._waiting.clear()
        self._running.clear()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while not self._lost:
            if not self._running and not self._waiting:
                self._work = self._environment.event()
                yield self._work
            self._admit()
            decoding = [job for job in self._running if not job.uncached]
            computing = [job for job in self._running if job.uncached]
            budget = self._speed.prompts(len(decoding), self._rate)
            given = shares([job.uncached for job in computing], budget)
            prompts = [(job, count) for job, count in zip(computing, given, strict=True) if count]
            sequences, taken = len(decoding) + len(prompts), sum(count for _, count in prompts)
            seconds = self._speed.step(sequences, taken)
            if prompts and len(decoding) + taken >= self._speed.chunk // 4:
                self._rate = (len(decoding) + taken) / seconds
            steps = 1
            if prompts or self._waiting:
                yield self._environment.timeout(seconds)
            else:
                steps = yield from self._alike(seconds, min(job.left for job in decoding))
            if not self._lost:
                self._finish(decoding, prompts, steps)

    def _alike(self, seconds: float, most: int) -> Generator[simpy.Event, Any, int]:
        """Up to so many steps that differ in nothing, as one event; a request that comes ends them with a step."""
        began, self._work = self._environment.now, self._environment.event()
        yield self._environment.timeout(most * seconds) | self._work
        steps = min(most, max(1, math.ceil((self._environment.now - began) / seconds - 1e-6)))
        yield self._environment.timeout(max(0.0, began + steps * seconds - self._environment.now))
        return steps

    def _admit(self) -> None:
        """Take requests in. Those whose beginning another one computes wait, and keep their places."""
        following: list[Job] = []
        while self._waiting and len(self._running) + len(following) < self._speed.places:
            job = self._waiting.popleft()
            if self._follows(job):
                following.append(job)
            else:
                self._running.append(self._admitted(job))
        self._waiting.extendleft(reversed(following))

    def _follows(self, job: Job) -> bool:
        if job.leader is not None and job.leader[0].computed < job.leader[1]:
            return True
        blocks, job.leader = job.turn.blocks[: (job.turn.prompt - 1) // BLOCK], None
        cached = matched_tokens(blocks, self._cache, BLOCK)
        longest = cached + MIN_SHARED - 1
        for other in self._running:
            length = cached
            for one, its in zip(blocks[cached // BLOCK :], other.turn.blocks[cached // BLOCK :], strict=False):
                if one != its:
                    break
                length += BLOCK
            if length > longest and other.computed < length:
                job.leader, longest = (other, length), length
        return job.leader is not None

    def _admitted(self, job: Job) -> Job:
        """Take a request in; at least a prompt's last token is computed."""
        job.cached = min(job.turn.prompt - 1, matched_tokens(job.turn.blocks, self._cache, BLOCK))
        job.uncached, job.left = job.turn.prompt - job.cached, job.turn.output
        for block in job.turn.blocks[: job.cached // BLOCK]:
            self._cache.move_to_end(block)
        return job

    def _finish(self, decoding: list[Job], prompts: list[tuple[Job, int]], steps: int) -> None:
        for job, taken in prompts:
            before = job.computed
            job.uncached -= taken
            self._keep(job.turn.blocks[before // BLOCK : job.computed // BLOCK])
            if not job.uncached:
                job.first = self._environment.now
                decoding.append(job)
        for job in decoding:
            job.left -= steps
            if job.left == 0:
                self._running.remove(job)
                self._keep(job.turn.answered)
                job.done.succeed()

    def _keep(self, blocks: Sequence[int]) -> None:
        """Keep blocks, the least recently used ones being evicted."""
        for block in blocks:
            if block not in self._cache:
                self._changed.add(block)
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._speed.blocks:
            block, _ = self._cache.popitem(last=False)
            self._changed.add(block)
