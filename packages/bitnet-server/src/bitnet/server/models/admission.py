"""Which requests are let in: as many as there are places, and a queue."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bitnet.server.models.shared import Shared
from bitnet.server.request.errors import RequestError

MAX_RETRY = 60
"""Maximum seconds in ``Retry-After``."""


class Admission:
    """Counts the requests that run or wait.

    Attributes:
        draining: Whether the server is shutting down and lets nobody in.
        present: Number of requests that run or wait.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.draining = False
        self.present = 0
        self._seconds = 1.0  # recent average duration of a request

    @property
    def places(self) -> int:
        return self._shared.places

    @property
    def free(self) -> bool:
        """Whether a request that came now would run at once."""
        return not self.draining and self.present < self._shared.places

    def check_room(self) -> None:
        """Refuse a request that could not be admitted now, before its body is read.

        Raises:
            RequestError: The server is shutting down, or the queue is full.
        """
        if self.draining:
            raise RequestError(503, "The server is shutting down.", code="shutting_down", retry_after=5)
        limit = self._shared.places + self._shared.settings.max_queue
        if self.present >= limit:
            self._shared.metrics.refused.inc()
            raise RequestError(
                429,
                f"The queue is full: {self.present} requests run or wait, and the limit is {limit}. Try again later.",
                code="queue_full",
                retry_after=self.retry_after(),
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request from when its body has arrived to its end: bodies that do not end must not fill the queue.

        Raises:
            RequestError: As :meth:`check_room`.
        """
        self.check_room()
        self.present += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.present -= 1
            self._seconds += 0.1 * (time.monotonic() - began - self._seconds)

    def retry_after(self) -> int:
        """Estimated seconds until a place in the queue is free, from the recent duration of requests."""
        return max(1, min(MAX_RETRY, math.ceil(self._seconds / self._shared.places)))
