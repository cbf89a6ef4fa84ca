"""A client's HTTP connection that takes little time, as that of a load generator counts as the server's."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping

import httptools
import httpx

from bitnet.core.errors import InvalidInputError, brief

CONNECT_SECONDS = 30.0


class Server:
    """Where connections go, and what each request begins with.

    Args:
        url: The server's address, perhaps with a path before that of each request.
        headers: Headers of every request.

    Raises:
        InvalidInputError: The address is invalid.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        try:
            parsed = httpx.URL(url)
            right = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 0) < 1 << 16
        except httpx.InvalidURL:
            right = False
        if not right:
            raise InvalidInputError(
                f"{brief(url)} is not a server address.", hint="Write one as http://127.0.0.1:8080, with --base-url."
            )
        secure = parsed.scheme == "https"
        self.host, self.port = parsed.host, parsed.port or (443 if secure else 80)
        self.tls = httpx.create_ssl_context(trust_env=False) if secure else None
        self._path = parsed.raw_path.rstrip(b"/")
        given = {"host": parsed.netloc.decode(), **headers}
        if parsed.userinfo and "authorization" not in headers:
            user = f"{parsed.username}:{parsed.password}".encode()
            given["authorization"] = f"Basic {base64.b64encode(user).decode()}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items()).encode("latin-1")

    def post(self, path: str, body: bytes) -> bytes:
        """A request that sends JSON."""
        return b"POST %b%b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            *(self._path, path.encode(), self._headers),
            *(len(body), body),
        )


class Connection(asyncio.Protocol):
    """A connection that sends one request at a time. What is received is taken where it arrives, without a task."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._lost = False

    @classmethod
    async def open(cls, server: Server) -> Connection:
        """A new connection.

        Raises:
            OSError: There is none.
        """
        opening = asyncio.get_running_loop().create_connection(cls, server.host, server.port, ssl=server.tls)
        try:
            return (await asyncio.wait_for(opening, CONNECT_SECONDS))[1]
        except asyncio.TimeoutError:
            raise OSError(f"none within {CONNECT_SECONDS:.0f} seconds") from None

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return not self._lost and self._done is None

    def close(self) -> None:
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, request: bytes, take: Callable[[int, bytes, float], None]) -> int:
        """Send a request and return the answer's status, once all of it has come.

        Args:
            take: Called for each piece of the answer's body: the status, the piece, and when it came on the clock of
                ``time.perf_counter``. What it raises ends the connection, and is raised here.

        Raises:
            OSError: The connection ended before the answer did.
        """
        assert self.usable
        assert self._transport is not None
        self._take, self._now, self._status, self._measured = take, 0.0, 0, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # an answer that nobody asked for
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(OSError(f"no valid answer in HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self._done is None or self._done.done():
            return
        if self._status and not self._measured and error is None:  # an answer without a length ends so
            self._done.set_result(self._status)
        else:
            self._fail(OSError(str(error) if error is not None else "the server closed the connection"))

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # What the parser calls:

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measured = self._measured or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._take(self._status, body, self._now)

    def on_message_complete(self) -> None:
        if self._status < 200:  # more will come
            self._measured = False
            return
        if not self._parser.should_keep_alive():
            self._lost = True
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)
