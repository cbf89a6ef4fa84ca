"""Serve's router of requests to replicas: a thin adapter of :mod:`bitnet.server.ray.dispatch`.

Serve copies this module by value into the processes that route, with every object that it names; only modules stay
what they are there. Its interface may still change, too. So everything of substance is elsewhere.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bitnet.server.ray import dispatch, index
from bitnet.server.ray.work import Work

log = logging.getLogger("ray.serve")


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that holds most of its prompt, unless others have much less to do."""

    queue_len_response_deadline_s = 1.0
    """Seconds that a replica has to say how many requests it has, which it is asked after some time without any. With
    the 0.1 s that Serve gives, a conversation left a replica that was busy for a moment."""

    def initialize_state(self, *, places: int, beta: float) -> None:
        """Take over ``request_router_kwargs``.

        Args:
            places: Requests that a replica computes at the same time.
        """
        self._dispatch = dispatch.Dispatch(index.MIRROR, places, beta=beta)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in order of preference; Serve takes the first that has room."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        work = _work(pending_request)
        if pending_request is None or work is None:
            return [[replicas[choice.name]] for choice in self._dispatch.choose(replicas.keys())]
        request = pending_request.metadata
        choices = self._dispatch.choose(replicas.keys(), request.internal_request_id, work)
        if choices:
            best = choices[0]
            log.info(
                "request %s: replica %s, %d of %d tokens cached, load %d",
                *(request.request_id, best.name, best.matched, work.prompt_tokens, best.load),
            )
        return [[replicas[choice.name]] for choice in choices]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (work := _work(pending_request)) is not None:
            self._dispatch.begin(pending_request.metadata.internal_request_id, replica_id.unique_id, work)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._dispatch.end(internal_request_id)


def _work(pending_request: PendingRequest | None) -> Work | None:
    arguments = () if pending_request is None else pending_request.args
    return arguments[0] if arguments and isinstance(arguments[0], Work) else None
