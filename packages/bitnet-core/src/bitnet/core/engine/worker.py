"""Many callers, one engine: a thread that steps it while there is something to do.

Steps run in a thread of their own, not in a caller's, so that an interrupt (Ctrl-C) ends the caller's wait and
never a step half-way, and so that callers in different threads share steps.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from bitnet.core.engine.engine import Engine
from bitnet.core.engine.results import Update
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.errors import InvalidInputError, QueueFullError

if TYPE_CHECKING:
    import asyncio

WAIT_SECONDS = 0.5
"""Seconds between checks for a signal where the platform cannot interrupt a wait."""


class Ticket:
    """A caller's end of one sequence: its updates, as they come, for a thread or for a task of an event loop."""

    def __init__(self, worker: Worker, sequence: TokenSequence) -> None:
        self._worker = worker
        self._news: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self._waiting: asyncio.Future[None] | None = None
        self._open = True
        self.sequence = sequence

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
            with suppress(queue.Empty):
                return self._taken(self._news.get(timeout=WAIT_SECONDS))
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        """As :meth:`__next__`, for a task; one task may wait at a time, and a task that is cancelled loses no news."""
        import asyncio  # which takes long to import, and is there already where a task runs

        while self._open:
            self._worker.check_here()
            # A future stands here before the queue is looked at, so news that comes in between wakes it.
            self._waiting = asyncio.get_running_loop().create_future()
            with suppress(queue.Empty):
                return self._taken(self._news.get_nowait())
            await self._waiting
        raise StopAsyncIteration

    def _taken(self, news: Update | None) -> Update:
        self._open = news is not None and news.result is None
        if news is None:
            raise self._worker.end()
        return news

    def cancel(self) -> None:
        """End it if it has not ended. The result so far comes as an update."""
        if self._worker.elsewhere:  # the parent's generation goes on
            self._open = False
        if self._open:
            self._worker.cancel(self.sequence)

    def put(self, news: Update | None) -> asyncio.Future[None] | None:
        """For the worker: ``news``, or None where no more will come. Returns what a task waits for, if one does."""
        self._news.put(news)
        waiting, self._waiting = self._waiting, None
        return waiting


