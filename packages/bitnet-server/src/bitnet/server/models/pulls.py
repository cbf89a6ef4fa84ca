"""Downloads from the hub that clients have asked for; clients that ask for the same model share one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from bitnet.core.hub.choice import RemoteFile
from bitnet.core.hub.names import HubName
from bitnet.core.hub.pull import locate
from bitnet.server.request.errors import RequestError

MAX_PULLS = 4
"""Maximum downloads at the same time."""


class _Unwanted(Exception):
    """Nobody waits for the download any more."""


class Pull:
    """A download in progress.

    Attributes:
        arrived: How many bytes of each file are here, in the order of the download.
    """

    def __init__(self, name: HubName) -> None:
        self.name = name
        self.arrived: dict[RemoteFile, int] = {}
        self.done: Future[Path] = Future()
        self._ended, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._watchers = 0
        self._unwanted = threading.Event()
        threading.Thread(target=self._run, name="bitnet-pull", daemon=True).start()

    def _run(self) -> None:
        try:
            self.done.set_result(locate(self.name, update=True, progress=self._progress))
        except BaseException as error:
            self.done.set_exception(error)
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._ended.set)

    async def settled(self, seconds: float) -> bool:
        """Wait until the download has ended, for so many seconds at most; return whether it has."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def _progress(self, file: RemoteFile, arrived: int) -> None:
        if self._unwanted.is_set():
            raise _Unwanted
        self.arrived[file] = arrived

    @property
    def wanted(self) -> bool:
        return not self._unwanted.is_set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In this context, the download goes on. It ends with the last of them; another one resumes it."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._unwanted.set()


class Pulls:
    """The downloads of a server. For the event loop's thread."""

    def __init__(self) -> None:
        self._running: dict[HubName, Pull] = {}

    def pull(self, name: HubName) -> Pull:
        """The download of a model, which is begun unless it runs.

        Raises:
            RequestError: There are too many.
        """
        running = self._running
        for done in [name for name, pull in running.items() if pull.done.done()]:
            del running[done]
        found = running.get(name)
        if found is None or not found.wanted:
            if len(running) >= MAX_PULLS and found is None:
                raise RequestError(
                    429, f"{MAX_PULLS} models are being pulled already; try again later.", retry_after=30
                )
            found = running[name] = Pull(name)
        return found
