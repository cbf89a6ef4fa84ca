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
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from bitnet.server.ray.holders import Holders

BETA = 1.0
"""Weight of the load against that of the prefix."""
LOADING = 1.0
"""What a replica's score lacks if it must load the model first: as much as a whole prompt is worth. So a second
replica loads a model when the work of the first one exceeds that of all its places. Those that have few models lack
less than those that have many."""
STALE_SECONDS = 1.0
"""Age from which what is known of the caches is not used."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could compute a request.

    Attributes:
        name: Its id.
        matched: Tokens of the prompt that it holds; None: not known, or too old.
        load: Tokens of work that it has still to do.
        loaded: Whether it has the model, or is loading it.
        others: If not, its share of all models that replicas have.
    """

    name: str
    matched: int | None
    load: float
    loaded: bool = True
    others: float = 0.0


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
    prompt_tokens: int,
    *,
    full_load: float,
    beta: float = BETA,
    draw: Callable[[], float] = random.random,
) -> list[Choice]:
    """The replicas, the best first; equal ones in random order.

    Where no cache is known, the less loaded of two random replicas comes first ("power of two choices"): with an old
    view of the load, sending everything to the least loaded replica would overload it. They are two that have the
    model, if there are.

    Args:
        full_load: Tokens of work of a replica with all its places taken; positive.
    """
    if not candidates:
        return []
    if all(one.matched is None for one in candidates):
        return _two_choices(candidates, draw)
    mean = sum(one.load for one in candidates) / len(candidates)
    least = min(one.load for one in candidates)
    choices = []
    for one in candidates:
        matched = min(prompt_tokens, one.matched or 0)
        relative = (one.load - least) / max(mean, full_load)
        score = matched / max(1, prompt_tokens) - beta * relative - (0.0 if one.loaded else LOADING + one.others)
        choices.append(Choice(one.name, matched, one.load, score))
    ties = {choice.name: draw() for choice in choices}
    return sorted(choices, key=lambda choice: (-choice.score, choice.load, ties[choice.name]))


def _two_choices(candidates: Sequence[Candidate], draw: Callable[[], float]) -> list[Choice]:
    shuffled = sorted(candidates, key=lambda one: (not one.loaded, draw()))
    first = sorted(shuffled[:2], key=lambda one: (not one.loaded, one.load))
    return [Choice(one.name, 0, one.load, 0.0) for one in (*first, *shuffled[2:])]


class Loads:
    """The work of each replica in tokens, as one router has given it out.

    Attributes:
        typical: Tokens of work of a request, averaged over the recent ones.
    """

    def __init__(self) -> None:
        self.typical = 256.0
        self._work: dict[str, tuple[str, float]] = {}
        self._sums: dict[str, float] = {}
        self._chosen: dict[str, float] = {}  # by time
        self._replicas: Set[str] = frozenset()

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
        while self._chosen and now - self._chosen[oldest := next(iter(self._chosen))] > STALE_SECONDS:
            self.end(oldest)
        if replicas == self._replicas:
            return
        self._replicas = frozenset(replicas)
        self._work = {request: found for request, found in self._work.items() if found[0] in replicas}
        self._sums = {replica: total for replica, total in self._sums.items() if replica in replicas}


class Sent:
    """Models that replicas will have: those of requests sent to them after they last said what they have."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], float] = {}  # by time

    def send(self, replica: str, model: int, now: float) -> None:
        """Note that a request to a model is about to be sent to a replica."""
        self._sent.pop((replica, model), None)
        self._sent[replica, model] = now

    def models(self, replicas: Iterable[str], now: float) -> dict[str, set[int]]:
        """The models that were sent to replicas lately."""
        while self._sent and now - self._sent[oldest := next(iter(self._sent))] > STALE_SECONDS:
            del self._sent[oldest]
        found: dict[str, set[int]] = {replica: set() for replica in replicas}
        for replica, model in self._sent:
            if replica in found:
                found[replica].add(model)
        return found


def with_models(candidates: Sequence[Candidate], models: Mapping[str, Set[int]], model: int) -> list[Candidate]:
    """Candidates with what they have of several models.

    Args:
        models: Hashes of the models that each of them has.
        model: That of the request's model.
    """
    total = max(1, sum(map(len, models.values())))
    return [replace(one, loaded=model in models[one.name], others=len(models[one.name]) / total) for one in candidates]


class Assumed:
    """Blocks that replicas will hold: those of prompts sent to them after they last said what they hold.

    Without these, the next turn of a conversation would miss its prefix if it came before the next message.
    """

    def __init__(self) -> None:
        self._holders = Holders()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._prompts: dict[str, tuple[str, Sequence[int]]] = {}
        self._ended: dict[str, float] = {}  # by time
        self._replicas: Set[str] = frozenset()

    def begin(self, request: str, replica: str, blocks: Sequence[int]) -> None:
        """Note that a request with a prompt of these blocks runs on a replica."""
        self._forget(request)
        self._prompts[request] = replica, blocks
        for block in blocks:
            self._counts[replica, block] += 1
        self._holders.add(replica, blocks)

    def end(self, request: str, now: float) -> None:
        """Note when a request ended."""
        if request in self._prompts:
            self._ended.pop(request, None)
            self._ended[request] = now

    def leading(self, prompt: Sequence[int], now: float) -> dict[str, int]:
        """As :meth:`Holders.leading`; the blocks of requests that ended long ago are forgotten."""
        while self._ended and now - self._ended[oldest := next(iter(self._ended))] > STALE_SECONDS:
            self._forget(oldest)
        return self._holders.leading(prompt)

    def keep(self, replicas: Set[str]) -> None:
        """Forget all other replicas."""
        if replicas != self._replicas:
            self._replicas = frozenset(replicas)
            for request in [one for one, (replica, _) in self._prompts.items() if replica not in replicas]:
                self._forget(request)

    def _forget(self, request: str) -> None:
        self._ended.pop(request, None)
        if (found := self._prompts.pop(request, None)) is None:
            return
        replica, blocks = found
        for block in blocks:
            self._counts[replica, block] -= 1
            if not self._counts[replica, block]:
                del self._counts[replica, block]
                self._holders.remove(replica, (block,))
