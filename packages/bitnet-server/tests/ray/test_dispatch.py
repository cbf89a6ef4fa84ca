"""Conversations against a small model of replicas, by the server's own choices and mirror, on a simulated clock."""

from __future__ import annotations

import heapq
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

from bitnet.server.ray.dispatch import Dispatch
from bitnet.server.ray.gauges import Readings
from bitnet.server.ray.index import PERIOD_SECONDS, Mirror, Update
from bitnet.server.ray.scoring import matched_tokens
from bitnet.server.ray.summary import Summary
from bitnet.server.ray.work import Held, Work

TALKS, TURNS = 50, 10
BLOCK, PLACES, ANSWER = 32, 16, 8
STEP, PROMPT = 0.01, 0.001
"""Seconds of a step, and of a prompt's token."""
Late = Callable[[random.Random], float]
LATE: dict[str, Late] = {
    "in time": lambda rng: 0.0,
    "a little": lambda rng: rng.expovariate(2.0),
    "sometimes 3 s": lambda rng: 3.0 if rng.random() < 0.15 else 0.0,
    "for ever": lambda rng: 1e9,
}
HELD = Held((), Readings("", "", "", 0, 0, 0))


@dataclass
class Replica:
    """A cache of blocks, the least recently used of which are evicted."""

    size: int = 4000
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    running: int = 0

    def keep(self, prompt: Sequence[int]) -> None:
        """Take a computed prompt's blocks in."""
        for block in reversed(prompt):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.size:
            self.blocks.popitem(last=False)


@dataclass
class Seen:
    """What came of conversations.

    Attributes:
        turns: Those after each conversation's first.
        hits: Those of them whose replica had the conversation so far, but for two blocks.
        requests: By replica.
        work: Computed tokens by replica.
    """

    hits: int = 0
    turns: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)

    def uneven(self, by: Counter[str]) -> float:
        """The most loaded replica's load over the mean."""
        return max(by.values()) / (by.total() / 3)


class Cluster:
    """Three replicas, and a clock.

    Args:
        late: Returns by how many seconds a replica's next message is late, given random numbers.
    """

    def __init__(self, rng: random.Random, late: Late) -> None:
        self.rng, self._late, self.now, self._number = rng, late, 0.0, count()
        self.replicas = {name: Replica() for name in "abc"}
        self._summaries = {name: Summary() for name in self.replicas}
        self._mirror = Mirror(lambda: self.now)
        self._dispatch = Dispatch(self._mirror, PLACES, clock=lambda: self.now, draw=rng.random)
        self._said: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.seen, self._under_way = Seen(), 0
        for name in self.replicas:
            self._publish(name)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something so many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._number), what))

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """As :meth:`after`, of what must happen before the end."""
        self._under_way += 1

        def counted() -> None:
            what()
            self._under_way -= 1

        self.after(seconds, counted)

    def run(self) -> Seen:
        """Let all requests end that were asked, and those that follow them."""
        while self._under_way:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.seen

    def _publish(self, name: str) -> None:
        summary = self._summaries[name]
        summary.update(list(self.replicas[name].blocks))
        self._said[name] = self.now
        versions = self._mirror.versions()
        self._mirror.update(
            {
                one: Update(HELD, self._summaries[one].since(versions.get(one, 0)), self.now - said)
                for one, said in self._said.items()
            }
        )
        self.after(PERIOD_SECONDS + self._late(self.rng), lambda: self._publish(name))

    def ask(self, blocks: Sequence[int], tokens: int, done: Callable[[int], None]) -> None:
        """Send a prompt; ``done`` gets the tokens of it that were cached."""
        id = str(next(self._number))
        work = Work(
            (array("i", bytes(4 * tokens)),),
            (None,),
            {"max_tokens": ANSWER},
            1,
            None,
            None,
            False,
            tuple(blocks),
            BLOCK,
        )
        name = self._dispatch.choose(self.replicas.keys(), id, work)[0].name
        self._dispatch.begin(id, name, work)
        replica = self.replicas[name]
        cached = min(tokens - 1, matched_tokens(blocks, replica.blocks, BLOCK))
        replica.running += 1
        self.seen.requests[name] += 1
        self.seen.work[name] += tokens - cached + ANSWER
        computed = (tokens - cached) * PROMPT

        def ended() -> None:
            replica.running -= 1
            self._dispatch.end(id)
            done(cached)

        self.after(computed, lambda: replica.keep(blocks))
        self.later(computed + ANSWER * STEP * (1 + max(0, replica.running / PLACES - 1)), ended)

    def talk(self, instructions: Sequence[int], pause: float) -> None:
        """A conversation of ten turns that begins with these blocks.

        Args:
            pause: Mean seconds between an answer and the next turn.
        """
        blocks, tokens, before, left = list(instructions), len(instructions) * BLOCK, 0, TURNS

        def turn() -> None:
            nonlocal tokens, left
            left -= 1
            tokens += self.rng.randrange(20, 50)
            blocks.extend(self.blocks(tokens // BLOCK - len(blocks)))
            self.ask(tuple(blocks), tokens, done)

        def done(cached: int) -> None:
            nonlocal before, tokens
            if before:
                self.seen.turns += 1
                self.seen.hits += cached >= before - 2 * BLOCK
            before = tokens
            tokens += ANSWER
            if left:
                self.later(self.rng.expovariate(1 / pause) if pause else 0.0, turn)

        turn()

    def blocks(self, number: int) -> list[int]:
        """Hashes of blocks that nobody has."""
        return [self.rng.getrandbits(64) for _ in range(number)]


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("popular", [0, 30])
@pytest.mark.parametrize("pause", [0.0, 4.0])
def test_conversations_stay_where_their_prefix_is_however_late_messages_are(
    late: str, popular: int, pause: float
) -> None:
    """50 conversations of 10 turns over 3 replicas, of which some have the same instructions."""
    seed = random.randrange(1 << 30)
    cluster = Cluster(random.Random(seed), LATE[late])
    instructions = cluster.blocks(8)
    for number in range(TALKS):
        cluster.talk(instructions if number < popular else cluster.blocks(2), pause)
    seen = cluster.run()
    assert seen.turns == TALKS * (TURNS - 1)
    assert seen.hits >= 0.9 * seen.turns, (seed, seen)
    assert seen.uneven(seen.requests) <= 1.5, (seed, seen)
    assert seen.uneven(seen.work) <= 1.5, (seed, seen)


@pytest.mark.parametrize("at_once", [3, 12, 24, 96])
@pytest.mark.parametrize("length", [4, 30])
def test_a_popular_prefix_does_not_starve_others(at_once: int, length: int) -> None:
    """Requests that begin alike, few or many at once, when one replica is known to hold what they share."""
    seed = random.randrange(1 << 30)
    cluster = Cluster(random.Random(seed), LATE["in time"])
    asked = 500 + 40 * at_once
    prefix, left = cluster.blocks(length), asked

    def ask(_: int = 0) -> None:
        nonlocal left
        if left:
            left -= 1
            cluster.ask((*prefix, *cluster.blocks(1)), (length + 1) * BLOCK + cluster.rng.randrange(BLOCK), ask)

    cluster.ask(prefix, length * BLOCK + 1, lambda cached: None)
    for _ in range(at_once):
        cluster.later(5 * PERIOD_SECONDS, ask)
    seen = cluster.run()
    assert seen.uneven(seen.requests) <= 1.5, (seed, seen)
    assert seen.uneven(seen.work) <= 1.5, (seed, seen)
    assert max(seen.work.values()) < asked * 4 * BLOCK, (seed, seen)  # but few computed the prefix
