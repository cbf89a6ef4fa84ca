"""State shared by all requests: models, which are loaded on demand, limits, and running requests."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import TypeVar

from bitnet.core import __version__
from bitnet.core.errors import BitNetError, DeviceError, ModelFileError, brief
from bitnet.core.support.garbage import give_back, set_aside
from bitnet.server.models.metrics import Metrics
from bitnet.server.models.service import Service, Settings, Source
from bitnet.server.models.slot import Slot
from bitnet.server.models.stored import Stored
from bitnet.server.request.bodies import Bodies
from bitnet.server.request.errors import RequestError, as_request_error, too_late

log = logging.getLogger("bitnet.server")

T = TypeVar("T")

HOST_THREADS = 4
"""Number of threads that render templates and tokenize, outside the event loop."""
STUCK_SECONDS = 5.0
"""Seconds of one call after which its thread counts as stuck."""
MAX_RETRY = 60
"""Maximum seconds in ``Retry-After``."""
ROOM_SECONDS = 30.0
"""Seconds that a request waits for other models' requests to end if its model needs their memory."""
END_SECONDS = 10.0
"""Seconds before a failed device is closed, in which its requests can receive the error."""
SETTLE_SECONDS = 1.0
"""Seconds for which a file must not have changed before it is loaded again."""


class HostThreads(ThreadPoolExecutor):
    """The threads that render templates and tokenize.

    Attributes:
        began: When each of the running calls began, on :func:`time.monotonic`'s clock.
    """

    def __init__(self) -> None:
        super().__init__(HOST_THREADS, thread_name_prefix="bitnet-http")
        self.began: dict[int, float] = {}

    def timed(self, call: Callable[[], T]) -> T:
        """Run a call in one of the threads."""
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
        return len(began) == HOST_THREADS and time.monotonic() - max(began) > STUCK_SECONDS


