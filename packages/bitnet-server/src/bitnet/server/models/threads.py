"""The threads that do slow work outside the event loop: loading models, templates, tokenizers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from bitnet.core.support import system

T = TypeVar("T")

PROMPT_THREADS = 4
"""Number of threads that render templates and tokenize."""
STUCK_SECONDS = 5.0
"""Seconds of one call after which its thread counts as stuck."""


class PromptThreads(ThreadPoolExecutor):
    """The threads that render templates and tokenize.

    Attributes:
        began: When each of the running calls began, on :func:`time.monotonic`'s clock.
    """

    def __init__(self) -> None:
        super().__init__(PROMPT_THREADS, thread_name_prefix="bitnet-http")
        self.began: dict[int, float] = {}

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self, self._timed, call)

    def _timed(self, call: Callable[[], T]) -> T:
        me = threading.get_ident()
        self.began[me] = time.monotonic()
        try:
            return call()
        finally:
            del self.began[me]

    @property
    def stuck(self) -> bool:
        """Whether each thread has been in the same call for longer than :data:`STUCK_SECONDS`."""
        began = tuple(self.began.values())
        return len(began) == PROMPT_THREADS and time.monotonic() - max(began) > STUCK_SECONDS


def one_thread(name: str) -> Executor:
    """An executor with one thread; in a Python without threads, its calls run where they are submitted."""
    return ThreadPoolExecutor(1, thread_name_prefix=name) if system.THREADS else InCaller()


class InCaller(Executor):
    """Runs each call at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
