"""A model of the pool, which is loaded and unloaded."""

from __future__ import annotations

import asyncio
import time

from bitnet.server.models.folder import stored_bytes, stored_files
from bitnet.server.models.service import Service, Source
from bitnet.server.models.threads import one_thread


class PooledModel:
    """A model that is loaded or can be loaded.

    Attributes:
        service: The loaded model, or None.
        failure: Why it cannot answer until it is reloaded.
        problem: Why it could not be loaded when it was last tried; the next request tries again.
        deleting: Whether its files are being deleted, so that it takes no requests.
        failed_as: The state of its files when it failed.
        size: Bytes of memory that it needs; before the first load, the size of its file or files.
        used: Time of the last request for it, on :func:`time.monotonic`'s clock.
        waiting: Number of requests that are about to use it, or wait for it to load.
        loading: The task that loads it for all of them.
        thread: The only thread that loads and closes the model. The C library has a heap per thread and keeps freed
            memory there, so with several threads each heap would grow to a model's size.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.service: Service | None = None
        self.failure: str | None = None
        self.problem: str | None = None
        self.deleting = False
        self.failed_as: tuple[int, ...] | None = None
        self.size = stored_bytes(source.path)
        self.used = 0.0
        self.waiting = 0
        self.loading: asyncio.Task[None] | None = None
        self.created = int(time.time())
        self.lock = asyncio.Lock()
        self.thread = one_thread("bitnet-load")

    @property
    def loaded(self) -> bool:
        return self.service is not None

    def written(self) -> tuple[float, int] | None:
        """When the file, or a part of it, was last written to, in seconds since 1970, and its bytes; None: a part is
        missing."""
        try:
            found = [file.stat() for file in stored_files(self.source.path)]
        except OSError:
            return None
        return max((info.st_mtime for info in found), default=0.0), sum(info.st_size for info in found)