def _wake(futures: Iterable[asyncio.Future[None] | None]) -> None:
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


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do now.

    Attributes:
        running: Requests that take part in steps.
        waiting: Requests that wait for a place, and those preempted.
        waiting_tokens: Prompt tokens of the waiting ones.
        kv_blocks: Blocks of the KV cache.
        kv_used: Blocks that requests hold.
        kv_cached: Blocks that no request holds but whose content can be used again.
        block_size: Positions in a block.
    """

    running: int
    waiting: int
    waiting_tokens: int
    kv_blocks: int
    kv_used: int
    kv_cached: int
    block_size: int


class Worker:
    """Owns an engine: nothing else may call it, but for its ``prepare`` methods.

    Args:
        first: A context for the first step, in which drivers do what they have put off.
        max_queue: Requests that may wait besides those that run; None: any number.
        max_queue_tokens: Prompt tokens that may wait; None: any number. One request may always wait.
    """

    def __init__(
        self,
        engine: Engine,
        first: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        max_queue: int | None = None,
        max_queue_tokens: int | None = None,
    ) -> None:
        for name, most in (("max_queue", max_queue), ("max_queue_tokens", max_queue_tokens)):
            if most is not None and most < 0:
                raise InvalidInputError(f"{name} is {most}; it must be an integer ≥ 0, or None.")
        self.engine = engine
        self._max_queue, self._max_queue_tokens = max_queue, max_queue_tokens
        self._around = first
        self._changed = threading.Condition()
        self._added: list[Sequence[TokenSequence]] = []
        self._cancelled: list[TokenSequence] = []
        self._tickets: dict[int, Ticket] = {}
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None
        self._origin: TracebackType | None = None
        self._process = 0

    def submit(self, sequence: TokenSequence) -> Ticket:
        """Hand a prepared sequence to the engine.

        Raises:
            QueueFullError: As many requests or prompt tokens wait as may.
            BitNetError: The worker is closed, its engine failed, or the process with its thread was forked.
        """
        return self.submit_all([[sequence]])[0]

    def submit_all(self, prompts: Sequence[Sequence[TokenSequence]]) -> list[Ticket]:
        """Hand several prompts' sequences to the engine at the same time, so that they share steps from the first on.

        Returns:
            A ticket for each sequence: those of the first prompt, then the next.

        Raises:
            QueueFullError, BitNetError: As for :meth:`submit`. Either all are taken or none.
        """
        self.check_here()
        with self._changed:
            if self._end is not None:
                raise self.end()
            self._check_room(prompts)
            tickets = [Ticket(self, sequence) for sequences in prompts for sequence in sequences]
            self._tickets.update((ticket.sequence.number, ticket) for ticket in tickets)
            self._added += prompts
            if self._thread is None:
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._loop, name="bitnet-engine", daemon=True)
                self._thread.start()
            self._changed.notify()
        return tickets

    def load(self) -> Load:
        """What there is to do now."""
        with self._changed:
            waiting = self._waiting()
            running = len(self._tickets) - len(waiting)
        pool = self.engine.pool
        return Load(
            running=running,
            waiting=len(waiting),
            waiting_tokens=sum(len(s.tokens) for s in waiting),
            kv_blocks=pool.size,
            kv_used=pool.size - pool.available,
            kv_cached=pool.idle,
            block_size=self.engine.kv.block_size,
        )

    def _waiting(self) -> list[TokenSequence]:
        return [ticket.sequence for ticket in self._tickets.values() if ticket.sequence.table is None]

    def _check_room(self, prompts: Sequence[Sequence[TokenSequence]]) -> None:
        """Raise QueueFullError where ``prompts`` are too many for the queue. A prompt's tokens count once."""
        if self._max_queue is not None:
            most = self.engine.limits.max_seqs + self._max_queue
            if len(self._tickets) + sum(map(len, prompts)) > most:
                raise QueueFullError(
                    f"{len(self._tickets)} requests run or wait; {most} may.",
                    hint="Ask again later, or raise max_queue.",
                )
        if self._max_queue_tokens is not None and (waiting := self._waiting()):
            tokens = sum(len(s.tokens) for s in waiting)
            if tokens + sum(len(sequences[0].tokens) for sequences in prompts) > self._max_queue_tokens:
                raise QueueFullError(
                    f"{tokens} prompt tokens wait; {self._max_queue_tokens} may.",
                    hint="Ask again later, or raise max_queue_tokens.",
                )

    def check_here(self) -> None:
        """Raise InvalidInputError in a fork of the process that owns the thread."""
        if self.elsewhere:
            raise InvalidInputError(
                "the model was used before this process was forked.", hint="Load it, or use it first, after that."
            )

    def cancel(self, sequence: TokenSequence) -> None:
        with self._changed:
            self._cancelled.append(sequence)
            self._changed.notify()

    def end(self) -> BaseException:
        """Why no more requests are taken; anew from where it came, as each ``raise`` adds its callers to an error."""
        assert self._end is not None
        return self._end.with_traceback(self._origin)

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that has the thread. Locks that it held then are never free here."""
        return self._thread is not None and os.getpid() != self._process

    @property
    def runs_this(self) -> bool:
        """Whether the caller is the thread that steps the engine; it cannot wait for its own end."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Finish the step that runs and end every request with an error. Closing twice is allowed."""
        with self._changed:
            if self._end is None:
                self._end = InvalidInputError("the model is closed.")
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread.is_alive():  # an interrupt may have come before it was started
            thread.join()

    def _loop(self) -> None:
        try:
            while self._take_in():
                with self._around():
                    updates = self.engine.step()
                self._around = nullcontext
                self._deliver(updates)
        except BaseException as error:
            with self._changed:
                if self._end is None:
                    self._end, self._origin = error, error.__traceback__
        with self._changed:
            tickets, self._tickets = self._tickets, {}
        _wake([ticket.put(None) for ticket in tickets.values()])

    def _take_in(self) -> bool:
        """Wait for something to do and bring in what callers asked for; False once closed."""
        with self._changed:
            while not (self._end or self._added or self._cancelled or self.engine.busy):
                self._changed.wait()
            if self._end is not None:
                return False
            added, self._added = self._added, []
            cancelled, self._cancelled = self._cancelled, []
        for sequences in added:
            self.engine.add(sequences)
        self._deliver([update for sequence in cancelled if (update := self.engine.cancel(sequence)) is not None])
        return True

    def _deliver(self, updates: Sequence[Update]) -> None:
        with self._changed:
            tickets = [self._tickets[update.sequence] for update in updates]
            for update in updates:
                if update.result is not None:
                    del self._tickets[update.sequence]
        _wake([ticket.put(update) for ticket, update in zip(tickets, updates, strict=True)])
