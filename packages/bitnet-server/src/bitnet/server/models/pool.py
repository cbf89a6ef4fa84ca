"""The models of a server: loaded on demand, unloaded by least use, and loaded again after a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar

from bitnet.core.errors import BitNetError, DeviceError, ModelFileError
from bitnet.core.support.garbage import give_back, set_aside
from bitnet.core.support.system import usable_cpus
from bitnet.core.text import sandbox
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.folder import state_of
from bitnet.server.models.listing import Listing, Named
from bitnet.server.models.pooled import PooledModel
from bitnet.server.models.service import Loaded, Service, Source
from bitnet.server.models.settings import Settings
from bitnet.server.models.shared import Shared
from bitnet.server.models.threads import PROMPT_THREADS
from bitnet.server.request.errors import RequestError, as_request_error

log = logging.getLogger("bitnet.server")

T = TypeVar("T")

ROOM_SECONDS = 30.0
"""Seconds that a request waits for other models' requests to end if its model needs their memory."""
END_SECONDS = 10.0
"""Seconds before a failed device is closed, in which its requests can receive the error."""
SETTLE_SECONDS = 1.0
"""Seconds for which a file must not have changed before it is loaded again."""


class Pool:
    """The models of a server, loaded when a request needs them and unloaded when memory is short.

    Args:
        sources: Models that stay; the first is the default for requests that name none.
        catalog: Models that come and go; None: there are none.

    Attributes:
        listing: All of them, loaded or not, by name.
        shared: What their requests share.
    """

    def __init__(self, sources: Sequence[Source], settings: Settings, catalog: Catalog | None = None) -> None:
        self._settings = settings
        self.listing = Listing(sources, catalog, settings)
        self._refreshing = asyncio.Lock()
        self.shared = Shared(settings, self.services)
        self._released = asyncio.Event()
        self._room: AbstractAsyncContextManager[object] = nullcontext()
        """Held while making room and loading a model, so that two loads do not count on the same memory."""
        if settings.max_memory is not None:
            self._room = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Load the first model, before the event loop starts; models of the catalog wait for their first request.

        Raises:
            BitNetError: It cannot be loaded, or some model's file alone takes more memory than is allowed.
        """
        for one in self.models:
            self._settings.check_memory(one.source.names[0], one.size)
        if self.models:
            first = self.models[0]
            loaded = first.source.load()
            assert not isinstance(loaded, Awaitable)  # only a catalog has such models
            self._took(first, self._served(first, loaded))
        if self.listing.catalog is not None:
            self.listing.take(self.listing.catalog.sources())

    @property
    def models(self) -> list[PooledModel]:
        return self.listing.models

    def services(self) -> list[Service]:
        """The models that are loaded."""
        return [one.service for one in tuple(self.models) if one.service is not None]

    @property
    def failure(self) -> str | None:
        """Why some model cannot answer, if any."""
        return next((one.failure for one in self.models if one.failure is not None), None)

    def look_at_files(self) -> None:
        """Take models out of service whose files have changed since they were loaded, or whose processes have ended."""
        for service in self.services():
            try:
                service.model.check_file()
            except (DeviceError, ModelFileError) as error:
                self.note_failure(service, error)

    async def find(self, name: str | None, field: str = "model", *, exact: bool = False) -> Named:
        """What a request's name means, now; arguments and errors as for :meth:`Listing.named`.

        Raises:
            RequestError: There is no model with that name.
        """
        if self.listing.stale(name):
            await self.refresh()
        return self.listing.named(name, field, exact=exact)

    async def refresh(self) -> None:
        """Look at what the catalog has now. Models whose files are gone are unloaded when their requests have ended."""
        catalog = self.listing.catalog
        if catalog is None:
            return
        async with self._refreshing:
            sources = await self.shared.in_thread(catalog.sources)
            for one in self.listing.take(sources):
                log.info("%s is gone", one.source.path)
                self._let_go(one)

    async def change(self, work: Callable[[], object]) -> None:
        """Run work that changes what the catalog has, and look at it anew. For one piece of work at a time.

        Raises:
            Exception: What the work raises; the catalog is looked at anew, too.
        """
        try:
            async with self._refreshing:
                await self.shared.in_thread(work)
        finally:
            await self.refresh()

    async def delete(self, one: PooledModel) -> None:
        """Unload a model of the catalog and delete its files. New requests for it are refused meanwhile.

        Raises:
            RequestError: It does not belong to the catalog, other requests take too long, or it cannot be deleted.
        """
        catalog = self.listing.catalog
        if catalog is None or not self.listing.changeable(one):
            raise RequestError(400, f"{one.source.names[0]} cannot be deleted; the server was started with it.")
        one.deleting = True
        try:
            async with one.lock:
                service, until = one.service, time.monotonic() + ROOM_SECONDS
                while service is not None and service.users:
                    if time.monotonic() > until:
                        raise RequestError(503, "The model is in use; try again later.", retry_after=5)
                    await asyncio.sleep(0.02)
                self._let_go(one)
                await _in(one.thread, lambda: None)  # it has been closed
                await self.change(lambda: catalog.delete(one.source.path))
        finally:
            one.deleting = False

    def _let_go(self, one: PooledModel) -> None:
        """Unload a model when its last request has ended."""
        service, one.service = one.service, None
        if service is not None:
            service.retired = True
            if not service.users:
                one.thread.submit(service.close)

    @asynccontextmanager
    async def using(self, name: str | None, until: float | None = None) -> AsyncIterator[Service]:
        """Context with the model that a request names. It is loaded if necessary and stays loaded in the context.

        Args:
            until: Deadline for loading it, on :func:`time.monotonic`'s clock; None: no deadline.

        Raises:
            RequestError: There is no such model, it failed or cannot be loaded, or memory or time did not suffice.
        """
        one, names, preset = await self.find(name)
        one.waiting += 1
        try:
            service = await self._ready(one, until)
            service.users += 1
        finally:
            one.waiting -= 1
            self._released.set()
        one.used = time.monotonic()
        try:
            shown = service.named(names, preset)
            yield shown
        except (DeviceError, ModelFileError) as error:
            self.note_failure(service, error)
            raise
        finally:
            service.users -= 1
            self._released.set()
            if service.retired and not service.users:
                one.thread.submit(service.close)

    async def _ready(self, one: PooledModel, until: float | None) -> Service:
        """Have a model loaded. Requests share one load, which continues even if they leave."""
        while True:
            self.look_at_files()
            if one.deleting:
                raise RequestError(503, f"The model {one.source.names[0]} is being deleted.", code="model_not_found")
            if one.failure is not None:
                raise RequestError(503, f"The model is not ready: {one.failure}", code="device_error", retry_after=5)
            if one.service is not None:
                return one.service
            if one.loading is None:
                one.loading = asyncio.ensure_future(self._bring(one))
            seconds = None if until is None else until - time.monotonic()
            try:
                await asyncio.wait_for(asyncio.shield(one.loading), seconds)
            except asyncio.TimeoutError:
                raise self.shared.too_late from None

    async def _bring(self, one: PooledModel) -> None:
        """Load a model once there is room for it, unless no request waits for it any more.

        Raises:
            RequestError: It cannot be loaded, or there was no room for it in time.
        """
        until = time.monotonic() + ROOM_SECONDS
        try:
            async with one.lock:
                while one.service is None and one.failure is None and one.waiting:
                    async with self._room:
                        if await self._make_room(one):
                            await self._load_for_requests(one)
                            await self._make_room(one)  # its actual size is known now
                            return
                    self._released.clear()
                    await asyncio.wait_for(self._released.wait(), until - time.monotonic())
        except asyncio.TimeoutError:
            raise RequestError(
                503, "Other models are running, and there is not enough memory for this one beside them.", retry_after=5
            ) from None
        finally:
            one.loading = None

    async def _load_for_requests(self, one: PooledModel) -> None:
        log.info("loading %s", one.source.path)
        try:
            self._took(one, await self._load(one))
        except (BitNetError, OSError) as error:
            name = one.source.names[0]
            one.problem = str(as_request_error(error))
            log.error("%s could not be loaded: %s", name, error)
            raise RequestError(
                503, f"{name} could not be loaded; the server's log says why.", code="model_load_failed"
            ) from None

    async def _load(self, one: PooledModel) -> Service:
        made = await _in(one.thread, one.source.load)
        loaded = await made if isinstance(made, Awaitable) else made
        return await _in(one.thread, lambda: self._served(one, loaded))

    def _served(self, one: PooledModel, loaded: Loaded) -> Service:
        service = Service(loaded, one.source, self.shared, self)
        try:
            self._settings.check_memory(service.names[0], service.size)
        except BitNetError:
            service.close()
            raise
        service.model.tokenizer.prepare()  # else each of the first prompts would wait for a part of the vocabulary
        if one.source.reloads:  # only in the server's own process, not in a program that hosts it
            if service.model.chat_template is not None:
                sandbox.warm(min(PROMPT_THREADS, usable_cpus() // 2))
            set_aside()
            give_back()
        return service

    def _took(self, one: PooledModel, service: Service) -> None:
        one.service, one.failure, one.problem, one.used = service, None, None, time.monotonic()
        one.size = service.size

    async def _make_room(self, one: PooledModel) -> bool:
        """Unload the least recently used models without requests until there is room; return whether there is."""
        limit = self._settings.max_memory
        while limit is not None:
            others = [other for other in self.models if other.service is not None and other is not one]
            if sum(other.size for other in others) + one.size <= limit or not others:
                return True
            idle = [o for o in others if o.service is not None and not o.service.users and not o.waiting]
            if not idle:
                return False
            oldest = min(idle, key=lambda other: other.used)
            service, oldest.service = oldest.service, None
            assert service is not None
            log.info("unloading %s", oldest.source.path)
            await _in(oldest.thread, service.close)
        return True

    def unload(self, service: Service) -> None:
        """Unload a model when its last request has ended; a request for it loads it again.

        Raises:
            RequestError: The program that runs this server holds the model.
        """
        if not service.reloads:
            raise RequestError(400, f"{service.names[0]} cannot be unloaded; it belongs to the program that serves it.")
        one = next((one for one in self.models if one.service is service.loaded), None)
        if one is not None:
            log.info("unloading %s", one.source.path)
            one.service, service.loaded.retired = None, True

    def note_failure(self, service: Service, error: BaseException) -> None:
        """Take a model out of service whose device or file has failed, and try once to reload it."""
        service = service.loaded
        one = next((one for one in self.models if one.service is service), None)
        if one is None or one.failure is not None or not isinstance(error, DeviceError | ModelFileError):
            return
        one.failure, one.failed_as = str(as_request_error(error)), state_of(one.source.path)
        log.error("%s failed: %s", one.source.names[0], error)
        proved = service.proved or isinstance(error, ModelFileError)
        if one.source.reloads and proved:  # a model that never answered would fail again
            self._begin(self._recover(one, service))

    async def _recover(self, one: PooledModel, service: Service) -> None:
        async with one.lock:
            until = time.monotonic() + END_SECONDS
            while service.users and time.monotonic() < until:
                await asyncio.sleep(0.02)
            service.retired = True
            try:
                one.service = None
                await _in(one.thread, service.close)  # its memory is needed for the reload
                del service  # frees its tokenizer before another one is made
                anew = await self._load_settled(one)
                anew.proved = False
                self._took(one, anew)
            except Exception as error:
                one.failure, one.failed_as = str(as_request_error(error)), state_of(one.source.path)
                log.error("%s could not be reloaded: %s", one.source.names[0], error)
                return
        log.warning("%s was reloaded and answers again", one.source.names[0])

    async def _load_settled(self, one: PooledModel) -> Service:
        """Load a model once nobody writes to its file any more."""
        while True:
            written = one.written()
            if written is not None and 0 <= time.time() - written[0] < SETTLE_SECONDS:
                await asyncio.sleep(SETTLE_SECONDS / 4)
                continue
            try:
                async with self._room:
                    return await self._load(one)
            except ModelFileError:
                if one.written() == written:
                    raise

    async def reload(self) -> dict[str, str]:
        """Reload every loaded model's file while the old one answers. If that fails, the old one stays.

        Returns:
            Maps names to ``reloaded``, or to the reason why it was not.
        """
        outcomes = {}
        for one in self.models:
            if (one.loaded or one.failure is not None) and one.source.reloads:
                outcomes[one.source.names[0]] = await self._reload(one)
        return outcomes

    async def _reload(self, one: PooledModel) -> str:
        async with one.lock:
            try:
                async with self._room:
                    old = one.service
                    self._took(one, await self._load(one))
            except (BitNetError, OSError) as error:
                log.error("%s was not reloaded: %s", one.source.names[0], error)
                return str(as_request_error(error))
            if old is not None:
                old.retired = True
                if not old.users:
                    one.thread.submit(old.close)
        log.warning("%s was reloaded", one.source.names[0])
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

    def close(self) -> None:
        """Unload the models that this loaded."""
        for one in self.models:
            one.thread.shutdown(wait=True, cancel_futures=True)
        for service in self.services():
            service.close()


async def _in(threads: Executor, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, call)
