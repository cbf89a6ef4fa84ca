"""Runs a parsed request: submits it, answers as a stream or whole, and cancels it if the client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bitnet.core import Chunk, Completion
from bitnet.server.forms import structured
from bitnet.server.forms.token_rules import TokenRules
from bitnet.server.models.backend import Generation, Restriction
from bitnet.server.models.service import Service
from bitnet.server.request.call import Call, ClientGone, to_json
from bitnet.server.request.errors import RequestError, as_request_error

if TYPE_CHECKING:
    from bitnet.core.engine.options import OptionArguments

log = logging.getLogger("bitnet.server")
T = TypeVar("T")

SSE = "text/event-stream; charset=utf-8"
NDJSON = "application/x-ndjson"
Part = TypeVar("Part", Chunk, Completion)
PING = b": ping\n\n"
FILE_SECONDS = 0.5
"""Seconds between checks of a model's file while answers are streamed. The end of each answer is checked, too."""


@dataclass(frozen=True, slots=True)
class Result:
    """The continuations of a request, ``n`` for each prompt in order, and their receipts if requested."""

    completions: Sequence[Completion]
    n: int
    receipts: Sequence[dict[str, Any]] | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; each prompt counts once, however many continuations it has."""
        return sum(c.timings.prompt_tokens for c in self.completions[:: self.n])

    @property
    def cached_tokens(self) -> int:
        return sum(c.timings.cached_tokens for c in self.completions[:: self.n])

    @property
    def generated_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.completions)

    @property
    def reasoning_tokens(self) -> int:
        return sum(c.reasoning_tokens for c in self.completions)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of the request's prediction that were verified together with others, and that the model chose."""
        return sum(c.timings.accepted_prediction_tokens for c in self.completions)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens of the prediction that were verified, and that the model did not choose."""
        return sum(c.timings.prediction_tokens for c in self.completions) - self.accepted_prediction_tokens

    @property
    def devices(self) -> str:
        """Names of the devices that computed it."""
        return ", ".join(dict.fromkeys(name for c in self.completions for name in c.devices))


class Answer(Protocol):
    """Formats an answer as an API does. Events are bytes that are sent unchanged."""

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        """Events before the first chunk."""
        ...

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """Events for a chunk of continuation ``index``; its last chunk has a ``finish_reason``."""
        ...

    def end(self, result: Result) -> Iterable[bytes]:
        """Events after the last chunk."""
        ...

    def failed(self, error: RequestError) -> Iterable[bytes]:
        """Events that end a stream with an error."""
        ...

    def whole(self, result: Result) -> Any:
        """The answer as one JSON document."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request.

    Attributes:
        prompts: Makes the prompts' token ids; runs outside the event loop, as templates and tokenizers are slow.
        n: Number of continuations of each prompt.
        stream: Content type of a stream; None: one document.
        receipt: Whether the answer includes a receipt of each continuation.
        form: The format that the answer must have; None: any.
        rules: Which tokens it may hold; None: any.
        include_stop: Whether the stop string that ends an answer is part of its text.
        ignored: What the request asks for in vain, such as tools that this server does not run; a header names it.
        slot: The slot that keeps the last prompt's tokens and those of its last answer; None: none does.
    """

    prompts: Callable[[], Sequence[Sequence[int]]]
    options: OptionArguments
    answer: Answer
    n: int = 1
    stream: str | None = None
    receipt: bool = False
    form: structured.Form | None = None
    rules: TokenRules | None = None
    include_stop: bool = False
    ignored: Sequence[str] = ()
    slot: int | None = None


async def run(service: Service, call: Call, job: Job) -> None:
    """Answer a request.

    Raises:
        BitNetError: It cannot be answered; nothing has been sent yet.
        ClientGone: The client went away; its generations have ended.
    """
    ping = PING if job.stream == SSE else b""
    if job.stream is not None:
        call.begin_stream(job.stream)
    if job.ignored:
        call.add_header("x-bitnet-ignored", ", ".join(dict.fromkeys(job.ignored)))
    await call.watch(_Run(service, call, job)(), ping=ping)


class Background:
    """A request whose answer is sent to nobody, such as one that has been answered already."""

    def __init__(self, service: Service, call: Call, job: Job) -> None:
        self._run = _Run(service, call.detached(), job)

    async def __call__(self) -> None:
        """Compute it.

        Raises:
            BitNetError: It cannot be computed, or it was ended.
        """
        await self._run()

    def end(self, reason: RequestError) -> None:
        """End it; ``reason`` is raised where it is computed."""
        self._run.end(reason)


class _Run:
    """The state of one request in the engine."""

    def __init__(self, service: Service, call: Call, job: Job) -> None:
        self._service, self._call, self._job = service, call, job
        self._reason: RequestError | None = None
        self._requests: Sequence[Generation] = []
        self._restriction: Restriction | None = None
        self._awaited: asyncio.Future[Any] | None = None  # work that has not been submitted yet
        self._over = False
        self._prompt_tokens = 0
        self._last_prompt = array("i")

    async def __call__(self) -> None:
        job, service = self._job, self._service
        late = None
        if (until := self._call.until) is not None:
            seconds = max(0.0, until - time.monotonic())
            late = asyncio.get_running_loop().call_later(seconds, self.end, service.shared.too_late)
        try:
            with service.shared.running(self.end):
                await (self._stream() if job.stream is not None else self._whole())
        finally:
            if late is not None:
                late.cancel()
            self._over = True
            self._release()

    async def _submitted(self) -> None:
        """Submit the request, unless its deadline passes first."""
        await self._in_time(self._begun())
        if self._reason is not None:  # it was cancelled while its prompt was being made
            raise self._reason

    async def _begun(self) -> None:
        """Compile the form, make the prompt and submit it."""
        shared, job = self._service.shared, self._job
        if job.form is not None or job.rules is not None:
            self._restriction = await self._service.backend.restrict(job.form, job.rules, shared.in_thread)
        await shared.in_thread(self._submit)

    def _submit(self) -> None:
        if self._over:
            return
        job = self._job
        prompts = job.prompts()
        self._prompt_tokens = sum(map(len, prompts))
        if job.slot is not None:
            self._last_prompt = array("i", prompts[-1])
        self._requests = self._service.backend.submit(
            prompts, job.options, n=job.n, restriction=self._restriction, receipt=job.receipt, whole=job.stream is None
        )
        if self._over:  # the client went away meanwhile
            self._release()

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Await work, unless the request's deadline passes or the server ends it. The work itself may go on."""
        if self._reason is not None:
            raise self._reason
        self._awaited = task = asyncio.ensure_future(work)
        try:
            return await task
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            raise self._reason from None
        finally:
            self._awaited = None

    async def _made(self, make: Callable[[], T]) -> T:
        """A long part of the answer, made outside the event loop."""
        return await self._in_time(self._service.shared.in_thread(make))

    def end(self, reason: RequestError) -> None:
        self._reason = reason
        self._cancel()
        if self._awaited is not None:
            self._awaited.cancel()

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()

    def _release(self) -> None:
        self._cancel()
        if self._restriction is not None:
            self._restriction.close()

    async def _whole(self) -> None:
        await self._submitted()
        async for _ in _merged(self._requests):
            self._service.model.check_file(within=FILE_SECONDS)
        result = await self._result()
        self._call.add_header("x-bitnet-device", result.devices)
        whole = self._job.answer.whole
        if any(completion.prompt_logprobs is not None for completion in result.completions):  # they are long
            await self._call.reply(await self._made(lambda: to_json(whole(result))))
        else:
            await self._call.reply(whole(result))

    async def _stream(self) -> None:
        answer, call = self._job.answer, self._call
        begun = False
        try:
            await self._submitted()
            async for index, chunk in _merged(self._requests):
                self._service.model.check_file(within=FILE_SECONDS)
                events = [] if begun else [*answer.begin(self._prompt_tokens)]
                begun = True
                if chunk.finish_reason == "cancelled" and self._reason is not None:
                    raise self._reason
                if chunk.finish_reason == "failed":
                    completion = self._requests[index].completion
                    raise structured.failure(completion.stop_reason if completion else "")
                part = self._with_stop(chunk, self._requests[index].completion)
                if chunk.prompt_logprobs is None:
                    events += answer.piece(index, part)
                else:  # they are long
                    events += await self._made(partial(_events, answer, index, part))
                if events:
                    await call.write(b"".join(events))
            await call.write(b"".join(answer.end(await self._result())), more=False)
        except ClientGone:  # nobody is left to receive the error
            raise
        except Exception as error:
            if not call.started:
                raise
            self._service.owner.note_failure(self._service, error)
            reported = as_request_error(error)
            if reported is error and reported.status == 500:
                log.error("a stream failed: %s", reported)
            elif reported.status == 500:
                log.exception("a stream failed", exc_info=error)
            await call.write(b"".join(answer.failed(reported)), more=False)

    async def _result(self) -> Result:
        self._service.model.check_file()
        done = [request.completion for request in self._requests if request.completion is not None]
        for completion in done:
            self._service.shared.metrics.count(completion)
        if self._reason is not None:
            raise self._reason
        for completion in done:
            if completion.finish_reason == "failed":
                raise structured.failure(completion.stop_reason)
        receipts = None
        if self._job.receipt:  # the first one hashes the model's file
            make = self._service.backend.receipt
            receipts = await self._made(lambda: [make(request) for request in self._requests])
        self._service.loaded.proved = True
        if self._job.slot is not None:  # the last token of an answer is not in the KV cache
            self._service.slots[self._job.slot] = self._last_prompt + array("i", done[-1].tokens[:-1])
        return Result([self._with_stop(completion, completion) for completion in done], self._job.n, receipts)

    def _with_stop(self, part: Part, completion: Completion | None) -> Part:
        """The last chunk, or the whole of a completion, with the stop string that ended it, if that was asked for."""
        if not self._job.include_stop or completion is None or not isinstance(completion.stop_reason, str):
            return part
        return replace(part, text=part.text + completion.stop_reason) if part.finish_reason == "stop" else part


def _events(answer: Answer, index: int, chunk: Chunk) -> list[bytes]:
    return [*answer.piece(index, chunk)]


async def batches(requests: Sequence[Generation]) -> AsyncIterator[list[tuple[int, Chunk]]]:
    """The chunks of several requests in order of arrival, each with its request's index: all that have come since the
    batch before."""
    arrived: asyncio.Queue[tuple[int, Chunk | BaseException | None]] = asyncio.Queue()

    async def pass_on(index: int, request: Generation) -> None:
        try:
            async for chunk in request:
                arrived.put_nowait((index, chunk))
            arrived.put_nowait((index, None))
        except Exception as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.ensure_future(pass_on(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            batch = []
            items = [await arrived.get()]
            while not arrived.empty():
                items.append(arrived.get_nowait())
            for index, item in items:
                if isinstance(item, Chunk):
                    batch.append((index, item))
                    continue
                if batch:
                    yield batch
                    batch = []
                if item is not None:
                    raise item
                left -= 1
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()


async def _merged(requests: Sequence[Generation]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of several requests in order of arrival, each with its request's index."""
    if len(requests) == 1:
        async for chunk in requests[0]:
            yield 0, chunk
        return
    async for batch in batches(requests):
        for item in batch:
            yield item
