"""Many callers, one engine: a thread that steps it while there is something to do.

Steps run in a thread of their own, not in a caller's, so that an interrupt (Ctrl-C) ends the caller's wait and
never a step half-way, and so that callers in different threads share steps.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from bitnet.core.engine.engine import Engine
from bitnet.core.engine.results import Update
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.errors import InvalidInputError

WAIT_SECONDS = 0.5
"""Seconds between checks for a signal where the platform cannot interrupt a wait."""


class Ticket:
    """A caller's end of submitted sequences: their updates, as they come."""

    def __init__(self, worker: Worker, sequences: Sequence[TokenSequence]) -> None:
        self._worker = worker
        self._news: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self._open = {s.number: s for s in sequences}

    def __iter__(self) -> Iterator[Update]:
        """Updates until every sequence has its result.

        Raises:
            DeviceError: The device failed; or whatever else the engine failed with.
            InvalidInputError: This is a fork of the process that has the engine's thread: no news comes here.
        """
        while self._open:
            self._worker.check_here()
            try:
                news = self._news.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if news is None:
                self._open.clear()
                raise self._worker.end()
            if news.result is not None:
                del self._open[news.sequence]
            yield news

    def cancel(self) -> None:
        """End what has not ended. The results so far come as updates."""
        if self._worker.elsewhere:  # the parent's generation goes on
            self._open.clear()
        if self._open:
            self._worker.cancel(tuple(self._open.values()))

    def put(self, news: Update | None) -> None:
        """For the worker; None: no more will come."""
        self._news.put(news)


class Worker:
    """Owns an engine: nothing else may call it, but for its ``prepare`` methods.

    Args:
        first: A context for the first step, in which drivers do what they have put off.
    """

    def __init__(self, engine: Engine, first: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.engine = engine
        self._around = first
        self._changed = threading.Condition()
        self._added: list[tuple[Sequence[TokenSequence], Ticket]] = []
        self._cancelled: list[TokenSequence] = []
        self._tickets: dict[int, Ticket] = {}
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None
        self._origin: TracebackType | None = None
        self._process = 0

    def submit(self, sequences: Sequence[TokenSequence]) -> Ticket:
        """Hand prepared sequences of one prompt to the engine.

        Raises:
            BitNetError: The worker is closed, its engine failed, or the process with its thread was forked.
        """
        return self.submit_all([sequences])[0]

    def submit_all(self, prompts: Sequence[Sequence[TokenSequence]]) -> list[Ticket]:
        """Hand several prompts' sequences to the engine at the same time, so that they share steps from the first on.

        Raises:
            BitNetError: As for :meth:`submit`.
        """
        self.check_here()
        tickets = [Ticket(self, sequences) for sequences in prompts]
        with self._changed:
            if self._end is not None:
                raise self.end()
            self._added += zip(prompts, tickets, strict=True)
            if self._thread is None:
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._loop, name="bitnet-engine", daemon=True)
                self._thread.start()
            self._changed.notify()
        return tickets

    def check_here(self) -> None:
        """Raise InvalidInputError in a fork of the process that owns the thread."""
        if self.elsewhere:
            raise InvalidInputError(
                "the model was used before this process was forked.", hint="Load it, or use it first, after that."
            )

    def cancel(self, sequences: Sequence[TokenSequence]) -> None:
        with self._changed:
            self._cancelled += sequences
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
                for update in updates:
                    self._deliver(update)
        except BaseException as error:
            with self._changed:
                if self._end is None:
                    self._end, self._origin = error, error.__traceback__
        for ticket in {*self._tickets.values(), *(ticket for _, ticket in self._added)}:
            ticket.put(None)

    def _take_in(self) -> bool:
        """Wait for something to do and bring in what callers asked for; False once closed."""
        with self._changed:
            while not (self._end or self._added or self._cancelled or self.engine.busy):
                self._changed.wait()
            if self._end is not None:
                return False
            added, self._added = self._added, []
            cancelled, self._cancelled = self._cancelled, []
            for sequences, ticket in added:
                self._tickets.update((s.number, ticket) for s in sequences)
        for sequences, _ in added:
            self.engine.add(sequences)
        for sequence in cancelled:
            update = self.engine.cancel(sequence)
            if update is not None:
                self._deliver(update)
        return True

    def _deliver(self, update: Update) -> None:
        ticket = self._tickets[update.sequence]
        if update.result is not None:
            del self._tickets[update.sequence]
        ticket.put(update)
