"""Serve's router of requests to replicas: a thin adapter of :mod:`bitnet.server.ray.scoring`.

Serve copies this module by value into the processes that route, with every object that it names; only modules stay
what they are there. Its interface may still change, too. So everything of substance is elsewhere.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bitnet.server.ray import index
from bitnet.server.ray.scoring import STALE_SECONDS, Assumed, Candidate, Loads, Sent, rank, with_models
from bitnet.server.ray.work import Work

log = logging.getLogger("ray.serve")


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that holds most of its prompt, unless others have much less to do."""

    def initialize_state(self, *, places: int, beta: float) -> None:
        """Take over ``request_router_kwargs``.

        Args:
            places: Requests that a replica computes at the same time.
        """
        self._places, self._beta = places, beta
        self._loads, self._assumed, self._sent = Loads(), Assumed(), Sent()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in order of preference; Serve takes the first that has room."""
        now = time.monotonic()
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._loads.keep(replicas.keys(), now)
        self._assumed.keep(replicas.keys())
        work = _work(pending_request)
        held = self._held(work, now)
        candidates = [
            Candidate(
                name,
                held.get(name, 0) if index.MIRROR.knows(name, STALE_SECONDS) else None,
                self._loads.of(name),
            )
            for name in replicas
        ]
        if work is not None and work.model:
            models = {name: index.MIRROR.models(name) | sent for name, sent in self._sent.models(replicas, now).items()}
            candidates = with_models(candidates, models, work.model)
        tokens = 0 if work is None else work.prompt_tokens
        choices = rank(candidates, tokens, full_load=self._places * self._loads.typical, beta=self._beta)
        if pending_request is not None and work is not None and choices:
            best, request = choices[0], pending_request.metadata
            if work.model:
                self._sent.send(best.name, work.model, now)
            uncached = work.prompt_tokens - best.matched
            self._loads.choose(request.internal_request_id, best.name, uncached + work.expected_tokens, now)
            log.info(
                "request %s: replica %s, %d of %d tokens cached, load %d",
                *(request.request_id, best.name, best.matched, work.prompt_tokens, best.load),
            )
        return [[replicas[choice.name]] for choice in choices]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        work = _work(pending_request)
        if work is None:
            return
        request, replica = pending_request.metadata.internal_request_id, replica_id.unique_id
        known = index.MIRROR.knows(replica, STALE_SECONDS)
        cached = self._held(work, time.monotonic()).get(replica, 0) if known else 0
        self._loads.begin(request, replica, max(0, work.prompt_tokens - cached) + work.expected_tokens)
        self._assumed.begin(request, replica, work.blocks)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads.end(internal_request_id)
        self._assumed.end(internal_request_id, time.monotonic())

    def _held(self, work: Work | None, now: float) -> dict[str, int]:
        """The tokens of a prompt that replicas hold, or will hold; those that hold none are left out."""
        if work is None:
            return {}
        known, coming = index.MIRROR.holders.leading(work.blocks), self._assumed.leading(work.blocks, now)
        blocks = {name: max(known.get(name, 0), coming.get(name, 0)) for name in known.keys() | coming.keys()}
        return {name: count * work.block_size for name, count in blocks.items()}


def _work(pending_request: PendingRequest | None) -> Work | None:
    arguments = () if pending_request is None else pending_request.args
    return arguments[0] if arguments and isinstance(arguments[0], Work) else None
