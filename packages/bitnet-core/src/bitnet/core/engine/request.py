"""A generation in progress, as its caller sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from bitnet.core.engine.results import Chunk, Completion, Update
from bitnet.core.engine.ticket import Ticket


class Request(Iterator[Chunk], AsyncIterator[Chunk]):
    """Chunks of one generation, as they come: ``for`` or ``async for``. Closing or dropping it ends the generation.

    Both raise the error that the engine failed with, such as ``DeviceError``.

    Attributes:
        completion: The whole result, once the last chunk has been taken, or the request was closed.
    """

    def __init__(self, owner: object, ticket: Ticket) -> None:
        self._owner = owner  # the model, which would be closed if nobody held it
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
        """The completion, once it is there, and no more chunks. An interrupt meanwhile ends the generation."""
        self._ticket.hush()
        try:
            for _ in self:
                pass
        finally:
            self.cancel()
        if self.completion is None:  # an earlier call was told why
            raise self._ticket.failure()
        return self.completion

    def close(self) -> None:
        """End the generation where it is; ``completion`` then holds what there is of it."""
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
