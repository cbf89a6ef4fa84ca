"""What the requests of all models share: settings, threads, counters, stored responses, and who is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from bitnet.server.models.metrics import Counted, Metrics
from bitnet.server.models.settings import Settings
from bitnet.server.models.stored import Stored
from bitnet.server.models.threads import PromptThreads
from bitnet.server.request.errors import RequestError, too_late

T = TypeVar("T")


class Shared:
    """What requests share, whichever model they ask.

    Args:
        loaded: Returns the models that are loaded.
    """

    def __init__(self, settings: Settings, loaded: Callable[[], Sequence[Counted]]) -> None:
        self.settings = settings
        self.metrics = Metrics(loaded)
        self.stored = Stored(settings.max_stored)
        self.threads = PromptThreads()
        self._loaded = loaded
        self._running: set[Callable[[RequestError], None]] = set()
        self._background: dict[str, Callable[[RequestError], None]] = {}

    @property
    def places(self) -> int:
        """Maximum concurrent requests: ``max_seqs`` on each device of the model with the most devices."""
        return self.settings.max_seqs * max((len(one.model.devices) for one in self._loaded()), default=1)

    @property
    def too_late(self) -> RequestError:
        """The error for a request that exceeded the timeout."""
        assert self.settings.timeout is not None
        return too_late(self.settings.timeout)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run slow work, such as a template or a tokenizer, outside the event loop."""
        return await self.threads.run(call)

    @contextmanager
    def running(self, end: Callable[[RequestError], None]) -> Iterator[None]:
        """In this context, ``end`` is called with the reason if the server must cancel running requests."""
        self._running.add(end)
        try:
            yield
        finally:
            self._running.discard(end)

    @contextmanager
    def in_background(self, id: str, end: Callable[[RequestError], None]) -> Iterator[None]:
        """In this context, :meth:`end_background` ends the response ``id``, which no client waits for."""
        self._background[id] = end
        try:
            yield
        finally:
            del self._background[id]

    def end_background(self, id: str, reason: RequestError) -> bool:
        """End a response that is computed in the background; False: it is not, or no longer."""
        end = self._background.get(id)
        if end is not None:
            end(reason)
        return end is not None

    def end_all(self, reason: RequestError) -> None:
        """Cancel every generation and tell its client why."""
        for end in tuple(self._running):
            end(reason)
