"""200 clients at once: some cancel, disconnect, read slowly or send nonsense; no answer is mixed up or lost.

The answers are scripted, so each can be checked: the client's nonce, repeated. The device computes nothing, and what is
tried is the queue, the scheduler, the threads and the connections. The clients run in a process of their own (this
file, run as a program), so that the server's memory is its own, too. At the end its device fails every few seconds;
memory is looked at before, as the ``tokenizers`` library keeps some 5 MB of words of each tokenizer that is gone.

Five minutes: ``uv run pytest -n0 -s -m nightly packages/bitnet-server/tests/test_load.py -k five_minutes``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from bitnet.core import Model, load_model
from bitnet.core.errors import DeviceLostError
from bitnet.core.model.default import default_model_path
from bitnet.server.service import Source

HERE = (
    "packages/bitnet-server/src",
    "packages/bitnet-core/src/bitnet/core/engine",
    "packages/bitnet-core/src/bitnet/core/api.py",
)
CLIENTS = 200
QUEUE = 60
FAULT_SECONDS = 5.0
WORDS = 10_000
"""Words that the ``tokenizers`` library remembers at most, some 7 MB: all of them from the start."""


def answer_to(prompt: str) -> str:
    found = re.search(r"nonce (\d+) times (\d+)", prompt)
    assert found, prompt
    return f"{found[1]} " * int(found[2])


class Client:
    """One client, which does something else each time and counts how it ended."""

    def __init__(self, port: int, chance: random.Random, ends: Counter[str]) -> None:
        self._port, self._chance, self._ends = port, chance, ends

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
        if answer.status_code == 503:
            assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("device_error", "5")
            self._ends["failed"] += 1
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
                    said = json.loads(line[6:])
                    if "error" in said:
                        assert said["error"]["code"] == "device_error", said
                        assert expected.startswith(text)
                        self._ends["failed in a stream"] += 1
                        return
                    for choice in said["choices"]:
                        text += choice["delta"].get("content", "")
                await asyncio.sleep(pause)
        assert (text, done) == (expected, True)
        self._ends["streamed slowly" if pause else "streamed"] += 1

    async def _slow(self, http: httpx.AsyncClient) -> None:
        await self._stream(http, 0.02)

    async def _leave(self, http: httpx.AsyncClient) -> None:
        """Send a request on a connection of its own, and go at any moment."""
        body = json.dumps(self._body(self._chance.random() < 0.5)[0]).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body[: self._chance.choice([0, len(body) // 2, len(body), len(body)])])
        await asyncio.sleep(self._chance.random() * 0.2)
        writer.transport.abort()
        self._ends["left"] += 1

    async def _nonsense(self, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/chat/completions", content=self._chance.randbytes(50))
        assert answer.status_code in (400, 429, 503), answer.text
        self._ends["nonsense"] += 1

    async def _oversized(self, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/chat/completions", content=b"x" * 200_000)
        assert answer.status_code in (413, 429, 503), answer.text
        self._ends["oversized"] += 1


async def press(url: str, seconds: float, seed: int) -> Counter[str]:
    """200 clients for some seconds; how often each thing happened."""
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        clients = [Client(int(url.rpartition(":")[2]), random.Random(seed + i), ends) for i in range(CLIENTS)]
        await asyncio.gather(*(client.run(http, until) for client in clients))
    return ends


def press_from_outside(url: str, seconds: float, seed: int) -> Counter[str]:
    """:func:`press` in a process of its own; what its clients assert fails here."""
    command = [sys.executable, __file__, url, str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=False)
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout))


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def other_threads() -> Counter[str]:
    """Names of the threads, but for the pools that make prompts, which start their few threads one by one."""
    names = (t.name for t in threading.enumerate())
    return Counter(name for name in names if not name.startswith(("bitnet-http", "bitnet-template")))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def check_load(running: Any, scripted: Any, seconds: float) -> None:
    """Press a server, whose device fails now and then, and see that nothing is left of it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    models: list[Model] = []
    most = 0

    def load() -> Model:
        models[:] = [load_model(device="cpu", max_seqs=4, threads=1, max_queue=64)]
        scripted(models[0], answer_to)
        for word in range(WORDS):
            models[0].tokenizer.encode(f"{word:09}")
        return models[0]

    source = Source(("m",), Path(default_model_path()), load)
    with running(None, sources=[source], max_queue=QUEUE, max_body=100_000) as server:
        watched, failing = threading.Event(), threading.Event()

        def watch() -> None:
            nonlocal most
            while not watched.wait(0.01):
                most = max(most, server.host.present)

        def fail() -> None:
            failing.wait()
            while not watched.wait(FAULT_SECONDS):
                engine: Any = models[0]._worker.engine
                engine.failure = DeviceLostError("it stopped answering.", device="cuda:7")

        others = [threading.Thread(target=watch), threading.Thread(target=fail)]
        for thread in others:
            thread.start()
        try:
            press_from_outside(server.url, seconds / 3, seed)  # warm-up
            memory, files, threads = resident(), open_files(), other_threads()
            ends = press_from_outside(server.url, seconds, seed + CLIENTS)
            after, threads_after = resident(), other_threads()
            failing.set()
            ends += press_from_outside(server.url, 2.2 * FAULT_SECONDS, seed + 2 * CLIENTS)
        finally:
            watched.set()
            failing.set()
            for thread in others:
                thread.join()
        print(dict(ends), f"memory {memory:,} → {after:,}, at most {most} requests")
        assert not [name for name in ends if name.startswith("lost")], ends
        assert all(
            ends[name] for name in ("whole", "streamed", "streamed slowly", "left", "nonsense", "oversized", "refused")
        )
        assert ends["failed"] + ends["failed in a stream"]
        assert most == 4 + QUEUE
        assert after < memory * 1.05
        assert threads_after == threads

        def idle() -> bool:
            load = models[0].load()
            return (server.host.present, load.running, load.waiting, load.kv_used) == (0, 0, 0, 0)

        end = time.monotonic() + 20
        while not (idle() and open_files() <= files and server.host.ready) and time.monotonic() < end:
            time.sleep(0.05)
        assert idle()
        assert open_files() <= files
        assert server.chat("nonce 7 times 2").json()["choices"][0]["message"]["content"] == "7 7 "


linux = pytest.mark.skipif(sys.platform != "linux", reason="memory and descriptors are read from /proc")


@linux
@pytest.mark.nightly(unless_changed=HERE)
def test_two_hundred_clients(running: Any, scripted: Any) -> None:
    check_load(running, scripted, 30)


@linux
@pytest.mark.nightly
def test_two_hundred_clients_for_five_minutes(running: Any, scripted: Any) -> None:
    check_load(running, scripted, 300)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(press(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))))