class Host:
    """The models of a server, and the limits that apply to all of them together.

    Args:
        sources: The models; the first is the default for requests that name none.
    """

    def __init__(self, sources: Sequence[Source], settings: Settings) -> None:
        self.settings = settings
        self.slots = [Slot(source) for source in sources]
        self.metrics = Metrics(self.services)
        self.stored = Stored(settings.max_stored)
        self.bodies = Bodies(settings.max_body)
        self.draining = False
        self.present = 0
        self._seconds = 1.0  # recent average duration of a request
        self._threads = HostThreads()
        self._running: set[Callable[[RequestError], None]] = set()
        self._released = asyncio.Event()
        self._room: AbstractAsyncContextManager[object] = nullcontext()
        """Held while making room and loading a model, so that two loads do not count on the same memory."""
        if settings.max_memory is not None:
            self._room = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Load the first model, before the event loop starts.

        Raises:
            BitNetError: It cannot be loaded, or some model's file alone takes more memory than is allowed.
        """
        for slot in self.slots:
            self.settings.check_memory(slot.source.names[0], slot.size)
        self._took(self.slots[0], self._load(self.slots[0]))

    def services(self) -> list[Service]:
        """The models that are loaded."""
        return [slot.service for slot in tuple(self.slots) if slot.service is not None]

    @property
    def places(self) -> int:
        """Maximum concurrent requests: ``max_seqs`` on each device of the model with the most devices."""
        return self.settings.max_seqs * max((len(service.model.devices) for service in self.services()), default=1)

    @property
    def names(self) -> list[str]:
        return [name for slot in self.slots for name in slot.source.names]

    @property
    def failure(self) -> str | None:
        """Why some model cannot answer, if any."""
        return next((slot.failure for slot in self.slots if slot.failure is not None), None)

    def look_at_files(self) -> None:
        """Take models out of service whose files have changed since they were loaded."""
        for service in self.services():
            try:
                service.model.check_file()
            except ModelFileError as error:
                self.note_failure(service, error)

    @property
    def ready(self) -> bool:
        return not self.draining and self.failure is None and not self.stuck

    @property
    def stuck(self) -> bool:
        """Whether all threads for prompts are held up."""
        return self._threads.stuck

    def slot(self, name: str | None, field: str = "model") -> Slot:
        """The slot of the model that a request names.

        Raises:
            RequestError: There is no model with that name.
        """
        if name is None:
            return self.slots[0]
        for slot in self.slots:
            if name in slot.source.names or name.removesuffix(":latest") in slot.source.names:
                return slot
        here = self.names
        are = f"{', '.join(here)} {'is' if len(here) == 1 else 'are'}"
        raise RequestError(404, f"The model {brief(name)} is not here; {are}.", field=field, code="model_not_found")

    @property
    def too_late(self) -> RequestError:
        """The error for a request that exceeded the timeout."""
        assert self.settings.timeout is not None
        return too_late(self.settings.timeout)

    @asynccontextmanager
    async def using(self, name: str | None, field: str = "model", until: float | None = None) -> AsyncIterator[Service]:
        """Context with the model that a request names. It is loaded if necessary and stays loaded in the context.

        Args:
            until: Deadline for loading it, on :func:`time.monotonic`'s clock; None: no deadline.

        Raises:
            RequestError: There is no such model, it failed or cannot be loaded, or memory or time did not suffice.
        """
        slot = self.slot(name, field)
        slot.waiting += 1
        try:
            service = await self._ready(slot, until)
            service.users += 1
        finally:
            slot.waiting -= 1
            self._released.set()
        slot.used = time.monotonic()
        try:
            yield service
        except (DeviceError, ModelFileError) as error:
            self.note_failure(service, error)
            raise
        finally:
            service.users -= 1
            self._released.set()
            if service.retired and not service.users:
                slot.thread.submit(service.close)

    def current(self) -> str:
        """The name of the most recently requested model."""
        return max(self.slots, key=lambda slot: (slot.loaded, slot.used)).source.names[0]

    async def _ready(self, slot: Slot, until: float | None) -> Service:
        """The model of a slot. Requests share one load, which continues even if they leave."""
        while True:
            self.look_at_files()
            if slot.failure is not None:
                raise RequestError(503, f"The model is not ready: {slot.failure}", code="device_error", retry_after=5)
            if slot.service is not None:
                return slot.service
            if slot.loading is None:
                slot.loading = asyncio.ensure_future(self._bring(slot))
            seconds = None if until is None else until - time.monotonic()
            try:
                await asyncio.wait_for(asyncio.shield(slot.loading), seconds)
            except asyncio.TimeoutError:
                raise self.too_late from None

    async def _bring(self, slot: Slot) -> None:
        """Load a model once there is room for it, unless no request waits for it any more.

        Raises:
            RequestError: It cannot be loaded, or there was no room for it in time.
        """
        until = time.monotonic() + ROOM_SECONDS
        try:
            async with slot.lock:
                while slot.service is None and slot.failure is None and slot.waiting:
                    async with self._room:
                        if await self._make_room(slot):
                            await self._load_for_requests(slot)
                            await self._make_room(slot)  # its actual size is known now
                            return
                    self._released.clear()
                    await asyncio.wait_for(self._released.wait(), until - time.monotonic())
        except asyncio.TimeoutError:
            raise RequestError(
                503, "Other models are running, and there is not enough memory for this one beside them.", retry_after=5
            ) from None
        finally:
            slot.loading = None

    async def _load_for_requests(self, slot: Slot) -> None:
        log.info("loading %s", slot.source.path)
        try:
            self._took(slot, await self.in_thread(lambda: self._load(slot), slot.thread))
        except (BitNetError, OSError) as error:
            name = slot.source.names[0]
            log.error("%s could not be loaded: %s", name, error)
            raise RequestError(
                503, f"{name} could not be loaded; the server's log says why.", code="model_load_failed"
            ) from None

    def _load(self, slot: Slot) -> Service:
        service = Service(slot.source.load(), slot.source, self)
        try:
            self.settings.check_memory(service.names[0], service.size)
        except BitNetError:
            service.close()
            raise
        if slot.source.reloads:  # only in the server's own process, not in a program that hosts it
            set_aside()
            give_back()
        return service

    def _took(self, slot: Slot, service: Service) -> None:
        slot.service, slot.failure, slot.used = service, None, time.monotonic()
        slot.size = service.size

    async def _make_room(self, slot: Slot) -> bool:
        """Unload the least recently used models without requests until there is room; return whether there is."""
        most = self.settings.max_memory
        while most is not None:
            others = [other for other in self.slots if other.service is not None and other is not slot]
            if sum(other.size for other in others) + slot.size <= most or not others:
                return True
            idle = [o for o in others if o.service is not None and not o.service.users and not o.waiting]
            if not idle:
                return False
            oldest = min(idle, key=lambda other: other.used)
            service, oldest.service = oldest.service, None
            assert service is not None
            log.info("unloading %s", oldest.source.path)
            await self.in_thread(service.close, oldest.thread)
        return True

    def unload(self, service: Service) -> None:
        """Unload a model when its last request has ended; a request for it loads it again.

        Raises:
            RequestError: The program that runs this server holds the model.
        """
        if not service.reloads:
            raise RequestError(400, f"{service.names[0]} cannot be unloaded; it belongs to the program that serves it.")
        slot = next((slot for slot in self.slots if slot.service is service), None)
        if slot is not None:
            log.info("unloading %s", slot.source.path)
            slot.service, service.retired = None, True

    def note_failure(self, service: Service, error: BaseException) -> None:
        """Take a model out of service whose device or file has failed, and try once to reload it."""
        slot = next((slot for slot in self.slots if slot.service is service), None)
        if slot is None or slot.failure is not None or not isinstance(error, DeviceError | ModelFileError):
            return
        slot.failure = str(as_request_error(error))
        log.error("%s failed: %s", slot.source.names[0], error)
        proved = service.proved or isinstance(error, ModelFileError)
        if slot.source.reloads and proved:  # a model that never answered would fail again
            self._begin(self._recover(slot, service))

    async def _recover(self, slot: Slot, service: Service) -> None:
        async with slot.lock:
            until = time.monotonic() + END_SECONDS
            while service.users and time.monotonic() < until:
                await asyncio.sleep(0.02)
            service.retired = True
            try:
                slot.service = None
                await self.in_thread(service.close, slot.thread)  # its memory is needed for the reload
                del service  # frees its tokenizer before another one is made
                anew = await self._load_settled(slot)
                anew.proved = False
                self._took(slot, anew)
            except Exception as error:
                slot.failure = str(as_request_error(error))
                log.error("%s could not be reloaded: %s", slot.source.names[0], error)
                return
        log.warning("%s was reloaded and answers again", slot.source.names[0])

    async def _load_settled(self, slot: Slot) -> Service:
        """Load a model once nobody writes to its file any more."""
        while True:
            written = slot.written()
            if written is not None and 0 <= time.time() - written[0] < SETTLE_SECONDS:
                await asyncio.sleep(SETTLE_SECONDS / 4)
                continue
            try:
                async with self._room:
                    return await self.in_thread(lambda: self._load(slot), slot.thread)
            except ModelFileError:
                if slot.written() == written:
                    raise

    async def reload(self) -> dict[str, str]:
        """Reload every loaded model's file while the old one answers. If that fails, the old one stays.

        Returns:
            Maps names to ``reloaded``, or to the reason why it was not.
        """
        told = {}
        for slot in self.slots:
            if (slot.loaded or slot.failure is not None) and slot.source.reloads:
                told[slot.source.names[0]] = await self._reload(slot)
        return told

    async def _reload(self, slot: Slot) -> str:
        async with slot.lock:
            try:
                async with self._room:
                    old = slot.service
                    self._took(slot, await self.in_thread(lambda: self._load(slot), slot.thread))
            except (BitNetError, OSError) as error:
                log.error("%s was not reloaded: %s", slot.source.names[0], error)
                return str(as_request_error(error))
            if old is not None:
                old.retired = True
                if not old.users:
                    slot.thread.submit(old.close)
        log.warning("%s was reloaded", slot.source.names[0])
        return "reloaded"

    def reload_soon(self) -> None:
        """Schedule :meth:`reload` from a signal handler in the event loop's thread."""
        self._begin(self._reload_all())

    async def _reload_all(self) -> None:
        await self.reload()

    def _begin(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def check_room(self) -> None:
        """Refuse a request that could not be admitted now, before its body is read.

        Raises:
            RequestError: The server is shutting down, or the queue is full.
        """
        if self.draining:
            raise RequestError(503, "The server is shutting down.", code="shutting_down", retry_after=5)
        most = self.places + self.settings.max_queue
        if self.present >= most:
            self.metrics.refused.inc()
            raise RequestError(
                429,
                f"The queue is full: {self.present} requests run or wait, and the limit is {most}. Try again later.",
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
        return max(1, min(MAX_RETRY, math.ceil(self._seconds / self.places)))

    async def in_thread(self, call: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        """Run slow host work, such as a template or a tokenizer, outside the event loop.

        Args:
            threads: The pool to run it; None: the pool for prompts.
        """
        if threads is None:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._threads.timed, call)
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    @contextmanager
    def running(self, end: Callable[[RequestError], None]) -> Iterator[None]:
        """In this context, ``end`` is called with the reason if the server must cancel running requests."""
        self._running.add(end)
        try:
            yield
        finally:
            self._running.discard(end)

    def end_all(self, reason: RequestError) -> None:
        """Cancel every generation and tell its client why."""
        for end in tuple(self._running):
            end(reason)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer."""
        return {"server": f"bitnet/{__version__}"}

    def close(self) -> None:
        """Unload the models that this loaded."""
        self.bodies.close()
        for threads in (self._threads, *(slot.thread for slot in self.slots)):
            threads.shutdown(wait=True, cancel_futures=True)
        for service in self.services():
            service.close()
