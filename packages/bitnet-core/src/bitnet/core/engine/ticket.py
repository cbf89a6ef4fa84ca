"""A caller's end of a request: what the engine has for it, for a thread or for a task of an event loop."""

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
"""Seconds between checks for a signal where the platform cannot interrupt a wait."""


class Owner(Protocol):
    """What a ticket asks of the worker that gave it."""

    @property
    def elsewhere(self) -> bool: ...

    def check_here(self) -> None: ...

    def cancel(self, sequence: TokenSequence) -> None: ...

    def end(self) -> BaseException: ...


class Ticket:
    """A caller's end of one sequence: its updates, as they come, for a thread or for a task of an event loop."""

    def __init__(self, worker: Owner, sequence: TokenSequence) -> None:
        self._worker = worker
        self._news: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self._waiting: asyncio.Future[None] | None = None
        self._open = True
        self._awaited = False
        self._hushed = False
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
        """The next update; there is none after the sequence's result.

        Raises:
            DeviceError: The device failed; or whatever else the engine failed with.
            InvalidInputError: This is a fork of the process that has the engine's thread: no news comes here.
        """
        while self._open:
            self._worker.check_here()
            ended = self._ended
            with suppress(queue.Empty):
                return self._taken(self._news.get(timeout=0 if ended else WAIT_SECONDS))
            if ended:  # an interrupt came between the queue and here, and took the last news with it
                return self._taken(self._last)
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        """As :meth:`__next__`, for a task; one task may wait at a time, and a task that is cancelled loses no news.

        Raises:
            InvalidInputError: Another task waits, and one at a time may; or as for :meth:`__next__`.
        """
        import asyncio  # which takes long to import, and is there already where a task runs

        if self._awaited:
            raise InvalidInputError("another task waits for the same request.", hint="Read it in one task.")
        self._awaited = True
        try:
            while self._open:
                self._worker.check_here()
                # A future stands here before the queue is looked at, so news that comes in between wakes it.
                # The worker takes it from there when it wakes it.
                waiting = self._waiting = asyncio.get_running_loop().create_future()
                ended = self._ended
                with suppress(queue.Empty):
                    return self._taken(self._news.get_nowait())
                if ended:
                    return self._taken(self._last)
                await waiting
        finally:
            self._awaited = False
        raise StopAsyncIteration

    def _taken(self, news: Update | None) -> Update:
        self._open = news is not None and news.result is None
        if news is None:
            raise self._worker.end()
        return news

    def failure(self) -> BaseException:
        """Why no result came: what the last update raised in its place."""
        self._worker.check_here()
        return self._worker.end()

    def cancel(self) -> None:
        """End it if it has not ended. The result so far comes as an update."""
        if self._worker.elsewhere:  # the parent's generation goes on
            self._open = False
        if self._open:
            self._worker.cancel(self.sequence)

    def hush(self) -> None:
        """Leave out all updates from now on but the result: a thread that only waits for that is woken once."""
        self._hushed = True

    def put(self, news: Update | None) -> asyncio.Future[None] | None:
        """For the worker: ``news``, or None where no more will come. Returns what a task waits for, if one does."""
        if self._hushed and news is not None and news.result is None:
            return None
        self._news.put(news)
        if news is None or news.result is not None:
            self._last, self._ended = news, True
        waiting, self._waiting = self._waiting, None
        return waiting


def wake(futures: Iterable[asyncio.Future[None] | None]) -> None:
    """Let the tasks that wait for ``futures`` go on: one call into each event loop, however many wait there."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for future in futures:
        if future is not None:
            by_loop.setdefault(future.get_loop(), []).append(future)
    for loop, waiting in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(_finish, waiting)


def _finish(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
