"""Which replica gets each request, from what replicas say of themselves and what they were sent.

This module knows nothing of Ray.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Set

from bitnet.server.ray.index import SILENT_SECONDS, Mirror
from bitnet.server.ray.scoring import BETA, NOTHING, STALE_SECONDS, Candidate, Choice, rank, with_models
from bitnet.server.ray.sent import Loads, Prompts, Sent
from bitnet.server.ray.work import Work


class Dispatch:
    """The choices of one router.

    Args:
        mirror: What replicas say of themselves.
        places: Requests that a replica computes at the same time.
        clock: That of ``mirror``, in seconds.
        draw: Returns random numbers from 0 to 1.

    Attributes:
        loads: The work that it has given out.
    """

    def __init__(
        self,
        mirror: Mirror,
        places: int,
        *,
        beta: float = BETA,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._mirror, self._places, self._beta, self._clock, self._draw = mirror, places, beta, clock, draw
        self.loads, self._prompts, self._sent = Loads(), Prompts(), Sent()

    def choose(self, replicas: Set[str], request: str = "", work: Work | None = None) -> list[Choice]:
        """The replicas in order of preference.

        Args:
            request: Its id.
            work: What it asks for; None: nothing that is known.
        """
        now = self._clock()
        self.loads.end(request)  # it may have been sent before, and refused
        self._prompts.stop(request)
        self.loads.keep(replicas, now)
        self._prompts.keep(replicas)
        held = self._held(work, now)
        candidates = [
            Candidate(name, held.get(name, 0), self.loads.of(name), now - self._mirror.seen(name) <= STALE_SECONDS)
            for name in replicas
        ]
        if work is not None and work.model:
            sent = self._sent.models(replicas, now)
            candidates = with_models(
                candidates, {name: self._mirror.models(name) | sent[name] for name in replicas}, work.model
            )
        choices = rank(
            candidates,
            0 if work is None else work.prompt_tokens,
            places=self._places,
            typical=self.loads.typical,
            shared=NOTHING if work is None else self._prompts.shared(work.blocks, work.block_size),
            beta=self._beta,
            draw=self._draw,
        )
        if choices and work is not None:
            best = choices[0]
            if work.model:
                self._sent.send(best.name, work.model, now)
            self.loads.choose(request, best.name, work.prompt_tokens - best.matched + work.expected_tokens, now)
        return choices

    def begin(self, request: str, replica: str, work: Work) -> None:
        """Note that a request was sent to a replica."""
        cached = self._held(work, self._clock()).get(replica, 0)
        self.loads.begin(request, replica, max(0, work.prompt_tokens - cached) + work.expected_tokens)
        self._prompts.begin(request, replica, work.blocks)

    def end(self, request: str) -> None:
        """Note that a request has ended."""
        self.loads.end(request)
        self._prompts.end(request, self._clock())

    def _held(self, work: Work | None, now: float) -> dict[str, int]:
        """The tokens of a prompt that replicas hold; those that hold none are left out."""
        if work is None:
            return {}
        known = self._mirror.holders.leading(work.blocks)
        blocks = {name: count for name, count in known.items() if now - self._mirror.seen(name) <= SILENT_SECONDS}
        for name, count in self._prompts.leading(work.blocks, now, self._mirror.seen).items():
            blocks[name] = max(count, blocks.get(name, 0))
        return {name: count * work.block_size for name, count in blocks.items()}
