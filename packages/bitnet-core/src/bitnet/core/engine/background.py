"""A helper thread for host work that runs while the engine's thread waits for the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class BackgroundThread:
    """Runs one call at a time in a thread that starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def begin(self, call: Callable[[], None]) -> None:
        """Start ``call``; :meth:`wait` must be called before the next ``begin``."""
        if self.thread is None:
            queues = self._calls, self._ends
            self.thread = threading.Thread(target=_work, args=queues, name=self._name, daemon=True)
            self.thread.start()
        self._calls.put(call)

    def wait(self) -> None:
        """Wait until the call is done, and raise what it raised."""
        if (error := self._ends.get()) is not None:
            raise error

    def close(self) -> None:
        """End the thread. Closing twice is allowed."""
        thread, self.thread = self.thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join()


def _work(calls: queue.SimpleQueue[Callable[[], None] | None], ends: queue.SimpleQueue[BaseException | None]) -> None:
    """The thread's loop. It refers to the queues only, so that their owner can be garbage-collected."""
    while (call := calls.get()) is not None:
        end: BaseException | None = None
        try:
            call()
        except BaseException as error:
            end = error
        del call
        ends.put(end)
