"""What drivers share that capture launches in graphs, as CUDA's and HIP's do."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bitnet.core.errors import DeviceLostError


class Graph:
    """A graph to launch, whose handle goes to ``dropped`` once nobody has this any more."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any, dropped: list[Any]) -> None:
        self.handle = handle
        weakref.finalize(self, dropped.append, handle)


class CapturingDriver(ABC):
    """A driver that one thread uses at a time, as a capture takes all that its stream is given."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._dropped: list[Any] = []

    @abstractmethod
    def _enter(self) -> None:
        """Make the device, or its context, this thread's."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for all that was submitted."""

    @abstractmethod
    def _destroy(self, graph: Any) -> None:
        """Destroy a graph, of which nothing runs any more."""

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Have the device to this thread alone."""
        with self._lock:
            self._enter()
            yield

    @contextmanager
    def _ended(self) -> Iterator[bool]:
        """As :meth:`_entered`, when nothing runs any more and the graphs that nobody has are destroyed.

        False on a lost device, whose driver does no more: the end of the process gives back what is on it.
        """
        with self._lock:
            alive = True
            try:
                self._enter()
                self._wait()
                while self._dropped:
                    self._destroy(self._dropped.pop())
            except DeviceLostError:
                alive = False
            yield alive
