"""A replica: a model on one device of the cluster, which computes what the ingress sends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from bitnet.server.generation.work import Part
from bitnet.server.models.backend import InProcess
from bitnet.server.ray.engine_settings import EngineSettings
from bitnet.server.ray.logs import share_log
from bitnet.server.ray.replica import F32, Answers, Place, Publisher
from bitnet.server.ray.scaling import Use
from bitnet.server.ray.summary import short_hashes
from bitnet.server.ray.work import Facts, Held, State, Work
from bitnet.server.request.errors import RequestError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from bitnet.core.model.pooling import Pooling

log = logging.getLogger("ray.serve")


class Engine:
    """A deployment's replica.

    Args:
        index: The deployment to which it publishes what its KV cache holds.
    """

    async def __init__(self, settings: EngineSettings, index: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        share_log()
        self._model = await asyncio.to_thread(settings.load)
        self._backend = InProcess(self._model)
        place = Place.here()
        self._facts, self._answers = place.facts(self._model), Answers(place)
        self._places = int(settings.options["max_seqs"])
        self._publisher = Publisher(index, place, self._held)
        log.info("replica %s on node %s serves %r", place.replica, place.node, self._model)

    async def describe(self) -> Facts:
        """What the ingress has to know."""
        return self._facts

    async def generate(self, work: Work) -> AsyncIterator[list[Part] | RequestError]:
        """Compute the generations of a request, as :meth:`Answers.parts` does."""
        async for parts in self._answers.parts(self._backend, work):
            yield parts

    async def embed(self, work: Work, pooling: Pooling | None, normalize: bool) -> F32 | RequestError:
        """Compute vectors of texts, as :meth:`Answers.vectors` does."""
        return await self._answers.vectors(self._model, work, pooling, normalize=normalize)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What this replica has to do, for :class:`~bitnet.server.ray.policy.TokenPolicy`."""
        return self._use().metrics()

    async def check_health(self) -> None:
        """Compute one token, unless a request had one computed lately.

        Raises:
            DeviceError, RuntimeError: The device has failed; Serve then replaces this replica.
        """
        self._model.check_file()
        self._publisher.check()
        await self._answers.check(self._model)

    def _held(self) -> tuple[Held, Sequence[int]]:
        held = Held((State(self._facts, self._model.load()),), self._answers.readings(self._use()))
        return held, short_hashes(self._model.cached_blocks())

    def _use(self) -> Use:
        return Use.of(self._model.load(), self._places)
