"""What a router has sent to replicas, beside what they have said since: work, models and blocks of prompts.

This module knows nothing of Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

from bitnet.server.ray.holders import Holders
from bitnet.server.ray.index import SILENT_SECONDS
from bitnet.server.ray.scoring import NOTHING, STALE_SECONDS, Shared


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


class Prompts:
    """Prompts of requests: of those under way, and of those that ended after their replica last said what it holds.

    Without the former, it would not be known what a prompt shares with others. Without the latter, the next turn of a
    conversation would miss its prefix if it came before the replica's next message.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[str, Sequence[int]]] = {}
        self._users: Counter[int] = Counter()  # by block, requests under way
        self._ended: dict[str, tuple[float, str, Sequence[int]]] = {}  # by time
        self._counts: Counter[tuple[str, int]] = Counter()  # by replica and block, requests that ended
        self._holders = Holders()
        self._replicas: Set[str] = frozenset()

    def begin(self, request: str, replica: str, blocks: Sequence[int]) -> None:
        """Note that a request with a prompt of these blocks runs on a replica."""
        self.stop(request)
        self._running[request] = replica, blocks
        self._users.update(blocks)

    def end(self, request: str, now: float) -> None:
        """Note when a request ended."""
        if (found := self.stop(request)) is None:
            return
        replica, blocks = found
        self._ended[request] = now, replica, blocks
        for block in blocks:
            self._counts[replica, block] += 1
        self._holders.add(replica, blocks)

    def stop(self, request: str) -> tuple[str, Sequence[int]] | None:
        """Note that a request was not computed, after all; return its replica and prompt, if it ran."""
        if (found := self._running.pop(request, None)) is not None:
            for block in found[1]:
                self._users[block] -= 1
                if not self._users[block]:
                    del self._users[block]
        return found

    def shared(self, prompt: Sequence[int], block_size: int) -> Shared:
        """What a prompt shares with those of requests under way, and by how many it was used lately."""
        count = 0
        while count < len(prompt) and prompt[count] in self._users:
            count += 1
        if not count:
            return NOTHING
        last = prompt[count - 1]
        ended = sum(self._counts.get((replica, last), 0) for replica in self._replicas)
        return Shared(count * block_size, self._users[last] + ended)

    def leading(self, prompt: Sequence[int], now: float, seen: Callable[[str], float]) -> dict[str, int]:
        """As :meth:`Holders.leading`, of those that ended. They are forgotten once their replica has had time to say
        so, or after :data:`SILENT_SECONDS`.

        Args:
            seen: Returns when a replica last said what it holds.
        """
        for request, (ended, replica, _) in tuple(self._ended.items()):
            if now - ended <= STALE_SECONDS:
                break
            if seen(replica) - ended > STALE_SECONDS or now - ended > SILENT_SECONDS:
                self._forget(request)
        return self._holders.leading(prompt)

    def keep(self, replicas: Set[str]) -> None:
        """Forget all other replicas."""
        if replicas != self._replicas:
            self._replicas = frozenset(replicas)
            for request in [one for one, (replica, _) in self._running.items() if replica not in replicas]:
                self.stop(request)
            for request in [one for one, (_, replica, _) in self._ended.items() if replica not in replicas]:
                self._forget(request)

    def _forget(self, request: str) -> None:
        _, replica, blocks = self._ended.pop(request)
        for block in blocks:
            self._counts[replica, block] -= 1
            if not self._counts[replica, block]:
                del self._counts[replica, block]
                self._holders.remove(replica, (block,))
