"""A replica that holds several models of a folder: each is loaded when a request needs it, and unloaded by least use.

Serve's own loader (``serve.multiplexed``) counts models, not bytes, and unloads one that still answers. So the models
are in the server's pool, and of Serve's multiplexing only the model's name in a call's context is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ray import serve

from bitnet.core import Model
from bitnet.core.hub import local_path
from bitnet.core.hub.names import PREFIX
from bitnet.server.generation.work import Part
from bitnet.server.models.backend import InProcess
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.pool import Pool
from bitnet.server.models.presets import ModelSettings
from bitnet.server.models.service import Service
from bitnet.server.models.settings import Settings
from bitnet.server.ray.engine_settings import EngineSettings
from bitnet.server.ray.logs import share_log
from bitnet.server.ray.replica import F32, Answers, Place, Publisher
from bitnet.server.ray.scaling import Use
from bitnet.server.ray.summary import model_hash, short_hashes
from bitnet.server.ray.work import Facts, Held, State, Work
from bitnet.server.request.errors import RequestError, as_request_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from bitnet.core.model.pooling import Pooling

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class FolderSettings:
    """How a replica loads the models of a folder.

    Attributes:
        folder: A folder on its node.
        options: Arguments of :func:`~bitnet.core.load_model` for each of them.
        settings: Those of the server, of which ``max_memory`` holds for each replica.
    """

    folder: str
    options: Mapping[str, Any]
    settings: Settings

    def load(self, name: str, path: Path, own: ModelSettings) -> Model:
        """Load one of the models, with its own settings."""
        given = {"context": own.context, "device": own.device}
        options = {name: value for name, value in given.items() if value is not None}
        return EngineSettings(str(path), {**self.options, **options}).load()


class MultiplexedEngine:
    """A deployment's replica.

    Args:
        index: The deployment to which it publishes which models it has, and what their KV caches hold.
    """

    async def __init__(self, settings: FolderSettings, index: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        share_log()
        self._pool = Pool((), settings.settings, Catalog(Path(settings.folder), settings.load))
        self._pool.open()
        self._place = Place.here()
        self._answers = Answers(self._place)
        self._places = int(settings.options["max_seqs"])
        self._publisher = Publisher(index, self._place, self._held)
        log.info("replica %s on node %s serves %s", self._place.replica, self._place.node, settings.folder)

    async def describe(self, work: Work) -> Facts | RequestError:
        """What the ingress has to know of the call's model, which is loaded; or why it cannot be.

        Args:
            work: :meth:`Work.about` the model, for the router.
        """
        try:
            async with self._using() as service:
                return self._facts(service)
        except Exception as error:
            return as_request_error(error)

    async def generate(self, work: Work) -> AsyncIterator[list[Part] | RequestError]:
        """Compute the generations of a request to the call's model, as :meth:`Answers.parts` does."""
        try:
            async with self._using() as service:
                backend = cast(InProcess, service.backend)

                def failed(error: Exception) -> None:
                    self._pool.note_failure(service, error)

                async with aclosing(self._answers.parts(backend, work, failed)) as computed:  # type: ignore[type-var]
                    async for parts in computed:
                        yield parts
        except Exception as error:
            yield as_request_error(error)

    async def embed(self, work: Work, pooling: Pooling | None, normalize: bool) -> F32 | RequestError:
        """Compute vectors of texts by the call's model, as :meth:`Answers.vectors` does."""
        try:
            async with self._using() as service:
                return await self._answers.vectors(cast(Model, service.model), work, pooling, normalize=normalize)
        except Exception as error:
            return as_request_error(error)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What this replica has to do, for :class:`~bitnet.server.ray.policy.TokenPolicy`."""
        return self._use().metrics()

    async def check_health(self) -> None:
        """Compute one token by the model that was used last, unless a request had one computed lately.

        Raises:
            DeviceError, RuntimeError: The device has failed; Serve then replaces this replica.
        """
        self._publisher.check()
        self._pool.look_at_files()
        loaded = [one for one in self._pool.models if one.service is not None]
        if loaded:
            latest = max(loaded, key=lambda one: one.used)
            assert latest.service is not None
            await self._answers.check(cast(Model, latest.service.model))

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[Service]:
        """Context with the call's model, which is downloaded if it is from the hub and not on this node."""
        name = serve.get_multiplexed_model_id()
        if name.startswith(PREFIX):
            await asyncio.to_thread(local_path, name, tell=log.info)
            name = name.removeprefix(PREFIX)
        async with self._pool.using(name) as service:
            yield service

    def _facts(self, service: Service) -> Facts:
        return self._place.facts(cast(Model, service.model), service.names[0])

    def _held(self) -> tuple[Held, Sequence[int]]:
        states, models, blocks = [], [], []
        for one in self._pool.models:
            model = model_hash(one.source.names[0])
            if one.loaded or one.loading is not None:
                models.append(model)
            if one.service is not None:
                found = cast(Model, one.service.model)
                states.append(State(self._facts(one.service), found.load()))
                blocks += short_hashes(found.cached_blocks(), model)
        return Held(tuple(states), self._answers.readings(self._use()), frozenset(models)), blocks

    def _use(self) -> Use:
        return Use.together([Use.of(one.model.load(), self._places) for one in self._pool.services()])
