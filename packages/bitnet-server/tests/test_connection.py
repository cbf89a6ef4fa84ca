"""What a connection is allowed before its request reaches the application."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from bitnet.core import Model
from bitnet.server.http import connection

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def spoken(server: Any, *pieces: bytes) -> bytes:
    """What the server says to a client that sends these pieces and then waits for the connection to be closed."""
    said = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
            while got := client.recv(1 << 16):
                said += got
        except ConnectionError:  # closed with bytes of ours unread
            pass
    return said


def answered(said: bytes) -> tuple[int, str]:
    """Status and message of the only answer."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "pieces",
    [
        [GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n"],
        [GET + b"".join(b"X%d: %s\r\n" % (i, b"a" * 1000) for i in range(70)) + b"\r\n"],
        [b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ],
    ids=["one header", "many headers", "target"],
)
def test_headers_that_are_too_large(demo: Any, pieces: list[bytes]) -> None:
    assert answered(spoken(demo, *pieces)) == (431, str(connection.TOO_LARGE))


def test_headers_without_end_are_not_kept(demo: Any) -> None:
    """Far more than fits into the buffers of the two sockets: the server stops reading."""
    said = spoken(demo, GET, *[b"X: " + b"a" * 60_000 + b"\r\n"] * 2000)
    assert not said or answered(said)[0] == 431  # lost where the client's own bytes crossed it
    said = spoken(demo, GET, b"X: ", *[b"a" * 60_000] * 2000)
    assert not said or answered(said)[0] == 431


def test_trailers_without_end_are_not_kept(demo: Any) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    assert spoken(demo, head, *[b"X: " + b"a" * 60_000 + b"\r\n"] * 2000) == b""


def test_headers_that_are_large_but_allowed(demo: Any) -> None:
    assert demo.client.get("/health", headers={"x": "a" * 60_000}).status_code == 200
    body = b'{"content": "a"' + b" " * 200_000 + b"}"
    said = spoken(
        demo,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body,
    )
    assert said.startswith(b"HTTP/1.1 200")


def test_headers_that_do_not_come(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 1.0)
    assert spoken(demo) == b""
    assert spoken(demo, b"\r\n") == b""
    assert answered(spoken(demo, b"GE"))[0] == 408
    assert answered(spoken(demo, GET, b"X: a"))[0] == 408
    first, second = spoken(demo, GET + b"\r\n", GET).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert second.startswith(b"408")
    with socket.create_connection(("127.0.0.1", demo.port), timeout=20) as client:
        client.sendall(GET + b"\r\n")
        said = b""
        while not said.endswith(b'{"status":"ok"}'):
            said += client.recv(1 << 16)
        client.sendall(b"\r\n")
        assert client.recv(1 << 16) == b""


def test_an_answer_may_take_longer_than_headers(
    running: Any, scripted: Any, script_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 1.0)
    with running(script_model) as server:
        scripted(script_model, "one two three four five six seven eight").seconds = 0.3
        assert server.chat().json()["choices"][0]["message"]["content"].endswith("eight")


def test_what_is_not_http(demo: Any) -> None:
    assert answered(spoken(demo, b"\x16\x03\x01 hello\r\n\r\n")) == (400, str(connection.NOT_HTTP))


OFFER = (
    b"Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
)
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"content": "hello"}'
CHUNKED = (
    b"Transfer-Encoding: chunked\r\n\r\n4\r\n" + BODY[:4] + b"\r\n%x\r\n" % len(BODY[4:]) + BODY[4:] + b"\r\n0\r\n\r\n"
)
WHOLE = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LAST = GET + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("body", [WHOLE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("cut", ["whole", "bytes"])
def test_an_offer_of_another_protocol_is_passed_over(demo: Any, body: bytes, cut: str) -> None:
    """As Java's client and ``curl --http2`` make one; the connection goes on with HTTP/1.1."""
    said = POST + OFFER + body + GET + OFFER + b"\r\n" + POST + body + LAST
    answers = spoken(demo, *([said] if cut == "whole" else [said[i : i + 1] for i in range(len(said))]))
    statuses = [int(answer[:3]) for answer in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200] * 4
    assert answers.count(b'"count":') == 2
    assert answers.count(b'{"status":"ok"}') == 2


def test_many_offers_at_once_and_offers_of_other_protocols(demo: Any) -> None:
    answers = spoken(demo, (GET + OFFER + b"\r\n") * 2000 + LAST)
    assert answers.count(b"HTTP/1.1 200") == 2001
    websocket = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
    assert spoken(demo, websocket + LAST).count(b"HTTP/1.1 200") == 2
    assert answered(spoken(demo, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")) == (405, str(connection.NO_PROXY))
    large = GET + OFFER + b"X: " + b"a" * 70_000 + b"\r\n\r\n"
    assert answered(spoken(demo, large)) == (431, str(connection.TOO_LARGE))


def test_http_1_0_gets_no_chunks(demo: Any) -> None:
    """Its streams end with the connection."""
    body = json.dumps({"prompt": "Once", "max_tokens": 5, "ignore_eos": True, "stream": True}).encode()
    said = spoken(demo, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head, _, events = said.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    lines = [line for line in events.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]"
    assert b'"length"' in lines[-2]
    assert spoken(demo, b"GET /health HTTP/1.0\r\n\r\n").endswith(b'\r\n\r\n{"status":"ok"}')
    page = spoken(demo, b"GET /assets/main.js HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(page[2]) in page[0] + b"\r\n"
    assert spoken(demo, b"HEAD /health HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n")


def test_doubled_slashes_come_as_they_are(demo: Any) -> None:
    """Clients whose base address ends with a slash write such paths."""
    assert spoken(demo, b"POST //tokenize/ HTTP/1.0\r\n" + WHOLE).startswith(b"HTTP/1.1 200")
    assert spoken(demo, b"GET /v1//models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
