"""The child's side of :mod:`bitnet.server.isolated.backend`: loads a model, and computes what the parent sends."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, suppress
from multiprocessing.connection import Client, Connection
from typing import Any

from bitnet.core import Model, load_model
from bitnet.core.errors import BitNetError
from bitnet.core.support import log
from bitnet.core.support.helper.loop import Data
from bitnet.core.support.helper.values import dumped, loaded
from bitnet.server.generation.work import Computation
from bitnet.server.isolated.facts import Facts, Texts
from bitnet.server.models.backend import InProcess
from bitnet.server.request.errors import as_request_error

_models: list[Model] = []


def prepare(setup: bytearray, ask: Any) -> None:
    """Log as the parent does."""
    log.adopt(setup)


def answer(request: bytearray) -> Data:
    """Load a model and connect to the parent: the model's facts, or the error. Empty for an empty request, by which the
    parent asks whether this process still runs."""
    if not request:
        return b""
    address, token, path, options = loaded(request)
    try:
        model = load_model(path, **options)
    except BitNetError as error:
        return dumped(error)
    _models.append(model)
    connection: Any = Client(address)
    connection.send_bytes(token)
    threading.Thread(target=lambda: asyncio.run(_Served(model, connection).serve()), daemon=True).start()
    return dumped(Facts(model.context, model.cache_bytes, model.devices, model.selection, model.load()))


def finish() -> None:
    """Close the model."""
    for model in _models:
        model.close()


def _sendable(error: Exception) -> BaseException:
    """The error as the parent is told of it; one that is no answer to the request is logged."""
    if isinstance(error, BitNetError):
        return error
    log.logger.exception("a request failed", exc_info=error)
    return as_request_error(error)


class _Served:
    """Computes work that arrives with a number; a number without work cancels it."""

    def __init__(self, model: Model, connection: Connection) -> None:
        self._model, self._connection = model, connection
        self._backend = InProcess(model)
        self._running: dict[int, Computation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def read() -> None:
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(arrived.put_nowait, self._connection.recv())

        threading.Thread(target=read, daemon=True).start()
        while True:
            number, work = await arrived.get()
            if work is None:
                if (running := self._running.get(number)) is not None:
                    running.cancel()
                continue
            if isinstance(work, Texts):
                task = asyncio.ensure_future(self._embed(number, work))
            else:
                self._running[number] = Computation(self._backend, work)
                task = asyncio.ensure_future(self._compute(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _compute(self, number: int) -> None:
        """Send the parts of an answer as they come, and at the end None or the error."""
        end: BaseException | None = None
        try:
            async with aclosing(self._running[number].parts()) as computed:
                async for parts in computed:
                    self._send(number, parts)
        except Exception as error:
            end = _sendable(error)
        del self._running[number]
        self._send(number, end)

    async def _embed(self, number: int, texts: Texts) -> None:
        """Send the vectors of texts, or the error."""
        try:
            given = [*texts.tokens]
            rows: Any = await asyncio.to_thread(
                lambda: self._model.embed(given, pooling=texts.pooling, normalize=texts.normalize)
            )
        except Exception as error:
            rows = _sendable(error)
        self._send(number, rows)

    def _send(self, number: int, value: Any) -> None:
        with suppress(OSError):  # the parent has ended, and this process will
            self._connection.send((number, value, self._model.load()))
