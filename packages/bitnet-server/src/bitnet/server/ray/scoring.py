"""Which replica computes a request: the one that holds most of its prompt, unless others have much less to do.

The score of a replica is ``matched / prompt − β · relative load``. The load is work in tokens: those of the prompts
that are not cached, and those that may still be generated. Relative load is what a replica has to do more than the
least loaded one, divided by what replicas have to do on average, and at least by the work of a replica with all its
places taken: a batch with free places takes one more request at little cost, so that alone does not drive a
conversation from its replica.

This module knows nothing of Ray.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass

BETA = 1.0
"""Weight of the load against that of the prefix."""
STALE_SECONDS = 1.0
"""Age from which what is known of the caches is not used."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could compute a request.

    Attributes:
        name: Its id.
        hashes: Hashes of the KV blocks that it holds; None: not known, or too old.
        load: Tokens of work that it has still to do.
    """

    name: str
    hashes: Container[int] | None
    load: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica in the order of preference.

    Attributes:
        matched: Tokens of the prompt that it holds.
    """

    name: str
    matched: int
    load: float
    score: float


def matched_tokens(prompt: Sequence[int], hashes: Container[int], block_size: int) -> int:
    """Number of the prompt's first tokens whose blocks are all in ``hashes``.

    Args:
        prompt: Hashes of its full blocks, in order.
    """
    count = 0
    for one in prompt:
        if one not in hashes:
            break
        count += 1
    return count * block_size


def rank(
    candidates: Sequence[Candidate],
    blocks: Sequence[int],
    prompt_tokens: int,
    block_size: int,
    *,
    full_load: float,
    beta: float = BETA,
    draw: Callable[[], float] = random.random,
) -> list[Choice]:
    """The replicas, the best first; equal ones in random order.

    Where no cache is known, the less loaded of two random replicas comes first ("power of two choices"): with an old
    view of the load, sending everything to the least loaded replica would overload it.

    Args:
        blocks: Hashes of the prompt's full blocks, in order.
        block_size: Tokens of a block.
        full_load: Tokens of work of a replica with all its places taken; positive.
    """
    if not candidates:
        return []
    if all(one.hashes is None for one in candidates):
        return _two_choices(candidates, draw)
    mean = sum(one.load for one in candidates) / len(candidates)
    least = min(one.load for one in candidates)
    choices = []
    for one in candidates:
        matched = min(prompt_tokens, matched_tokens(blocks, one.hashes or frozenset(), block_size))
        relative = (one.load - least) / max(mean, full_load)
        choices.append(Choice(one.name, matched, one.load, matched / max(1, prompt_tokens) - beta * relative))
    ties = {choice.name: draw() for choice in choices}
    return sorted(choices, key=lambda choice: (-choice.score, choice.load, ties[choice.name]))


def _two_choices(candidates: Sequence[Candidate], draw: Callable[[], float]) -> list[Choice]:
    shuffled = sorted(candidates, key=lambda one: draw())
    first = sorted(shuffled[:2], key=lambda one: one.load)
    return [Choice(one.name, 0, one.load, 0.0) for one in (*first, *shuffled[2:])]


class Either(Container[int]):
    """The hashes that are in one of two sets, which are not copied."""

    def __init__(self, one: Container[int], other: Container[int]) -> None:
        self._one, self._other = one, other

    def __contains__(self, value: object) -> bool:
        return value in self._one or value in self._other


class Loads:
    """The work of each replica in tokens, as one router has given it out.

    Attributes:
        typical: Tokens of work of a request, averaged over the recent ones.
    """

    def __init__(self) -> None:
        self.typical = 256.0
        self._work: dict[str, tuple[str, float]] = {}
        self._sums: dict[str, float] = {}
        self._chosen: dict[str, float] = {}

    def choose(self, request: str, replica: str, tokens: float, now: float) -> None:
        """Note that a request is about to be sent to a replica, so that others that come at the same time see it. It
        is forgotten after :data:`STALE_SECONDS`, unless it then runs."""
        self._begin(request, replica, tokens)
        self._chosen[request] = now

    def begin(self, request: str, replica: str, tokens: float) -> None:
        """Note that a request runs on a replica."""
        self._begin(request, replica, tokens)
        self.typical += 0.1 * (max(1.0, tokens) - self.typical)

    def _begin(self, request: str, replica: str, tokens: float) -> None:
        self.end(request)
        self._work[request] = replica, tokens
        self._sums[replica] = self._sums.get(replica, 0.0) + tokens

    def end(self, request: str) -> None:
        """Note that a request has ended, or never began."""
        self._chosen.pop(request, None)
        if (found := self._work.pop(request, None)) is not None:
            replica, tokens = found
            self._sums[replica] -= tokens

    def of(self, replica: str) -> float:
        """The tokens that a replica has still to compute."""
        return self._sums.get(replica, 0.0)

    def keep(self, replicas: Set[str], now: float) -> None:
        """Forget all other replicas, and requests that were chosen for one but never ran."""
        for request in [one for one, chosen in self._chosen.items() if now - chosen > STALE_SECONDS]:
            self.end(request)
        self._work = {request: found for request, found in self._work.items() if found[0] in replicas}
        self._sums = {replica: total for replica, total in self._sums.items() if replica in replicas}


class Assumed:
    """Hashes that replicas will hold: those of prompts sent to them after they last said what they hold.

    Without these, the next turn of a conversation would miss its prefix if it came before the next message.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, dict[str, tuple[frozenset[int], float | None]]] = {}

    def begin(self, request: str, replica: str, blocks: Sequence[int]) -> None:
        """Note that a request with a prompt of these blocks runs on a replica."""
        self._prompts.setdefault(replica, {})[request] = frozenset(blocks), None

    def end(self, request: str, now: float) -> None:
        """Note when a request ended."""
        for prompts in self._prompts.values():
            if request in prompts:
                prompts[request] = prompts[request][0], now

    def of(self, replica: str, now: float) -> Set[int]:
        """The hashes that a replica is assumed to hold; those of requests that ended long ago are forgotten."""
        prompts = self._prompts.get(replica, {})
        for request in [r for r, (_, ended) in prompts.items() if ended is not None and now - ended > STALE_SECONDS]:
            del prompts[request]
        return frozenset().union(*(blocks for blocks, _ in prompts.values()))

    def keep(self, replicas: Set[str]) -> None:
        """Forget all other replicas."""
        self._prompts = {replica: found for replica, found in self._prompts.items() if replica in replicas}
