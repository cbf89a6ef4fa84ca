"""A generation in progress, as seen by its caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from bitnet.core.engine.results import Chunk, Completion, Update
from bitnet.core.engine.ticket import Ticket
from bitnet.core.errors import BitNetError


class Request(Iterator[Chunk], AsyncIterator[Chunk]):
    """Iterates over the chunks of one generation as they are produced, with ``for``, or ``async for`` in one task.

    If the engine fails, both raise its error, such as ``DeviceError``. Closing or dropping the request ends the
    generation; ``with`` and ``async with`` close it.

    Attributes:
        completion: The whole result, once the last chunk has been consumed or the request was closed; None if the
            engine failed, or the model was closed, before that.
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

    def _settle(self) -> None:
        """Note the completion, as an interrupt may have come just before."""
        last = self._ticket.last
        if last is not None and isinstance(last.result, Completion):
            self.completion = last.result

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
        self._ticket.skip_chunks()
        try:
            for _ in self:
                pass
        finally:
            self.cancel()
        return self._completed()

    def __await__(self) -> Generator[Any, None, Completion]:
        """As :meth:`result`, for a task: ``completion = await model.stream(prompt)``."""
        return self._result().__await__()

    async def _result(self) -> Completion:
        self._ticket.skip_chunks()
        try:
            async for _ in self:
                pass
        finally:
            self.cancel()
        return self._completed()

    def _completed(self) -> Completion:
        self._settle()
        if self.completion is None:  # an earlier call has raised the reason
            raise self._ticket.failure()
        return self.completion

    def close(self) -> None:
        """End the generation at its current token; ``completion`` then holds the result so far. No error is raised."""
        self.cancel()
        with suppress(BitNetError):  # its caller wants no more of it, and may be on the way out with another error
            for _ in self:
                pass
        self._settle()

    async def aclose(self) -> None:
        """As :meth:`close`, for a task: other tasks run while the step that computes it ends."""
        self.cancel()
        with suppress(BitNetError):
            async for _ in self:
                pass
        self._settle()

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Request:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a request cannot be pickled or copied: it runs on a device. Its completion can be.")

    def __del__(self) -> None:
        self._ticket.cancel()
