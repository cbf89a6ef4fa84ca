"""One HTTP request over ASGI: reads its body, writes its answer, and detects that the client has gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from bitnet.server.request.bodies import Bodies, Body
from bitnet.server.request.errors import RequestError, too_late

T = TypeVar("T")
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

PING_SECONDS = 15.0
"""Seconds of silence after which a stream sends a keep-alive, so that proxies do not close it."""
SEND_SECONDS = 30.0
"""Seconds that a client may leave a stream unread, with full buffers, before its request is cancelled."""
BODY_SECONDS = 30.0
"""Seconds within which a body must arrive."""


class ClientGone(Exception):
    """The client closed the connection, or has stopped reading."""


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_make: Any = getattr(json.encoder, "c_make_encoder", None)
_pieces = None
if _make is not None:  # once: the encoder's own method makes one for each value, which takes as long as its work
    _pieces = _make(None, _encode.default, json.encoder.encode_basestring, None, ":", ",", False, False, True)


def to_json(value: Any) -> bytes:
    text = _encode.encode(value) if _pieces is None else "".join(_pieces(value, 0))
    return text.encode("utf-8", "replace")


def long_json(value: Mapping[str, Any], lists: Mapping[str, Iterable[Any]], at_once: int) -> bytes:
    """The JSON of an object some of whose members are long lists.

    Python's lock is held while a piece is encoded, so that a whole list would hold up everyone else. Call this outside
    the event loop.

    Args:
        value: The other members, of which there is one at least.
        at_once: Number of elements that are encoded in one go.
    """
    pieces = [to_json(value)[:-1]]
    for name, items in lists.items():
        pieces += [b",", to_json(name), b":["]
        left = iter(items)
        before = b""
        while some := list(islice(left, at_once)):
            pieces += [before, to_json(some)[1:-1]]
            before = b","
        pieces.append(b"]")
    return b"".join([*pieces, b"}"])


class Call:
    """A request and its answer.

    Args:
        headers: Headers that every answer carries.
        bodies: The budget of all bodies.
        owner: Digest of the API key that the request has; empty: none of the server's.
        timeout: Maximum seconds from now to the end of the answer; None: no limit.
        admitted: Whether it counts as running already.

    Attributes:
        owner, admitted: As in the arguments.
        started: Whether the answer has begun.
        load_seconds: How long the request waited for its model to be loaded.
        until: Deadline of the answer, on the clock of ``time.monotonic``; None: no deadline.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        headers: Mapping[str, str],
        bodies: Bodies,
        owner: bytes = b"",
        timeout: float | None = None,
        admitted: bool = False,
    ) -> None:
        self.admitted = admitted
        self.scope, self._receive, self._send = scope, receive, send
        self._headers, self._body = dict(headers), Body(bodies)
        self._sent = 0.0
        self._writing: dict[asyncio.Task[Any], float] = {}  # by task, when its write is too late, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self.owner = owner
        self.load_seconds = 0.0
        self.started = False
        self._timeout = timeout
        self.until = None if timeout is None else time.monotonic() + timeout

    def detached(self) -> Call:
        """A call for work that goes on when this one has been answered: its client never leaves, and gets nothing."""

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None: ...

        one = Call(self.scope, receive, send, headers={}, bodies=self._body.bodies, owner=self.owner)
        one.until, one.load_seconds = self.until, self.load_seconds
        return one

    def add_header(self, name: str, value: str) -> None:
        """Add a header to the answer."""
        self._headers[name] = value

    async def json(self, *, optional: bool = False) -> dict[str, Any]:
        """The body as a JSON object.

        Args:
            optional: Whether no body counts as an empty object.

        Raises:
            RequestError: It is too large, too slow, compressed, or not a JSON object.
            ClientGone: The client left before the body was complete.
        """
        self._check_coding()
        left = self._seconds_left()
        seconds = BODY_SECONDS if left is None else min(BODY_SECONDS, left)
        try:
            await asyncio.wait_for(self._take_body(), seconds)
        except asyncio.TimeoutError:
            raise RequestError(408, f"The body did not arrive within {seconds:.3g} seconds.") from None
        if optional and not self._body.size:
            return {}
        value = await self.read(self._body.value)
        if not isinstance(value, dict):
            raise RequestError(400, "The body must be a JSON object.")
        return value

    async def _take_body(self) -> None:
        length = self.header("content-length") or "0"
        if length.isdigit():
            self._body.check_size(int(length[:20]))
        async for piece in self._pieces():
            await self._body.add(piece)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives, for one that is not kept in memory.

        Raises:
            RequestError: It is compressed, or the next piece did not arrive within :data:`BODY_SECONDS`.
            ClientGone: The client left before the body was complete.
        """
        self._check_coding()
        pieces = self._pieces()
        with suppress(StopAsyncIteration):
            while True:
                try:
                    piece = await asyncio.wait_for(pieces.__anext__(), BODY_SECONDS)
                except asyncio.TimeoutError:
                    raise RequestError(408, f"No more of the body arrived for {BODY_SECONDS:.3g} seconds.") from None
                yield piece

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    def _check_coding(self) -> None:
        coding = self.header("content-encoding") or "identity"
        if coding.lower() != "identity":
            raise RequestError(415, f"The body must not be compressed; its Content-Encoding is {coding}.")

    def header(self, name: str) -> str | None:
        """A header of the request, named in small letters."""
        value = dict(self.scope["headers"]).get(name.encode())
        return None if value is None else value.decode("latin-1")

    def query(self) -> dict[str, str]:
        """The parameters after the path; the last one of each name."""
        return dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))

    async def read(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, which reads the fields of the body: if that is large, outside the event loop.

        Raises:
            RequestError: It took too long.
        """
        if not self._body.large:
            return work()
        try:
            return await asyncio.wait_for(self._body.bodies.in_thread(work), self._seconds_left())
        except asyncio.TimeoutError:
            assert self._timeout is not None
            raise too_late(self._timeout) from None

    def _seconds_left(self) -> float | None:
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    def release(self) -> None:
        """Give back the memory of the body, when the request has ended."""
        self._body.release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def watch(self, work: Awaitable[T], *, ping: bytes = b"") -> T:
        """Await ``work``, and cancel it if the client goes away.

        Args:
            ping: Keep-alive that a stream sends after :data:`PING_SECONDS` of silence; empty: none.

        Raises:
            ClientGone: The client went away first.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        pings = asyncio.ensure_future(self._ping(ping)) if ping else None
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            others = [t for t in (task, gone, pings) if t is not None and not t.done()]
            for other in others:
                other.cancel()
            for other in others:
                with suppress(asyncio.CancelledError, Exception):
                    await other

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _ping(self, ping: bytes) -> None:
        clock = asyncio.get_running_loop().time
        self._sent = clock()
        while True:
            await asyncio.sleep(max(0.0, self._sent + PING_SECONDS - clock()))
            if clock() >= self._sent + PING_SECONDS:
                await self.write(ping)

    async def reply(
        self, value: Any, *, status: int = 200, headers: Iterable[tuple[str, str]] = (), kind: str = "application/json"
    ) -> None:
        """Answer with a complete body: ``value`` as JSON, or unchanged if it is bytes."""
        body = value if isinstance(value, bytes) else to_json(value)
        await self._start(status, kind, [("content-length", str(len(body))), *headers])
        await self._send({"type": "http.response.body", "body": body})

    def begin_stream(self, kind: str) -> None:
        """Let :meth:`write` begin a stream of this content type."""
        self._kind = kind

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of a stream; status and headers are sent before the first piece.

        Raises:
            ClientGone: The client's buffers stayed full for too long.
        """
        loop = asyncio.get_running_loop()
        task, late = asyncio.current_task(), loop.time() + SEND_SECONDS
        assert task is not None
        self._writing[task] = late
        if self._timer is None:  # one for many writes, as there is a write for every step
            self._timer = loop.call_at(late, self._end_late_writes)
        try:
            if not self.started:
                await self._start(200, self._kind, [("cache-control", "no-store"), ("x-accel-buffering", "no")])
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except asyncio.CancelledError:
            if loop.time() < late:
                raise
            raise ClientGone from None
        finally:
            del self._writing[task]
        self._sent = loop.time()

    def _end_late_writes(self) -> None:
        """Cancel the writes that are too late, and look again when others would be."""
        self._timer, loop = None, asyncio.get_running_loop()
        others = []
        for task, late in self._writing.items():
            if loop.time() < late:
                others.append(late)
            else:
                task.cancel()
        if others:
            self._timer = loop.call_at(min(others), self._end_late_writes)

    async def _start(self, status: int, kind: str, more: Iterable[tuple[str, str]]) -> None:
        self.started = True
        headers = [("content-type", kind), *self._headers.items(), *more]
        encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})
