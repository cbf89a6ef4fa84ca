"""Serve a model over HTTP: ``bitnet serve``, or an ASGI application to host elsewhere.

::

    from bitnet.core import load_model
    from bitnet.server import Settings, create_app

    app = create_app(load_model("model.gguf"), Settings(api_keys=("secret",)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet.core import Model
    from bitnet.server.http.app import App
    from bitnet.server.models.settings import Settings

__all__ = ["Settings", "create_app"]


def create_app(model: Model, settings: Settings | None = None) -> App:
    """The ASGI application that serves a model.

    Args:
        model: The caller must close it.
    """
    from bitnet.server.http.app import App
    from bitnet.server.models.service import Source
    from bitnet.server.models.settings import Settings
    from bitnet.server.models.state import State

    settings = settings or Settings()
    state = State([Source(settings.names or (model.path.stem,), model.path, lambda: model, reloads=False)], settings)
    state.pool.open()
    return App(state)


def __getattr__(name: str) -> Any:
    if name == "Settings":
        from bitnet.server.models.settings import Settings

        return Settings
    raise AttributeError(f"module 'bitnet.server' has no attribute {name!r}")
