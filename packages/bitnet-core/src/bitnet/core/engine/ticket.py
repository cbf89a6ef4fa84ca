"""The caller's side of a request: receives the engine's updates in a thread or in an event loop's task."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from bitnet.core.engine.results import Update
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.errors import InvalidInputError

if TYPE_CHECKING:
    import asyncio

WAIT_SECONDS = 0.5
"""Seconds between checks for signals, on platforms where a wait cannot be interrupted."""


class Owner(Protocol):
    """The part of a worker that its tickets use."""

    @property
    def elsewhere(self) -> bool: ...

    def check_here(self) -> None: ...

    def check_thread(self) -> None: ...

    def cancel(self, sequence: TokenSequence) -> None: ...

    def end(self) -> BaseException: ...


class Ticket:
    """Iterates over one sequence's updates as they arrive, in a thread or in an event loop's task."""

    def __init__(self, worker: Owner, sequence: TokenSequence) -> None:
        self._worker = worker
        self._updates: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self._waiting: asyncio.Future[None] | None = None
        self._open = True
        self._awaited = False
        self._skips_chunks = False
        self._ended = False
        self._last: Update | None = None
        self.sequence = sequence

    @property
    def last(self) -> Update | None:
        """The update with the result, once it is there, whether or not it was taken."""
        return self._last

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        """The next update; the sequence's result is the last.

        Raises:
            DeviceError: The device failed. Any other error of the engine is raised as it is.
            InvalidInputError: This is a fork of the process with the engine's thread, so no updates arrive here; or the
                engine runs in a task, which a waiting thread would stop.
        """
        while self._open:
            self._worker.check_thread()
            ended = self._ended
            with suppress(queue.Empty):
                return self._taken(self._updates.get(timeout=0 if ended else WAIT_SECONDS))
            if ended:  # an interrupt came between the queue and here, and took the last update with it
                return self._taken(self._last)
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        """:meth:`__next__` for a task. One task may wait at a time; cancelling it loses no update.

        Raises:
            InvalidInputError: Another task is waiting already; or as for :meth:`__next__`.
        """
        import asyncio  # slow to import, and already imported if a task runs

        if self._awaited:
            raise InvalidInputError("another task waits for the same request.", hint="Read it in one task.")
        self._awaited = True
        try:
            while self._open:
                self._worker.check_here()
                ended = self._ended
                try:
                    return self._taken(self._updates.get_nowait())
                except queue.Empty:
                    if ended:
                        return self._taken(self._last)
                # The future is stored before the queue is looked at again, so an update that arrives in between wakes
                # it. The worker removes the future when it wakes it.
                waiting = self._waiting = asyncio.get_running_loop().create_future()
                if self._updates.empty() and not self._ended:
                    await waiting
        finally:
            self._awaited = False
        raise StopAsyncIteration

    def _taken(self, update: Update | None) -> Update:
        self._open = update is not None and update.result is None
        if update is None:
            raise self._worker.end()
        return update

    def failure(self) -> BaseException:
        """The error that came in place of a result."""
        self._worker.check_here()
        return self._worker.end()

    def cancel(self) -> None:
        """End the sequence if it has not ended. The result so far comes as an update."""
        if self._worker.elsewhere:  # a fork: the parent's generation continues
            self._open = False
        if self._open:
            self._worker.cancel(self.sequence)

    def skip_chunks(self) -> None:
        """From now on, skip all updates except the result, so that a thread waiting for the result is woken only
        once."""
        self._skips_chunks = True

    def put(self, update: Update | None) -> asyncio.Future[None] | None:
        """Called by the worker with an update, or None after the last. Returns the future that a task waits for, if
        any."""
        if self._skips_chunks and update is not None and update.result is None:
            return None
        self._updates.put(update)
        if update is None or update.result is not None:
            self._last, self._ended = update, True
        waiting, self._waiting = self._waiting, None
        return waiting


def wake(futures: Iterable[asyncio.Future[None] | None]) -> None:
    """Wake the tasks that wait for ``futures``, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for future in futures:
        if future is not None:
            by_loop.setdefault(future.get_loop(), []).append(future)
    for loop, waiting in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so no task waits there
            loop.call_soon_threadsafe(_finish, waiting)


def _finish(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
