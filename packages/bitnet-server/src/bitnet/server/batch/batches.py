"""The batches of a server: files of requests that it answers beside the requests of clients.

One batch is answered at a time, in order of arrival. Its rows take only places that no request of a client has. What a
batch has come to is on the disk, with the answers so far: a server that starts goes on with it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from bitnet.core.errors import BitNetError, InvalidInputError, brief
from bitnet.server.batch.batch import RUNNING, Batch, read_batch
from bitnet.server.batch.rows import MAX_ROWS, Answers, RowError, keep_answered, read_row, rows_of
from bitnet.server.batch.run import Ask, Outcome, run_rows
from bitnet.server.batch.store import Store, StoredFile, write_json
from bitnet.server.request.errors import RequestError

MAX_BATCHES = 1000
"""Maximum batches of all keys together, those that have ended among them; the oldest of these are forgotten."""
ATTEMPTS = 3
"""How often a row is asked that fails in the server."""
PAUSE_SECONDS = 1.0
"""Seconds before a row is asked again."""
LOOK_SECONDS = 0.02
"""Seconds between two looks for a free place while clients have all of them."""


class Room(Protocol):
    """Who lets requests in, those of clients and rows of batches."""

    @property
    def free(self) -> bool:
        """Whether a place is free, which no client's request waits for."""
        ...

    @property
    def places(self) -> int:
        """Number of requests that may run at the same time."""
        ...

    def admitted(self) -> AbstractContextManager[None]:
        """A context in which a request has a place."""
        ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row is in its file."""

    id: str
    number: int
    offset: int


class Batches:
    """The batches, answered by tasks of the event loop in which they are used.

    Args:
        ask: Has the application answer a row, which this has admitted.
        owners: Maps folders' names to the digests of the keys that they belong to.
    """

    def __init__(self, store: Store, ask: Ask, room: Room, owners: Mapping[str, bytes]) -> None:
        self._store, self._ask, self._room, self._owners = store, ask, room, owners
        self._turn = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._batches: dict[str, Batch] = {}
        for path in store.folder.glob("*/batch_*.json"):
            if (batch := read_batch(path)) is not None:
                self._batches[batch.id] = batch
        unfinished = [one for one in self._batches.values() if one.status in RUNNING]
        store.remove_strange({id for one in unfinished for id in (one.output, one.failures)})

    def resume(self) -> None:
        """Go on with the batches that have not ended, in order of arrival; the others' tasks run already."""
        for batch in sorted(self._batches.values(), key=lambda one: one.created):
            if batch.status in RUNNING and batch.id not in self._tasks and batch.folder in self._owners:
                self._begin(batch)

    async def close(self) -> None:
        """End all tasks; their batches go on when a server is started on the same folder."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def create(
        self, file: StoredFile, endpoint: str, metadata: dict[str, str] | None = None, seconds: int | None = None
    ) -> Batch:
        """Begin a batch of the requests in a file.

        Args:
            seconds: For how long the files of answers are kept.

        Raises:
            RequestError: There are too many batches.
        """
        ended = sorted((b for b in self._batches.values() if b.status not in RUNNING), key=lambda one: one.created)
        for old in ended[: max(0, len(self._batches) + 1 - MAX_BATCHES)]:
            old.path(self._store.folder).unlink(missing_ok=True)
            del self._batches[old.id]
        if len(self._batches) >= MAX_BATCHES:
            raise RequestError(429, f"{MAX_BATCHES:,} batches run or wait. Try again later.", retry_after=60)
        made = (self._store.new(), self._store.new(), time.time_ns())
        batch = Batch(f"batch_{secrets.token_hex(12)}", file.folder, endpoint, file.id, *made, metadata, seconds)
        self._save(batch)
        self._batches[batch.id] = batch
        self._begin(batch)
        return batch

    def get(self, folder: str, id: str) -> Batch:
        """A batch of a folder.

        Raises:
            RequestError: There is none of that id.
        """
        batch = self._batches.get(id)
        if batch is None or batch.folder != folder:
            raise RequestError(404, f"There is no batch {brief(id)}.", field="batch_id")
        return batch

    def listed(self, folder: str) -> list[Batch]:
        """The batches of a folder, the newest first."""
        return sorted((one for one in self._batches.values() if one.folder == folder), key=lambda one: -one.created)

    def cancel(self, batch: Batch) -> None:
        """End a batch; the answers so far are kept.

        Raises:
            RequestError: It has ended.
        """
        if batch.status not in RUNNING:
            raise RequestError(409, f"The batch is {batch.status}, so it cannot be cancelled.", field="batch_id")
        self._come_to(batch, "cancelling")
        self.resume()
        self._tasks[batch.id].cancel()

    def user(self, file: StoredFile) -> Batch | None:
        """A batch that has not ended and needs a file."""
        return next((one for one in self._batches.values() if one.status in RUNNING and one.input == file.id), None)

    def _begin(self, batch: Batch) -> None:
        task = asyncio.ensure_future(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: Batch) -> None:
        left: dict[str, _Place] = {}
        try:
            if batch.status != "cancelling":
                left = await self._unanswered(batch)
                self._come_to(batch, "in_progress")
                await asyncio.wait_for(self._answer(batch, left), batch.expires - time.time())
                self._come_to(batch, "finalizing")
                self._finish(batch, "completed")
        except asyncio.TimeoutError:
            self._finish(batch, "expired", left)
        except asyncio.CancelledError:
            if batch.status != "cancelling":  # the server ends
                raise
        except RowError as error:
            self._fail(batch, "invalid_request", error, error.line)
        except InvalidInputError as error:
            self._fail(batch, "invalid_request", error)
        except RequestError as error:
            self._fail(batch, error.code or "server_error", error)
        if batch.status == "cancelling":
            self._finish(batch, "cancelled")

    async def _unanswered(self, batch: Batch) -> dict[str, _Place]:
        """The rows of a batch that have no answer, by their ids."""
        self._store.get(batch.folder, batch.input)
        path = self._store.path(batch.folder, batch.input)
        async with self._reading:
            rows = await asyncio.to_thread(_places, path, batch)
        batch.total, batch.outcome = len(rows), Outcome()
        left = {row.id: row for row in rows}
        for id in (batch.output, batch.failures):
            if (file := self._store.path(batch.folder, id)).exists():
                self._store.used -= file.stat().st_size
                for one in await asyncio.to_thread(keep_answered, file, set(left)):
                    batch.outcome.count(one.status, one.body)
                    del left[one.id]
                self._store.used += file.stat().st_size
        return left

    async def _answer(self, batch: Batch, left: dict[str, _Place]) -> None:
        """Answer rows, and take each out of ``left`` once it has its answer."""
        async with self._turn:
            output, failures = (self._opened(batch, id) for id in (batch.output, batch.failures))
            with closing(output), closing(failures):

                async def answer(place: _Place) -> None:
                    status, body = await self._ask_row(batch, place)
                    (output if status == 200 else failures).add(place.id, status, body)
                    batch.outcome.count(status, body)
                    del left[place.id]

                await run_rows(tuple(left.values()), answer, self._room.places)

    def _opened(self, batch: Batch, id: str) -> Answers:
        return Answers(self._store.path(batch.folder, id), self._store.take)

    async def _ask_row(self, batch: Batch, place: _Place) -> tuple[int, dict[str, Any]]:
        with self._store.path(batch.folder, batch.input).open("rb") as source:
            source.seek(place.offset)
            row = read_row(source.readline().decode("utf-8-sig"), place.number, batch.input)
        failures = 0
        while True:
            while not self._room.free:
                await asyncio.sleep(LOOK_SECONDS)
            with self._room.admitted():
                status, body = await self._ask(row.path, row.body, self._owners[batch.folder])
            failures += status >= 500
            if status != 429 and (status < 500 or failures == ATTEMPTS):
                return status, body
            await asyncio.sleep(PAUSE_SECONDS)

    def _finish(self, batch: Batch, status: str, left: Iterable[str] = ()) -> None:
        """End a batch: the answers so far become files.

        Args:
            left: Ids of rows that have none, because the time was up.
        """
        with closing(self._opened(batch, batch.failures)) as failures, suppress(RequestError):  # there may be no room
            for id in left:
                failures.add_error(id, "batch_expired", "This request was not answered before the batch expired.")
        for id, name in ((batch.output, "output"), (batch.failures, "error")):
            path = self._store.path(batch.folder, id)
            if path.is_file() and path.stat().st_size:
                self._store.keep(id, batch.folder, f"{batch.id}_{name}.jsonl", "batch_output", batch.seconds)
            else:
                path.unlink(missing_ok=True)
        self._come_to(batch, status)

    def _fail(self, batch: Batch, code: str, error: BitNetError, line: int | None = None) -> None:
        batch.errors = [{"code": code, "message": str(error), "param": None, "line": line}]
        self._finish(batch, "failed")

    def _come_to(self, batch: Batch, status: str) -> None:
        batch.status = status
        batch.times.setdefault(status, int(time.time()))
        self._save(batch)

    def _save(self, batch: Batch) -> None:
        write_json(batch.path(self._store.folder), asdict(batch))


def _places(path: Path, batch: Batch) -> list[_Place]:
    """Where the rows of a file are.

    Raises:
        InvalidInputError: It has too many, or a line that is no request to the batch's endpoint.
    """
    offsets: list[int] = []

    def lines() -> Iterator[str]:
        with path.open("rb") as file:
            while True:
                offsets.append(file.tell())
                if not (line := file.readline()):
                    return
                try:
                    yield line.decode("utf-8-sig" if offsets[-1] == 0 else "utf-8")
                except UnicodeDecodeError:
                    raise RowError(
                        len(offsets), f"line {len(offsets)} is not UTF-8.", "Write the file as UTF-8."
                    ) from None

    places: list[_Place] = []
    for number, row in rows_of(lines(), batch.input):
        if row.path != batch.endpoint:
            what = f"line {number} of {batch.input} has the url {row.path}; the batch is for {batch.endpoint}."
            raise RowError(number, what, "Send the other requests as a batch of their own.")
        if len(places) == MAX_ROWS:
            raise InvalidInputError(f"{batch.input} has more than {MAX_ROWS:,} rows.", hint="Send several batches.")
        places.append(_Place(row.id, number, offsets[number - 1]))
    return places
