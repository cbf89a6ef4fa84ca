"""The server's application as Serve's ingress: everything of a request but its generations happens here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from bitnet.core.errors import BitNetError
from bitnet.core.hub import local_path
from bitnet.core.hub.names import PREFIX
from bitnet.core.model.default import default_model_path
from bitnet.server.http.app import App
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.presets import ModelSettings
from bitnet.server.models.service import Source
from bitnet.server.models.settings import Settings
from bitnet.server.models.state import State
from bitnet.server.ray.cluster import FULL
from bitnet.server.ray.engine_settings import EngineSettings
from bitnet.server.ray.gauges import ReplicaGauges
from bitnet.server.ray.index import MIRROR, PERIOD_SECONDS
from bitnet.server.ray.logs import share_log
from bitnet.server.ray.remote import RemoteModel, Replicas
from bitnet.server.ray.summary import model_hash
from bitnet.server.ray.work import Work
from bitnet.server.request.errors import RequestError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")

BY_GRPC: Any = {"_by_reference": False, "request_serialization": "pickle", "response_serialization": "pickle"}
"""How chunks come from a replica: by gRPC, as Ray's object store costs several times as much for each."""


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the application needs besides its replicas.

    Attributes:
        models: The names of each model, and how replicas load it, in the order of the engines' deployments.
        folder: The folder of models that the last deployment's replicas load on demand; None: there is none.
        i2s_layout: As for :func:`~bitnet.core.load_model`.
        local: Whether it listens on this machine only.
    """

    models: tuple[tuple[tuple[str, ...], EngineSettings], ...]
    settings: Settings
    local: bool
    folder: str | None = None
    i2s_layout: Any = "official"


@serve.ingress()
class Ingress:
    """The application, and what it knows of its replicas.

    Args:
        engines: The deployments of engines, one a model.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, given: IngressSettings, index: DeploymentHandle[Any], *engines: DeploymentHandle[Any]
    ) -> None:
        share_log()
        self._index, self._loop = index, asyncio.get_running_loop()
        self._models: dict[tuple[str, str], RemoteModel] = {}
        sources = []
        for (names, engine), handle in zip(given.models, engines, strict=False):
            path = await asyncio.to_thread(_path, engine.model)
            model = await asyncio.to_thread(RemoteModel, path, await handle.describe.remote(), given.i2s_layout)
            backend = self._replicas(model, handle.options(stream=True, **BY_GRPC))
            sources.append(Source(names, model.path, lambda backend=backend: backend, reloads=False))  # type: ignore[misc]
        catalog = None
        if given.folder is not None:
            catalog = Catalog(Path(given.folder), self._loader(given, engines[-1]))
        self._state = State(sources, replace(given.settings, max_memory=None), catalog)
        self._state.shared.metrics.add(ReplicaGauges(lambda: MIRROR.readings))
        self._state.pool.open()
        self._local = given.local
        self._following = asyncio.ensure_future(self._follow())

    def __serve_build_asgi_app__(self) -> Any:
        """The application, which Serve asks for once this object is made."""
        app = App(self._state, local=self._local)

        async def asgi(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, lambda: _received(receive), send)

        return asgi

    def check_health(self) -> None:
        """Check that prompts can be made.

        Raises:
            RuntimeError: They cannot; Serve then replaces this replica.
        """
        if self._state.shared.threads.stuck or self._following.done():
            raise RuntimeError("the application's threads are stuck")

    def _replicas(self, model: RemoteModel, handle: DeploymentHandle[Any]) -> Replicas:
        self._models[model.facts.deployment, model.facts.model] = model
        return Replicas(model, handle, self._loop)

    def _loader(
        self, given: IngressSettings, handle: DeploymentHandle[Any]
    ) -> Callable[[str, Path, ModelSettings], Replicas]:
        """Has a replica load one of the folder's models; for a thread beside the loop."""
        folder = Path(given.folder or "")

        async def asked(name: str, id: str) -> tuple[Any, DeploymentHandle[Any]]:
            of_model = handle.options(multiplexed_model_id=id)
            facts = await of_model.describe.remote(Work.about(model_hash(name)))
            return facts, of_model.options(stream=True, **BY_GRPC)

        def load(name: str, path: Path, settings: ModelSettings) -> Replicas:
            id = name if folder in path.parents else f"{PREFIX}{name}"
            try:
                facts, of_model = asyncio.run_coroutine_threadsafe(asked(name, id), self._loop).result()
            except (RayError, RayServeException) as error:
                raise BitNetError(f"the replica that was to load {name} ended: {error}") from None
            if isinstance(facts, RequestError):
                raise facts
            return self._replicas(RemoteModel(path, facts, given.i2s_layout), of_model)

        return load

    async def _follow(self) -> None:
        while True:
            try:
                MIRROR.update(await self._index.poll.remote(MIRROR.versions()))
                for (deployment, name), model in tuple(self._models.items()):
                    model.states = MIRROR.states(deployment, name)
            except Exception as error:  # until the index is back, requests are routed by load alone
                log.info("the index of prefixes does not answer: %s", error)
            await asyncio.sleep(PERIOD_SECONDS)


async def _received(receive: Callable[[], Awaitable[Any]]) -> Any:
    """A message from Serve's proxy.

    Raises:
        RequestError: It is so large that Ray stores it, and the object store is full.
    """
    try:
        return await receive()
    except FULL:
        raise RequestError(
            503,
            "The cluster's object store is full, and has no room for this request. Try again later.",
            code="object_store_full",
            retry_after=10,
        ) from None


def _path(model: str | None) -> Path:
    return default_model_path() if model is None else local_path(model, tell=log.info)
