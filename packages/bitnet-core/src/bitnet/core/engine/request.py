"""A generation in progress, as seen by its caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from bitnet.core.engine.results import Chunk, Completion, Update
from bitnet.core.engine.ticket import Ticket


class Request(Iterator[Chunk], AsyncIterator[Chunk]):
    """Iterates over the chunks of one generation as they are produced. Closing or dropping it ends the generation.

    Use ``for`` or ``async for``. If the engine fails, both raise its error, such as ``DeviceError``.

    Attributes:
        completion: The whole result, once the last chunk has been consumed or the request was closed; None before.
    """

    def __init__(self, owner: object, ticket: Ticket) -> None:
        self._owner = owner  # keeps the model alive, which would otherwise be closed
        self._ticket = ticket
        self.completion: Completion | None = None

    def __next__(self) -> Chunk:
        return self._chunk(next(self._ticket))

    async def __anext__(self) -> Chunk:
        return self._chunk(await anext(self._ticket))

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    def _chunk(self, update: Update) -> Chunk:
        if isinstance(update.result, Completion):
            self.completion = update.result
        assert update.chunk is not None
        return update.chunk

    def cancel(self) -> None:
        """End the generation soon; its last chunk still comes. May be called from any thread, and more than once."""
        self._ticket.cancel()

    def result(self) -> Completion:
        """Wait for the completion and discard further chunks. An interrupt meanwhile ends the generation."""
        self._ticket.hush()
        try:
            for _ in self:
                pass
        finally:
            self.cancel()
        if self.completion is None:  # an earlier call has raised the reason
            raise self._ticket.failure()
        return self.completion

    def close(self) -> None:
        """End the generation at its current token; ``completion`` then holds the result so far."""
        self.cancel()
        for _ in self:
            pass

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._ticket.cancel()
