"""HTTP connections whose requests have headers of bounded size that arrive in bounded time."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bitnet.server.errors import RequestError
from bitnet.server.openai import error_body

HEADER_SECONDS = 30.0
"""Seconds within which a request's headers must arrive, from when the connection opens or the request begins."""
MAX_HEADERS = 64 << 10
"""Maximum bytes of a request's target and headers, and of what follows a chunked body."""

TOO_LARGE = RequestError(431, f"The request's headers are larger than the {MAX_HEADERS:,} bytes that are allowed.")
TOO_SLOW = RequestError(408, f"The request's headers did not arrive within {HEADER_SECONDS:.0f} seconds.")
NOT_HTTP = RequestError(400, "This is not a valid HTTP request.")


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's, with limits on headers. The application sees a request only after its headers."""

    _timer: asyncio.TimerHandle | None = None
    _begun = False  # whether a part of a request's headers has come
    _received = 0  # bytes since the request began or the last piece of its body came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        if self._received > MAX_HEADERS:
            self._refuse(TOO_LARGE)
        elif self._timer is None and self.timeout_keep_alive_task is None and self._idle:
            self._expect_headers()  # blank lines before a request, which end uvicorn's own time limit

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._received = True, 0
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._begun = False
        self._received = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._received > MAX_HEADERS:
            raise TOO_LARGE  # the parser ends, and send_400_response() is called
        self._received = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._received = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(TOO_LARGE if self._received > MAX_HEADERS else NOT_HTTP)

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


def _answer(error: RequestError) -> bytes:
    body = json.dumps(error_body(error)).encode()
    lines: dict[str, Any] = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{head}\r\n".encode() + body
