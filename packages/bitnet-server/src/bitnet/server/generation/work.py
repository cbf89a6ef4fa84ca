"""A request's generations as data: what is sent to the process that has the model, and what comes back from it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitnet.core import Chunk, Completion, Request
from bitnet.core.text.prompt import ChatTokens
from bitnet.server.generation.job import FILE_SECONDS, batches
from bitnet.server.models.backend import InProcess

if TYPE_CHECKING:
    from bitnet.core.engine.options import OptionArguments
    from bitnet.core.text.thinking import Thinking
    from bitnet.server.forms.structured import Form, InThread
    from bitnet.server.forms.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class Carried:
    """A form and token rules that the other process will apply; the form's source is data, not a function."""

    form: Form | None
    rules: TokenRules | None

    def close(self) -> None:
        """The other process frees what it made of them."""


async def carried(form: Form | None, rules: TokenRules | None, in_thread: InThread) -> Carried:
    """A form and token rules that can be sent to another process."""
    if form is not None and form[0] in ("tools", "lazy"):  # its source is a function
        form = ("lark" if form[0] == "tools" else "lazy", await in_thread(form[1]), form[2])
    return Carried(form, rules)


@dataclass(frozen=True, slots=True)
class Work:
    """The generations of one request.

    Attributes:
        prompts: Token ids, ``int32`` each.
        thinking: How thoughts are marked in the answers to each prompt; None: they are not.
        n: Number of continuations of each prompt.
        form: As in a job; its source is data, not a function.
        receipt: Whether a receipt of each is wanted.
    """

    prompts: tuple[array[int], ...]
    thinking: tuple[Thinking | None, ...]
    options: OptionArguments
    n: int
    form: Form | None
    rules: TokenRules | None
    receipt: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def work_arguments(
    prompts: Sequence[Sequence[int]], options: OptionArguments, n: int, restriction: Carried | None, receipt: bool
) -> dict[str, Any]:
    """The arguments of :class:`Work` for the arguments of a back end's ``submit``."""
    return {
        "prompts": tuple(array("i", prompt) for prompt in prompts),
        "thinking": tuple(getattr(prompt, "thinking", None) for prompt in prompts),
        "options": options,
        "n": n,
        "form": None if restriction is None else restriction.form,
        "rules": None if restriction is None else restriction.rules,
        "receipt": receipt,
    }


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of continuation ``index``; its last one comes with the completion, and the receipt if one is wanted."""

    index: int
    chunk: Chunk
    completion: Completion | None = None
    receipt: dict[str, Any] | None = None


class Continuation(AsyncIterator[Chunk]):
    """One continuation of a request that another process computes.

    Attributes:
        completion: The whole result, once the last chunk has been consumed.
        receipt: Its receipt, if one is wanted.
    """

    def __init__(self) -> None:
        self.completion: Completion | None = None
        self.receipt: dict[str, Any] | None = None
        self._ended = False

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        part = await self._next()
        if isinstance(part, BaseException):
            self._ended = True
            raise part
        if part.chunk.finish_reason is not None:
            self._ended = True
            self.completion, self.receipt = part.completion, part.receipt
        return part.chunk

    @abstractmethod
    async def _next(self) -> Part | BaseException:
        """The next part, or the error that ends the continuation."""


class Computation:
    """Work that is computed by the model of this process.

    Args:
        replica: As for :meth:`~bitnet.core.Model.receipt`.
    """

    def __init__(self, backend: InProcess, work: Work, replica: Mapping[str, str] | None = None) -> None:
        self._backend, self._work, self._replica = backend, work, replica
        self._requests: Sequence[Request] = ()
        self._cancelled = False

    def cancel(self) -> None:
        """End the generations; their last chunks come soon."""
        self._cancelled = True
        for request in self._requests:
            request.cancel()

    async def parts(self) -> AsyncGenerator[list[Part], None]:
        """The parts that are ready at the same time, together; first none, once the generations have begun.

        Raises:
            BitNetError: They cannot be begun, or the device or the model's file failed.
        """
        work, restriction = self._work, None
        try:
            if work.form is not None or work.rules is not None:
                restriction = await self._backend.restrict(work.form, work.rules, asyncio.to_thread)
            prompts = [ChatTokens(*prompt) for prompt in zip(work.prompts, work.thinking, strict=True)]
            self._requests = await asyncio.to_thread(
                lambda: self._backend.submit(prompts, work.options, n=work.n, restriction=restriction)
            )
            if self._cancelled:
                self.cancel()
            yield []
            async for batch in batches(self._requests):
                ends = any(chunk.finish_reason is not None for _, chunk in batch)
                self._backend.model.check_file(within=0.0 if ends else FILE_SECONDS)
                yield [await self._part(index, chunk) for index, chunk in batch]
        finally:
            self.cancel()
            if restriction is not None:
                restriction.close()

    async def _part(self, index: int, chunk: Chunk) -> Part:
        if chunk.finish_reason is None:
            return Part(index, chunk)
        request, receipt = self._requests[index], None
        if self._work.receipt and chunk.finish_reason not in ("cancelled", "failed"):
            receipt = await asyncio.to_thread(lambda: self._backend.receipt(request, self._replica))
        return Part(index, chunk, request.completion, receipt)
