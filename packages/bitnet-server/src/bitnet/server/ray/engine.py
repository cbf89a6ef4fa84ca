"""A replica: a model on one device of the cluster, which computes what the ingress sends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from bitnet.server.generation.work import Computation, Part
from bitnet.server.models.backend import InProcess
from bitnet.server.ray.engine_settings import EngineSettings
from bitnet.server.ray.index import PERIOD_SECONDS
from bitnet.server.ray.logs import share_log
from bitnet.server.ray.scaling import Use
from bitnet.server.ray.summary import Summary, short_hashes
from bitnet.server.ray.work import Facts, State, Work
from bitnet.server.request.errors import RequestError, as_request_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")

HEALTH_SECONDS = 10.0
"""Seconds between health checks; a replica that has answered within them need not compute for one."""


class Engine:
    """A deployment's replica.

    Args:
        index: The deployment to which it publishes what its KV cache holds.
    """

    async def __init__(self, settings: EngineSettings, index: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        share_log()
        self._model = await asyncio.to_thread(settings.load)
        self._backend = InProcess(self._model)
        self._index = index
        context = serve.get_replica_context()
        self._deployment, self._replica = context.deployment, context.replica_id.unique_id
        self._node = ray.get_runtime_context().get_node_id()
        self._answered, self._places = 0.0, int(settings.options["max_seqs"])
        self._publishing = asyncio.ensure_future(self._publish())
        log.info("replica %s on node %s serves %r", self._replica, self._node, self._model)

    async def describe(self) -> Facts:
        """What the ingress has to know."""
        load = self._model.load()
        return Facts(
            *(self._deployment, self._replica, self._node),
            *(self._model.context, load.block_size, self._model.cache_bytes),
            devices=self._model.devices,
        )

    async def generate(self, work: Work) -> AsyncIterator[list[Part] | RequestError]:
        """Compute the generations of a request; chunks that are ready at the same time come together.

        An error is the last item: it is a value, as exceptions change on their way through Ray.
        """
        computation = Computation(self._backend, work, {"node": self._node, "id": self._replica})
        try:
            async with aclosing(computation.parts()) as computed:
                async for parts in computed:
                    self._answered = time.monotonic()
                    if parts:
                        yield parts
        except Exception as error:
            answer = as_request_error(error)
            if answer.status == 500:
                log.exception("a generation failed", exc_info=error)
            yield answer

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What this replica has to do, for :class:`~bitnet.server.ray.policy.TokenPolicy`."""
        return Use.of(self._model.load(), self._places).metrics()

    async def check_health(self) -> None:
        """Compute one token, unless a request had one computed lately.

        Raises:
            DeviceError, RuntimeError: The device has failed; Serve then replaces this replica.
        """
        self._model.check_file()
        if self._publishing.done():
            raise RuntimeError(f"replica {self._replica} no longer publishes what it holds")
        if time.monotonic() - self._answered < HEALTH_SECONDS:
            return
        token = self._model.tokenizer.bos_id or 0
        (request,) = self._model.submit([token], max_tokens=1)
        async for _ in request:
            self._answered = time.monotonic()

    async def _publish(self) -> None:
        summary, known = Summary(), 0
        facts = await self.describe()
        while True:
            summary.update(short_hashes(self._model.cached_blocks()))
            state = State(facts, self._model.load())
            try:
                known = await self._index.publish.remote(state, summary.since(known))
            except Exception as error:  # Serve restarts the index; it then knows nothing
                log.info("what this replica holds could not be published: %s", error)
                known = 0
            await asyncio.sleep(PERIOD_SECONDS)
