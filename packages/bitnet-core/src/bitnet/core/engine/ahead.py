"""A thread that waits for the device, so that its owner can do something else meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Ahead(Generic[_T]):
    """Runs one call at a time; the thread starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], _T] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def begin(self, call: Callable[[], _T]) -> None:
        """Start ``call``; :meth:`result` has to be asked for before the next."""
        if self.thread is None:
            arguments = self._calls, self._outcomes
            self.thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
            self.thread.start()
        self._calls.put(call)

    def result(self) -> _T:
        """Wait for the call, and return what it returned or raise what it raised."""
        value, error = self._outcomes.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Let the call that runs finish, and end the thread. Closing twice is allowed."""
        thread, self.thread = self.thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join()


def _work(
    calls: queue.SimpleQueue[Callable[[], _T] | None],
    outcomes: queue.SimpleQueue[tuple[_T | None, BaseException | None]],
) -> None:
    """The thread: it holds on to the queues only, not to their owner."""
    while (call := calls.get()) is not None:
        try:
            outcomes.put((call(), None))
        except BaseException as error:
            outcomes.put((None, error))
        del call
