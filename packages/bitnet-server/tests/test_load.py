"""200 clients at once: some cancel, disconnect, read slowly or send nonsense; no answer is mixed up or lost.

The answers are scripted, so each can be checked: the client's nonce, repeated. The device computes nothing, and what is
tried is the queue, the scheduler, the threads and the connections.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from bitnet.core import Model

HERE = (
    "packages/bitnet-server/src",
    "packages/bitnet-core/src/bitnet/core/engine",
    "packages/bitnet-core/src/bitnet/core/api.py",
)
CLIENTS = 200
QUEUE = 60


def answer_to(prompt: str) -> str:
    found = re.search(r"nonce (\d+) times (\d+)", prompt)
    assert found, prompt
    return f"{found[1]} " * int(found[2])


class Client:
    """One client, which does something else each time and counts how it ended."""

    def __init__(self, server: Any, chance: random.Random, ends: Counter[str]) -> None:
        self._server, self._chance, self._ends = server, chance, ends

    async def run(self, http: httpx.AsyncClient, until: float) -> None:
        ways = (
            [self._whole] * 4 + [self._stream] * 4 + [self._leave] * 2 + [self._nonsense, self._oversized, self._slow]
        )
        while time.monotonic() < until:
            try:
                await self._chance.choice(ways)(http)
            except (httpx.TransportError, OSError) as error:  # a lost answer is none of the clients' doing
                self._ends[f"lost: {type(error).__name__}: {error}"] += 1
            await asyncio.sleep(self._chance.random() * 0.05)

    def _body(self, stream: bool) -> tuple[dict[str, Any], str]:
        nonce, times = self._chance.randrange(10**9), self._chance.randrange(1, 12)
        message = f"nonce {nonce} times {times}"
        return {"messages": [{"role": "user", "content": message}], "stream": stream}, answer_to(message)

    def _refused(self, answer: httpx.Response) -> bool:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            self._ends["refused"] += 1
            return True
        assert answer.status_code == 200, answer.text
        return False

    async def _whole(self, http: httpx.AsyncClient) -> None:
        body, expected = self._body(False)
        answer = await http.post("/v1/chat/completions", json=body)
        if not self._refused(answer):
            assert answer.json()["choices"][0]["message"]["content"] == expected
            self._ends["whole"] += 1

    async def _stream(self, http: httpx.AsyncClient, pause: float = 0.0) -> None:
        body, expected = self._body(True)
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._refused(answer)
                return
            text, done = "", False
            async for line in answer.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content", "")
                await asyncio.sleep(pause)
        assert (text, done) == (expected, True)
        self._ends["streamed slowly" if pause else "streamed"] += 1

    async def _slow(self, http: httpx.AsyncClient) -> None:
        await self._stream(http, 0.02)

    async def _leave(self, http: httpx.AsyncClient) -> None:
        """Send a request on a connection of its own, and go at any moment."""
        body = json.dumps(self._body(self._chance.random() < 0.5)[0]).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body[: self._chance.choice([0, len(body) // 2, len(body), len(body)])])
        await asyncio.sleep(self._chance.random() * 0.2)
        writer.transport.abort()
        self._ends["left"] += 1

    async def _nonsense(self, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/chat/completions", content=self._chance.randbytes(50))
        assert answer.status_code in (400, 429), answer.text
        self._ends["nonsense"] += 1

    async def _oversized(self, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/chat/completions", content=b"x" * 200_000)
        assert answer.status_code in (413, 429), answer.text
        self._ends["oversized"] += 1


async def press(server: Any, seconds: float, seed: int) -> Counter[str]:
    """200 clients for some seconds; how often each thing happened."""
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        clients = [Client(server, random.Random(seed + i), ends) for i in range(CLIENTS)]
        await asyncio.gather(*(client.run(http, until) for client in clients))
    return ends


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def other_threads() -> Counter[str]:
    """Names of the threads, but for the pool that makes prompts: it starts its few threads one by one."""
    return Counter(t.name for t in threading.enumerate() if not t.name.startswith("bitnet-http"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.skipif(sys.platform != "linux", reason="memory and descriptors are read from /proc")
@pytest.mark.nightly(unless_changed=HERE)
def test_two_hundred_clients(script_model: Model, running: Any, scripted: Any) -> None:
    seconds = float(os.environ.get("BITNET_LOAD_SECONDS", "30"))
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    engine = scripted(script_model, answer_to)
    most = 0
    with running(script_model, max_queue=QUEUE, max_body=100_000) as server:
        asyncio.run(press(server, seconds / 3, seed))  # warm-up
        gc.collect()
        memory, files, threads = resident(), open_files(), other_threads()
        watched = threading.Event()

        def watch() -> None:
            nonlocal most
            while not watched.wait(0.01):
                most = max(most, server.host.present)

        watcher = threading.Thread(target=watch)
        watcher.start()
        ends = asyncio.run(press(server, seconds, seed + CLIENTS))
        watched.set()
        watcher.join()
        end = time.monotonic() + 20
        while (
            server.host.present or script_model.load().running or script_model.load().waiting
        ) and time.monotonic() < end:
            time.sleep(0.05)
        engine._answers.clear()
        gc.collect()
        print(dict(ends), f"memory {memory:,} → {resident():,}, at most {most} requests")
        assert not [name for name in ends if name.startswith("lost")], ends
        assert all(
            ends[name] for name in ("whole", "streamed", "streamed slowly", "left", "nonsense", "oversized", "refused")
        )
        load = script_model.load()
        assert (server.host.present, load.running, load.waiting, load.kv_used) == (0, 0, 0, 0)
        assert most == 4 + QUEUE
        assert resident() < memory * 1.05
        assert other_threads() == threads
        end = time.monotonic() + 10
        while open_files() > files and time.monotonic() < end:
            time.sleep(0.05)
        assert open_files() <= files
        assert server.chat("nonce 7 times 2").json()["choices"][0]["message"]["content"] == "7 7 "
