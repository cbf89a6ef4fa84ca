"""What all endpoints share: the model, its names, the bounds, and who runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from bitnet.core import Model, __version__
from bitnet.core.errors import DeviceError, ModelFileError, brief
from bitnet.server.errors import RequestError
from bitnet.server.metrics import Metrics
from bitnet.server.stored import Stored
from bitnet.server.structured import Compiler
from bitnet.server.tools import Tools, told

T = TypeVar("T")

HOST_THREADS = 4
"""Threads that render templates and tokenize, beside the event loop."""
MAX_RETRY = 60
"""Seconds of ``Retry-After`` at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the server is run.

    Attributes:
        names: Names that clients may call the model by, the one that answers carry first; empty: that of its file.
        api_keys: Keys, one of which a request must have; empty: none is asked for.
        max_queue: Requests that may wait besides those that run.
        max_seqs: Requests that run at the same time.
        max_body: Bytes of a body at most.
        timeout: Seconds that a request may take; None: any time.
        cors: Origins whose pages may call the server.
        page: Whether the page is served at ``/``.
        max_stored: Responses that are kept for ``previous_response_id``.
    """

    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_queue: int = 64
    max_seqs: int = 8
    max_body: int = 16 << 20
    timeout: float | None = None
    cors: tuple[str, ...] = ()
    page: bool = True
    max_stored: int = 256


class Service:
    """A model that answers requests over HTTP."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.names = settings.names or (model.path.stem,)
        self.created = int(time.time())
        self.metrics = Metrics(model, self.names[0])
        self.compiler = Compiler(model.tokenizer)
        self.stored = Stored(settings.max_stored)
        self.draining = False
        self.failure: BaseException | None = None
        self.present = 0
        self._seconds = 1.0  # a request takes, on average of late
        self._threads = ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="bitnet-http")
        self._running: set[Callable[[RequestError], None]] = set()
        self.headers = {"server": f"bitnet/{__version__}", "x-bitnet-device": model.device.name}

    @property
    def fingerprint(self) -> str:
        """What computed an answer, as OpenAI's ``system_fingerprint``."""
        return f"bitnet-{__version__}-{self.model.device.name}"

    @property
    def ready(self) -> bool:
        return not self.draining and self.failure is None

    def check_model(self, name: str | None, field: str = "model") -> None:
        """Raise where a request names another model."""
        if name is not None and name.removesuffix(":latest") not in self.names:
            raise RequestError(
                404,
                f"The model {brief(name)} is not here; {', '.join(self.names)} is.",
                field=field,
                code="model_not_found",
            )

    def chat_tokens(self, messages: Sequence[dict[str, Any]], tools: Tools | None = None) -> list[int]:
        """The prompt of a conversation. It takes its time: call it :meth:`in_thread`."""
        made, given = told(messages, tools, self.model.chat_template)
        self._check_length(sum(len(message["content"]) for message in made))
        return self.model.chat_tokens(made, tools=given)

    def text_tokens(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The tokens of a text. It takes its time: call it :meth:`in_thread`."""
        self._check_length(len(text))
        return self.model.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def _check_length(self, characters: int) -> None:
        """Refuse a text that cannot fit the context, however it is cut, before time is spent on cutting it."""
        context = self.model.context
        if characters > context and characters > context * self._longest_token:
            most = context * self._longest_token
            raise RequestError(
                400,
                f"The prompt has {characters:,} characters; {most:,} at most fit a context of {context} tokens.",
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token, which is as many characters at most."""
        tokenizer = self.model.tokenizer
        return max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request from its arrival to its end.

        Raises:
            RequestError: The server ends, its device failed, or as many requests are here as may be.
        """
        if self.draining:
            raise RequestError(503, "The server is shutting down.", code="shutting_down", retry_after=5)
        if self.failure is not None:
            raise RequestError(503, f"The model is not ready: {self.failure}", code="device_error", retry_after=5)
        most = self.settings.max_seqs + self.settings.max_queue
        if self.present >= most:
            self.metrics.refused.inc()
            raise RequestError(
                429,
                f"{self.present} requests run or wait; {most} may. Ask again later.",
                code="queue_full",
                retry_after=self.retry_after(),
            )
        self.present += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.present -= 1
            self._seconds += 0.1 * (time.monotonic() - began - self._seconds)

    def retry_after(self) -> int:
        """Seconds in which a place in the queue comes free, as requests have taken of late."""
        return max(1, min(MAX_RETRY, math.ceil(self._seconds / self.settings.max_seqs)))

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run what takes the host long, such as a template or a tokenizer, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @contextmanager
    def running(self, end: Callable[[RequestError], None]) -> Iterator[None]:
        """Inside, ``end`` is called with the reason where the server has to end what runs."""
        self._running.add(end)
        try:
            yield
        finally:
            self._running.discard(end)

    def end_all(self, reason: RequestError) -> None:
        """End every generation; its client is told why."""
        for end in tuple(self._running):
            end(reason)

    def note_failure(self, error: BaseException) -> None:
        """Remember an error after which the engine takes no more requests."""
        if isinstance(error, DeviceError | ModelFileError):
            self.failure = error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
