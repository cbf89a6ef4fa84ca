"""HTTP connections whose requests have headers of bounded size that arrive in bounded time.

Offers to change to another protocol are passed over, as HTTP allows: Java's client makes one for HTTP/2 with each first
request, and so does ``curl --http2``. Streams to HTTP/1.0 clients end with their connection, as these know no chunks.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bitnet.server.api.openai import error_body
from bitnet.server.request.errors import RequestError

HEADER_SECONDS = 30.0
"""Seconds within which a request's headers must arrive, from when the connection opens or the request begins."""
MAX_HEADERS = 64 << 10
"""Maximum bytes of a request's target and headers, and of what follows a chunked body."""

TOO_LARGE = RequestError(431, f"The request's headers are larger than the {MAX_HEADERS:,} bytes that are allowed.")
TOO_SLOW = RequestError(408, f"The request's headers did not arrive within {HEADER_SECONDS:.0f} seconds.")
NOT_HTTP = RequestError(400, "This is not a valid HTTP request.")
NO_PROXY = RequestError(405, "This server is no proxy.")
OFFERS = (b"upgrade", b"http2-settings")
"""Headers of an offer, which are named in ``Connection``, too."""


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's, with limits on headers. The application sees a request only after its headers."""

    _timer: asyncio.TimerHandle | None = None
    _begun = False  # whether a part of a request's headers has come
    _offered = False  # whether the headers that have just come offer another protocol
    _received = 0  # bytes since the request began or the last piece of its body came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._feed(data)
        if self._received > MAX_HEADERS:
            self._refuse(TOO_LARGE)
        elif self._timer is None and self.timeout_keep_alive_task is None and self._idle:
            self._expect_headers()  # blank lines before a request, which end uvicorn's own time limit

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parsed(data)
        except httptools.HttpParserError:
            self._refuse(TOO_LARGE if self._received > MAX_HEADERS else NOT_HTTP)

    def _parsed(self, data: bytes) -> bytes:
        """Parse data; return what must be parsed anew, after headers with an offer: the parser ends there."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                self._refuse(NO_PROXY)
                return b""
            lines = [b"%s %s HTTP/%s" % (method, self.url, version), *_without_offer(self.headers), b"", b""]
            self.parser = httptools.HttpRequestParser(self)
            return b"\r\n".join(lines) + data[offer.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._received = True, 0
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._begun = False
        self._received = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._received > MAX_HEADERS:
            raise TOO_LARGE  # which the parser turns into an error of its own
        self._offered = self.parser.should_upgrade()
        if self._offered:
            return
        self._received = 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_unchunked(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._received = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._offered:
            self._received = 0
            super().on_message_complete()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._time_out)

    def _time_out(self) -> None:
        if self._begun:
            self._refuse(TOO_SLOW)
        else:
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: RequestError) -> None:
        """Answer with an error, unless another answer is under way, and close the connection."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self._idle:
            self.transport.write(_answer(error))
        self.transport.close()


def _without_offer(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The lines of a request's headers without those that offer another protocol."""
    return [
        b"%s: %s" % (name, _without_options(value) if name == b"connection" else value)
        for name, value in headers
        if name not in OFFERS
    ]


def _without_options(connection: bytes) -> bytes:
    options = [option.strip() for option in connection.split(b",")]
    return b", ".join(option for option in options if option.lower() not in OFFERS)


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Have an answer without a length end with its connection instead of being sent in chunks."""
    send, cycle.chunked_encoding = cycle.send, False

    async def unchunked(message: Any) -> None:
        lengths = [int(value) for name, value in message.get("headers", ()) if name == b"content-length"]
        cycle.expected_content_length += sum(lengths)
        if message["type"] == "http.response.body" and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]


def _answer(error: RequestError) -> bytes:
    body = json.dumps(error_body(error)).encode()
    lines: dict[str, Any] = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{head}\r\n".encode() + body
