"""What a replica does, whether it has one model or several: it computes, publishes what it holds, and shows health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray
from ray import serve
from ray.serve.metrics import Gauge

from bitnet.core import Model
from bitnet.server.generation.work import Computation, Part
from bitnet.server.models.backend import InProcess
from bitnet.server.ray.gauges import GAUGES, PREFIX, Readings
from bitnet.server.ray.index import PERIOD_SECONDS
from bitnet.server.ray.scaling import Use
from bitnet.server.ray.summary import Summary
from bitnet.server.ray.work import Facts, Held, Work
from bitnet.server.request.errors import RequestError, as_request_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from bitnet.core.model.pooling import Pooling

F32 = npt.NDArray[np.float32]
log = logging.getLogger("ray.serve")

HEALTH_SECONDS = 10.0
"""Seconds between health checks; a replica that has answered within them need not compute for one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica is: its deployment, its id, and its node's id."""

    deployment: str
    replica: str
    node: str

    @classmethod
    def here(cls) -> Place:
        """This process's replica."""
        context = serve.get_replica_context()
        return cls(context.deployment, context.replica_id.unique_id, ray.get_runtime_context().get_node_id())

    def facts(self, model: Model, name: str = "") -> Facts:
        """What the ingress has to know of a model here; ``name`` if it is one of several."""
        return Facts(
            *(self.deployment, name, self.replica, self.node),
            *(model.context, model.load().block_size, model.cache_bytes),
            devices=model.devices,
        )


class Answers:
    """Computes what the ingress sends.

    Attributes:
        last: When a token was last computed, on :func:`time.monotonic`'s clock.
    """

    def __init__(self, place: Place) -> None:
        self._place, self.last = place, 0.0
        self._prompt_tokens = self._cached_tokens = 0

    async def parts(
        self, backend: InProcess, work: Work, failed: Callable[[Exception], None] = lambda error: None
    ) -> AsyncIterator[list[Part] | RequestError]:
        """Compute the generations of a request; chunks that are ready at the same time come together.

        An error is the last item: it is a value, as exceptions change on their way through Ray.

        Args:
            failed: Called with an error before it is sent.
        """
        receipt = {"node": self._place.node, "id": self._place.replica}
        computation = Computation(backend, work, receipt)
        try:
            async with aclosing(computation.parts()) as computed:
                async for parts in computed:
                    self.last = time.monotonic()
                    self._count(parts)
                    if parts:
                        yield parts
        except Exception as error:
            failed(error)
            answer = as_request_error(error)
            if answer.status == 500:
                log.exception("a generation failed", exc_info=error)
            yield answer

    async def vectors(
        self, model: Model, work: Work, pooling: Pooling | None, *, normalize: bool
    ) -> F32 | RequestError:
        """Compute vectors of texts, ``float32[texts, d]``; an error is a value, as for :meth:`parts`."""
        try:
            made = await asyncio.to_thread(lambda: model.embed(work.prompts, pooling=pooling, normalize=normalize))
        except Exception as error:
            answer = as_request_error(error)
            if answer.status == 500:
                log.exception("vectors of texts failed", exc_info=error)
            return answer
        self.last = time.monotonic()
        return made

    def readings(self, use: Use) -> Readings:
        """The replica's gauges.

        Args:
            use: What it has to do now.
        """
        cached = self._cached_tokens / max(1, self._prompt_tokens)
        place = self._place
        return Readings(place.deployment, place.replica, place.node, use.waiting_tokens, use.kv, cached)

    def _count(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.completion is not None:
                self._prompt_tokens += part.completion.timings.prompt_tokens
                self._cached_tokens += part.completion.timings.cached_tokens

    async def check(self, model: Model) -> None:
        """Compute one token, unless a request had one computed lately.

        Raises:
            DeviceError: The device has failed.
        """
        if time.monotonic() - self.last < HEALTH_SECONDS:
            return
        (request,) = model.submit([model.tokenizer.bos_id or 0], max_tokens=1)
        async for _ in request:
            self.last = time.monotonic()


class Publisher:
    """Publishes to the index what a replica holds, and to Ray its gauges, until its process ends.

    Args:
        held: Returns its models, and the hashes of what their caches hold.
    """

    def __init__(
        self, index: DeploymentHandle[Any], place: Place, held: Callable[[], tuple[Held, Sequence[int]]]
    ) -> None:
        self._index, self._place, self._held = index, place, held
        self._gauges = {name: Gauge(f"{PREFIX}{name}", meaning) for name, meaning in GAUGES.items()}
        self._task = asyncio.ensure_future(self._publish())

    def check(self) -> None:
        """Raise an error if nothing is published any more.

        Raises:
            RuntimeError: So it is.
        """
        if self._task.done():
            raise RuntimeError(f"replica {self._place.replica} no longer publishes what it holds")

    async def _publish(self) -> None:
        summary, known = Summary(), 0
        while True:
            held, hashes = self._held()
            summary.update(hashes)
            for name, gauge in self._gauges.items():
                gauge.set(getattr(held.readings, name))
            try:
                known = await self._index.publish.remote(self._place.replica, held, summary.since(known))
            except Exception as error:  # Serve restarts the index; it then knows nothing
                log.info("what this replica holds could not be published: %s", error)
                known = 0
            await asyncio.sleep(PERIOD_SECONDS)
