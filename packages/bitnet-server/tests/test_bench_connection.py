"""The load generator's connections: answers in any pieces and of any framing, and connections that end."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable

import pytest

from bitnet.server.bench.connection import Connection, Server

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def received(reader: asyncio.StreamReader) -> tuple[list[bytes], bytes]:
    """A request's lines and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.strip().split(b"\r\n")
    length = next(int(line.partition(b":")[2]) for line in lines if line.lower().startswith(b"content-length"))
    return lines, await reader.readexactly(length)


def with_server(answer: Answer, use: Callable[[str], Awaitable[None]]) -> None:
    async def serve() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(asyncio.wait_for(serve(), 30))


def chunked(body: bytes, rng: random.Random) -> bytes:
    """A body as HTTP's chunks of random lengths."""
    made = b""
    while body:
        size = rng.randint(1, 50)
        piece, body = body[:size], body[size:]
        made += b"%x\r\n%b\r\n" % (len(piece), piece)
    return made + b"0\r\n\r\n"


@pytest.mark.parametrize("framing", ["length", "chunks", "end"])
def test_an_answer_in_random_pieces(framing: str) -> None:
    rng = random.Random()
    bodies = [rng.randbytes(rng.randint(0, 400)) for _ in range(20)]
    requests = [rng.randbytes(rng.randint(1, 100)) for _ in bodies]
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                _, body = await received(reader)
            except asyncio.IncompleteReadError:
                break
            sent = bodies[len(seen)]
            seen.append(body)
            head = {"length": b"content-length: %d" % len(sent), "chunks": b"Transfer-Encoding: chunked"}
            line = head.get(framing, b"connection: close")
            data = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 207 Some\r\n%b\r\nx-last: 1\r\n\r\n" % line
            data += chunked(sent, rng) if framing == "chunks" else sent
            while data:
                size = rng.randint(1, 60)
                writer.write(data[:size])
                await writer.drain()
                await asyncio.sleep(0)
                data = data[size:]
            if framing == "end":
                break
        writer.close()

    async def use(url: str) -> None:
        server, opened = Server(url, {}), 0
        connection = None
        for request, body in zip(requests, bodies, strict=True):
            if connection is None or not connection.usable:
                connection, opened = await Connection.open(server), opened + 1
            got = bytearray()

            def take(status: int, piece: bytes, now: float, got: bytearray = got) -> None:
                assert status == 207
                got.extend(piece)

            assert await connection.ask(server.post("/p", request), take) == 207
            assert got == body
        assert opened == (len(bodies) if framing == "end" else 1)
        assert connection is not None
        connection.close()

    with_server(answer, use)
    assert seen == requests


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\nx: 1\r\n\r\n123",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200",
        b"SSH-2.0-OpenSSH_9.9\r\n",
    ],
)
def test_a_connection_that_ends_too_early(data: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await received(reader)
        writer.write(data)
        writer.close()

    async def use(url: str) -> None:
        server = Server(url, {})
        connection = await Connection.open(server)
        with pytest.raises(OSError, match=r"the server closed the connection|no valid answer in HTTP"):
            await connection.ask(server.post("/p", b"{}"), lambda status, piece, now: None)
        assert not connection.usable

    with_server(answer, use)


def test_an_error_of_the_reader_is_raised_where_the_answer_is_awaited() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await received(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n123")

    def take(status: int, piece: bytes, now: float) -> None:
        raise KeyError(piece)

    async def use(url: str) -> None:
        server = Server(url, {})
        connection = await Connection.open(server)
        with pytest.raises(KeyError, match="123"):
            await connection.ask(server.post("/p", b"{}"), take)
        assert not connection.usable

    with_server(answer, use)


def test_a_connection_that_its_server_closed_is_not_used_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await received(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()

    async def use(url: str) -> None:
        server = Server(url, {})
        connection = await Connection.open(server)
        assert await connection.ask(server.post("/p", b"{}"), lambda status, piece, now: None) == 200
        assert connection.usable
        while connection.usable:
            await asyncio.sleep(0.01)

    with_server(answer, use)


def test_a_connection_that_its_server_will_close_is_not_used_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await received(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    async def use(url: str) -> None:
        server = Server(url, {})
        connection = await Connection.open(server)
        assert await connection.ask(server.post("/p", b"{}"), lambda status, piece, now: None) == 200
        assert not connection.usable
        connection.close()

    with_server(answer, use)


def test_what_a_request_says() -> None:
    server = Server("http://us%3Aer:pass@[::1]:8123/base/", {"accept-encoding": "identity"})
    assert (server.host, server.port, server.tls) == ("::1", 8123, None)
    first, *lines, _, body = server.post("/v1/completions", b'{"a": 1}').split(b"\r\n")
    assert (first, body) == (b"POST /base/v1/completions HTTP/1.1", b'{"a": 1}')
    assert dict(line.decode().split(": ", 1) for line in lines) == {
        "host": "[::1]:8123",
        "accept-encoding": "identity",
        "authorization": f"Basic {base64.b64encode(b'us:er:pass').decode()}",
        "content-type": "application/json",
        "content-length": "8",
    }
    keyed = Server("https://user:pass@example.org", {"authorization": "Bearer key"})
    assert (keyed.host, keyed.port) == ("example.org", 443)
    assert keyed.tls is not None
    assert b"authorization: Bearer key\r\n" in keyed.post("/v1/completions", b"")
    assert b"Basic" not in keyed.post("/v1/completions", b"")


def test_nobody_listens() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    async def gone() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
        with pytest.raises(OSError):  # noqa: PT011 - each system has its words
            await Connection.open(Server(f"http://127.0.0.1:{port}", {}))

    asyncio.run(gone())
