"""The server in a browser's worker: its ASGI application over the models of a folder, with messages in place of HTTP.

Pyodide runs this. ``engine/worker.js`` makes an :class:`Engine` and passes on what the page asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bitnet.core import Model, load_model_async

if TYPE_CHECKING:
    from bitnet.server.models.presets import ModelSettings
    from bitnet.server.request.call import Scope


@contextmanager
def _tls_named() -> Iterator[None]:
    """In this context there is a module ``ssl`` with nothing in it but names. A browser's Python has none, and
    ``prometheus_client``, which could serve by HTTPS, imports it."""
    module = ModuleType("ssl")
    vars(module)["__getattr__"] = lambda name: object
    sys.modules["ssl"] = module
    try:
        yield
    finally:
        del sys.modules["ssl"]


if sys.platform == "emscripten":
    with _tls_named():
        import prometheus_client  # noqa: F401

from bitnet.server.http.app import App  # noqa: E402
from bitnet.server.models.catalog import Catalog  # noqa: E402
from bitnet.server.models.settings import Settings  # noqa: E402
from bitnet.server.models.state import State  # noqa: E402
from bitnet.server.request.errors import RequestError  # noqa: E402

Head = Callable[[int, str], None]
"""Takes the status of an answer, and its headers as JSON: a list of pairs."""
Piece = Callable[[bytes], None]
"""Takes a piece of an answer's body."""


class Engine:
    """Answers requests with the models of a folder, each loaded by the first request for it.

    Args:
        folder: Its GGUF files are the models.
        device: As for :func:`bitnet.core.load_model_async`.
        context: Maximum tokens of a conversation; None: as the model has it.
        progress: Called with the number of kernels that have compiled, and with that of all so far.
    """

    def __init__(
        self, folder: str, device: str | None, context: int | None, progress: Callable[[int, int], None]
    ) -> None:
        self._device, self._context, self._progress = device, context, progress
        # One reader asks for one answer at a time, and a GPU then compiles no kernels of larger steps.
        self._state = State([], Settings(page=False, max_seqs=1), Catalog(Path(folder), self._load))
        self._app = App(self._state)
        self._gone: dict[int, asyncio.Event] = {}

    def _load(self, name: str, path: Path, settings: ModelSettings) -> Awaitable[Model]:
        return load_model_async(path, device=self._device, context=self._context, max_seqs=1, progress=self._progress)

    async def load(self, name: str) -> str:
        """Load a model now; returns the name of its device.

        Raises:
            RequestError: It cannot be loaded; the message says why.
        """
        pool = self._state.pool
        try:
            async with pool.using(name) as service:
                return service.devices
        except RequestError as error:
            found = pool.listing.lookup(name)
            if found is None or found.model.problem is None:
                raise
            raise RequestError(error.status, found.model.problem) from None

    async def answer(
        self, number: int, method: str, address: str, headers: str, body: Any, head: Head, piece: Piece
    ) -> None:
        """Answer a request.

        Args:
            number: By which :meth:`leave` names it.
            address: Its path, with what follows a ``?``.
            headers: As JSON: a list of pairs.
            body: Its bytes, or None.
        """
        path, _, query = address.partition("?")
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in json.loads(headers)],
        }
        gone = self._gone[number] = asyncio.Event()
        pending = [{"type": "http.request", "body": b"" if body is None else bytes(body)}]

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                found = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                head(message["status"], json.dumps(found))
            elif message["body"]:
                piece(message["body"])

        try:
            await self._app(scope, receive, send)
        finally:
            del self._gone[number]

    def leave(self, number: int) -> None:
        """End a request whose answer nobody awaits any more."""
        if (gone := self._gone.get(number)) is not None:
            gone.set()


class Digest:
    """A SHA-256 of pieces that come from JavaScript."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, piece: Any) -> None:
        self._digest.update(piece.to_py())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
