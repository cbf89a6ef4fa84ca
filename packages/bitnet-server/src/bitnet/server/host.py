"""What all requests share: the models, which are loaded when they are asked for, the bounds, and who runs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import TypeVar

from bitnet.core import __version__
from bitnet.core.errors import BitNetError, DeviceError, ModelFileError, brief
from bitnet.core.support.garbage import give_back, set_aside
from bitnet.server.errors import RequestError
from bitnet.server.metrics import Metrics
from bitnet.server.service import Service, Settings, Source
from bitnet.server.stored import Stored

log = logging.getLogger("bitnet.server")

T = TypeVar("T")

HOST_THREADS = 4
"""Threads that render templates and tokenize, beside the event loop."""
MAX_RETRY = 60
"""Seconds of ``Retry-After`` at most."""
ROOM_SECONDS = 30.0
"""Seconds that a request waits for other models' requests to end, where its model needs their memory."""
END_SECONDS = 10.0
"""Seconds that requests on a failed device have to learn of it, before it is closed."""


class Slot:
    """A model that may be loaded.

    Attributes:
        service: The model, where it is loaded.
        failure: Why it answers nothing until it is loaded anew.
        size: Bytes that it takes; before it was loaded first, those of its file.
        used: When a request asked for it last, on :func:`time.monotonic`'s clock.
        waiting: Requests that are about to use it, and wait where it is not loaded.
        loading: What loads it, for all of them.
        thread: The one thread that loads and closes the model. The C library has a heap for each thread and keeps what
            was freed there, so if several threads took turns, each of their heaps would grow to a model's size.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.service: Service | None = None
        self.failure: str | None = None
        self.size = source.path.stat().st_size if source.path.exists() else 0
        self.used = 0.0
        self.waiting = 0
        self.loading: asyncio.Task[None] | None = None
        self.created = int(time.time())
        self.lock = asyncio.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="bitnet-load")

    @property
    def loaded(self) -> bool:
        return self.service is not None


class Host:
    """The models of a server, and the bounds that hold for all of them together.

    Args:
        sources: The models; the first is what a request gets that names none.
    """

    def __init__(self, sources: Sequence[Source], settings: Settings) -> None:
        self.settings = settings
        self.slots = [Slot(source) for source in sources]
        self.metrics = Metrics(self.services)
        self.stored = Stored(settings.max_stored)
        self.draining = False
        self.present = 0
        self._seconds = 1.0  # a request takes, on average of late
        self._threads = ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="bitnet-http")
        self._running: set[Callable[[RequestError], None]] = set()
        self._released = asyncio.Event()
        self._room: AbstractAsyncContextManager[object] = nullcontext()
        """Held by whoever makes room and loads into it, so that none counts on room that another one takes."""
        if settings.max_memory is not None:
            self._room = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Load the first model, before there is an event loop.

        Raises:
            BitNetError: It cannot be loaded.
        """
        self._took(self.slots[0], self._load(self.slots[0]))

    def services(self) -> list[Service]:
        """The models that are loaded."""
        return [slot.service for slot in tuple(self.slots) if slot.service is not None]

    @property
    def places(self) -> int:
        """Requests that run at the same time: ``max_seqs`` on each device of the model that has most."""
        return self.settings.max_seqs * max((len(service.model.devices) for service in self.services()), default=1)

    @property
    def names(self) -> list[str]:
        return [name for slot in self.slots for name in slot.source.names]

    @property
    def failure(self) -> str | None:
        """Why a model answers nothing, where one does not."""
        return next((slot.failure for slot in self.slots if slot.failure is not None), None)

    @property
    def ready(self) -> bool:
        return not self.draining and self.failure is None

    def slot(self, name: str | None, field: str = "model") -> Slot:
        """The model that a request names.

        Raises:
            RequestError: There is none of that name.
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
        """What a request is told that takes longer than it may."""
        return RequestError(504, f"The request took longer than {self.settings.timeout:g} seconds.")

    @asynccontextmanager
    async def using(self, name: str | None, field: str = "model", until: float | None = None) -> AsyncIterator[Service]:
        """The model that a request names, which is loaded where it is not, and stays loaded inside.

        Args:
            until: How long to wait for it, on :func:`time.monotonic`'s clock; None: as long as it takes.

        Raises:
            RequestError: There is none of that name, it failed or cannot be loaded, or there was no room or no time.
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
        """The name of the model that was asked for last."""
        return max(self.slots, key=lambda slot: (slot.loaded, slot.used)).source.names[0]

    async def _ready(self, slot: Slot, until: float | None) -> Service:
        """The model of a slot. Requests wait for its loading together, and each may leave; it goes on without them."""
        while True:
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
        """Load a model as soon as there is room for it, unless nobody waits for it any more.

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
                            await self._make_room(slot)  # its size is known now
                            return
                    self._released.clear()
                    await asyncio.wait_for(self._released.wait(), until - time.monotonic())
        except asyncio.TimeoutError:
            raise RequestError(
                503, "Other models run, and there is no memory for this one beside them.", retry_after=5
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
        if slot.source.reloads:  # the process is the server's own
            set_aside()
            give_back()
        return service

    def _took(self, slot: Slot, service: Service) -> None:
        slot.service, slot.failure, slot.used = service, None, time.monotonic()
        slot.size = service.size

    async def _make_room(self, slot: Slot) -> bool:
        """Unload the models used longest ago, as many as it takes, but none with requests; whether that is enough."""
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

    def note_failure(self, service: Service, error: BaseException) -> None:
        """Take a model out of service whose device or file has failed, and try once to load it anew."""
        slot = next((slot for slot in self.slots if slot.service is service), None)
        if slot is None or slot.failure is not None or not isinstance(error, DeviceError | ModelFileError):
            return
        slot.failure = str(error)
        log.error("%s failed: %s", slot.source.names[0], error)
        if slot.source.reloads and service.proved:  # one that never answered would fail again
            self._begin(self._recover(slot, service))

    async def _recover(self, slot: Slot, service: Service) -> None:
        async with slot.lock:
            until = time.monotonic() + END_SECONDS
            while service.users and time.monotonic() < until:
                await asyncio.sleep(0.02)
            service.retired = True
            try:
                async with self._room:
                    slot.service = None
                    await self.in_thread(service.close, slot.thread)  # its device's memory is needed
                    del service  # its tokenizer is freed before another is made
                    anew = await self.in_thread(lambda: self._load(slot), slot.thread)
                anew.proved = False
                self._took(slot, anew)
            except Exception as error:
                slot.failure = str(error)
                log.error("%s could not be loaded anew: %s", slot.source.names[0], error)
                return
        log.warning("%s was loaded anew and answers again", slot.source.names[0])

    async def reload(self) -> dict[str, str]:
        """Load every loaded model's file anew while the old one answers; where that fails, the old one stays.

        Returns:
            Name → ``reloaded``, or why it was not.
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
                return str(error)
            if old is not None:
                old.retired = True
                if not old.users:
                    slot.thread.submit(old.close)
        log.warning("%s was reloaded", slot.source.names[0])
        return "reloaded"

    def reload_soon(self) -> None:
        """:meth:`reload`, from a signal's handler in the event loop's thread."""
        self._begin(self._reload_all())

    async def _reload_all(self) -> None:
        await self.reload()

    def _begin(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request from its arrival to its end.

        Raises:
            RequestError: The server ends, or as many requests are here as may be.
        """
        if self.draining:
            raise RequestError(503, "The server is shutting down.", code="shutting_down", retry_after=5)
        most = self.places + self.settings.max_queue
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
        return max(1, min(MAX_RETRY, math.ceil(self._seconds / self.places)))

    async def in_thread(self, call: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        """Run what takes the host long, such as a template or a tokenizer, beside the event loop.

        Args:
            threads: Whose threads run it; None: those that make prompts.
        """
        return await asyncio.get_running_loop().run_in_executor(threads or self._threads, call)

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

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer."""
        return {"server": f"bitnet/{__version__}"}

    def close(self) -> None:
        """Unload what this loaded."""
        for threads in (self._threads, *(slot.thread for slot in self.slots)):
            threads.shutdown(wait=True, cancel_futures=True)
        for service in self.services():
            service.close()
