"""The base of drivers that capture launches in graphs, CUDA's and HIP's."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bitnet.core.errors import DeviceLostError


class Graph:
    """A launchable graph. When it is garbage-collected, its handle is appended to ``dropped``."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any, dropped: list[Any]) -> None:
        self.handle = handle
        weakref.finalize(self, dropped.append, handle)


class CapturingDriver(ABC):
    """A driver that only one thread may use at a time, because a capture records everything on its stream."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._dropped: list[Any] = []

    @abstractmethod
    def _enter(self) -> None:
        """Make the device, or its context, current in this thread."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for all submitted work."""

    @abstractmethod
    def _destroy(self, graph: Any) -> None:
        """Destroy a graph that is no longer running."""

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Give this thread exclusive use of the device."""
        with self._lock:
            self._enter()
            yield

    @contextmanager
    def _ended(self) -> Iterator[bool]:
        """As :meth:`_entered`, after waiting for running work and destroying dropped graphs.

        Yields False for a lost device, whose driver no longer works; its memory is freed when the process ends.
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
