"""The server's application as Serve's ingress: everything of a request but its generations happens here."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve

from bitnet.core.hub import local_path
from bitnet.core.model.default import default_model_path
from bitnet.server.http.app import App
from bitnet.server.models.service import Source
from bitnet.server.models.settings import Settings
from bitnet.server.models.state import State
from bitnet.server.ray.engine_settings import EngineSettings
from bitnet.server.ray.index import MIRROR, PERIOD_SECONDS
from bitnet.server.ray.logs import share_log
from bitnet.server.ray.remote import RemoteModel, Replicas

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
        local: Whether it listens on this machine only.
    """

    models: tuple[tuple[tuple[str, ...], EngineSettings], ...]
    settings: Settings
    local: bool


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
        self._index = index
        self._models: list[RemoteModel] = []
        sources = []
        for (names, engine), handle in zip(given.models, engines, strict=True):
            model = await asyncio.to_thread(_model, engine, await handle.describe.remote())
            backend = Replicas(model, handle.options(stream=True, **BY_GRPC))
            self._models.append(model)
            sources.append(Source(names, model.path, lambda backend=backend: backend, reloads=False))  # type: ignore[misc]
        self._state = State(sources, given.settings)
        self._state.pool.open()
        self._local = given.local
        self._following = asyncio.ensure_future(self._follow())

    def __serve_build_asgi_app__(self) -> App:
        """The application, which Serve asks for once this object is made."""
        return App(self._state, local=self._local)

    def check_health(self) -> None:
        """Check that prompts can be made.

        Raises:
            RuntimeError: They cannot; Serve then replaces this replica.
        """
        if self._state.shared.threads.stuck or self._following.done():
            raise RuntimeError("the application's threads are stuck")

    async def _follow(self) -> None:
        while True:
            try:
                MIRROR.update(await self._index.poll.remote(MIRROR.versions()))
                for model in self._models:
                    model.states = MIRROR.states(model.facts.deployment)
            except Exception as error:  # until the index is back, requests are routed by load alone
                log.info("the index of prefixes does not answer: %s", error)
            await asyncio.sleep(PERIOD_SECONDS)


def _model(engine: EngineSettings, facts: Any) -> RemoteModel:
    path = default_model_path() if engine.model is None else local_path(engine.model, tell=log.info)
    return RemoteModel(path, facts, engine.options.get("i2s_layout", "official"))
