"""200 clients at once: some cancel, disconnect, read slowly or send nonsense; no answer is mixed up or lost.

The answers are scripted, so each can be checked: the client's nonce, repeated. The device computes nothing, and what is
tried is the queue, the scheduler, the threads and the connections; it fails every few seconds, and the model is loaded
anew. The clients run in a process of their own (this file, run as a program), so that the server's memory is its own.

Five minutes: ``uv run pytest -n0 -s -m nightly packages/bitnet-server/tests/test_load.py -k five_minutes``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from bitnet.core import Model, load_model
from bitnet.core.errors import DeviceLostError, OutOfMemoryError
from bitnet.core.model.default import default_model_path
from bitnet.core.text import sandbox
from bitnet.core.text.sandbox.pool import HELPERS
from bitnet.server.models.service import Source
from bitnet.server.models.threads import PROMPT_THREADS

HERE = (
    "packages/bitnet-server/src",
    "packages/bitnet-core/src/bitnet/core/engine",
    "packages/bitnet-core/src/bitnet/core/api.py",
)
CLIENTS = 200
MAX_SEQS = 4  # as in conftest.py
QUEUE = 60
FAULT_SECONDS = 5.0
"""Seconds between two failures of the device."""
WARM_UP = 20.0
"""Seconds at least that the server is pressed before its memory is looked at: its heap takes so long to settle."""
WARM_UP_FAULT_SECONDS = 1.5
"""Models are then loaded more often, for once in each thread that may, as each has a heap of its own."""
WARM_RELOADS, RELOADS = 10, 20
RELOAD_BYTES = 200_000
"""Bytes that a reload may leave."""
SETTLED = 10
"""Looks, a tenth of a second apart, at which the number of descriptors is the same once all connections are closed."""
MAX_BODY = 100_000
FAILURES = (DeviceLostError, OutOfMemoryError)


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
            [self._whole] * 4
            + [self._stream] * 4
            + [self._leave] * 2
            + [self._nonsense, self._oversized, self._garbled, self._slow]
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
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
            self._ends["refused"] += 1
            return True
        if answer.status_code == 503:
            assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("device_error", "5")
            self._ends["failed"] += 1
            return True
        return False

    async def _whole(self, http: httpx.AsyncClient) -> None:
        body, expected = self._body(False)
        answer = await http.post("/v1/chat/completions", json=body)
        if not self._refused(answer):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == expected
            self._ends["whole"] += 1

    async def _stream(self, http: httpx.AsyncClient, pause: float = 0.0) -> None:
        body, expected = self._body(True)
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                assert self._refused(answer), answer.text
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
        if not self._refused(answer):
            assert answer.status_code == 400, answer.text
            assert "JSON" in answer.json()["error"]["message"]
            self._ends["nonsense"] += 1

    async def _oversized(self, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/chat/completions", content=b"x" * (MAX_BODY * 2))
        if not self._refused(answer):
            assert answer.status_code == 413, answer.text
            assert f"{MAX_BODY:,}" in answer.json()["error"]["message"]
            self._ends["oversized"] += 1

    async def _garbled(self, http: httpx.AsyncClient) -> None:
        """Send what is no HTTP, on a connection of its own; it is told so, and the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: twelve\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        writer.close()
        self._ends["garbled"] += 1


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
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def thread_names() -> Counter[str]:
    return Counter(re.sub(r"\d+", "", thread.name) for thread in threading.enumerate())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def fill_pools(state: Any) -> None:
    """Start all threads and helper processes that make prompts; they are kept, and would start one by one."""
    together = threading.Barrier(PROMPT_THREADS)
    for waiting in [state.shared.threads.submit(together.wait, 60) for _ in range(PROMPT_THREADS)]:
        waiting.result()
    helpers = [sandbox._pool._take() for _ in range(HELPERS)]
    for helper in helpers:
        helper.ask(b'["", []]')
    for helper in helpers:
        sandbox._pool._give(helper)


class Watch:
    """Looks at a server all the time, and has its device fail every few seconds.

    Attributes:
        most: Requests that were there at the same time.
        sizes: Bytes of this process in memory, each time it was looked at.
        faults: How often the device has failed.
    """

    def __init__(self, state: Any, models: list[Model], fault_seconds: float) -> None:
        self.most = self.faults = 0
        self.sizes = array("Q")
        self._state, self._models, self._fault_seconds = state, models, fault_seconds
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, name="test") for work in (self._look, self._fail)]

    def _look(self) -> None:
        while not self._over.wait(0.01):
            load = self._models[-1].load()
            self.most = max(self.most, self._state.admission.present, load.running + load.waiting)
            self.sizes.append(resident())

    def _fail(self) -> None:
        due = time.monotonic() + self._fault_seconds
        while not self._over.wait(max(due - time.monotonic(), 0)):
            service = self._state.pool.models[0].service
            if not (self._state.ready and service.proved):  # it would not be loaded anew
                self._over.wait(0.05)
                continue
            engine: Any = self._models[-1]._worker.engine
            engine.failure = FAILURES[self.faults % len(FAILURES)]("it failed.", device="cuda:7")
            self.faults += 1
            due += self._fault_seconds

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, pytest keeps no log records: a few kilobytes for each of thousands would count as the server's memory."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.NullHandler()]
    try:
        yield
    finally:
        root.handlers = handlers


def check_load(running: Any, scripted: Any, seconds: float) -> None:
    """Press a server, whose device fails now and then, and see that nothing is left of it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    models: list[Model] = []
    gc.collect()  # what other tests left, which holds descriptors

    def load() -> Model:
        model = load_model(device="cpu", max_seqs=MAX_SEQS, threads=1, max_queue=QUEUE)
        scripted(model, answer_to)
        models[:] = [model]
        return model

    source = Source(("m",), Path(default_model_path()), load)
    with unrecorded(), running(None, sources=[source], max_queue=QUEUE, max_body=MAX_BODY) as server:

        def idle() -> bool:
            load = models[0].load()
            here = (server.state.admission.present, load.running, load.waiting, load.kv_used)
            return here == (0, 0, 0, 0) and server.state.ready

        def rest() -> tuple[int, Counter[str]]:
            """Descriptors and threads, once nothing runs and every client's connection is closed."""
            seen = [0]
            while len(seen) < SETTLED or len({*seen[-SETTLED:]}) > 1 or not idle():
                server.chat("nonce 7 times 2")  # the first one may yet meet the last fault
                assert len(seen) < 20 * SETTLED, f"it does not come to rest: {models[0].load()}, {seen[-SETTLED:]}"
                time.sleep(0.1)
                seen.append(open_files())
            assert server.chat("nonce 7 times 2").json()["choices"][0]["message"]["content"] == "7 7 "
            return open_files(), thread_names()

        fill_pools(server.state)
        with Watch(server.state, models, WARM_UP_FAULT_SECONDS):
            press_from_outside(server.url, max(WARM_UP, seconds / 5), seed)
        files, threads = rest()
        with Watch(server.state, models, FAULT_SECONDS) as watch:
            ends = press_from_outside(server.url, seconds, seed + CLIENTS)
        files_after, threads_after = rest()
        third = len(watch.sizes) // 3
        before, after = fmean(watch.sizes[:third]), fmean(watch.sizes[-third:])
        change = 100 * (after - before) / before
        print(
            f"{dict(ends)}, {watch.faults} faults, {watch.most} requests at most, "
            f"memory {before / 1e6:.1f} → {after / 1e6:.1f} MB ({change:+.1f} %), means of the first and last third, "
            f"{min(watch.sizes) / 1e6:.1f} to {max(watch.sizes) / 1e6:.1f} MB in all; "
            f"{files} → {files_after} descriptors, {threads.total()} → {threads_after.total()} threads"
        )
        assert not [name for name in ends if name.startswith("lost")], ends
        for name in (
            "whole",
            "streamed",
            "streamed slowly",
            "left",
            "nonsense",
            "oversized",
            "garbled",
            "refused",
            "failed",
        ):
            assert ends[name], name
        assert watch.faults >= seconds // FAULT_SECONDS - 2
        assert watch.most == MAX_SEQS + QUEUE
        assert abs(change) <= 5
        assert files_after <= files  # what other tests left may have been closed meanwhile
        assert threads_after <= threads


def answer_many(server: Any) -> None:
    """Have each thread that makes prompts cut words it has not seen into tokens, and one answer fit a schema."""
    words = [" ".join(map(str, random.sample(range(10**9), 500))) for _ in range(2 * PROMPT_THREADS)]
    with ThreadPoolExecutor(PROMPT_THREADS) as pool:
        for counted in pool.map(lambda text: server.client.post("/tokenize", json={"content": text}), words):
            assert counted.json()["count"] >= 500
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [random.random()]}}}
    assert server.chat(response_format=form).status_code == 200


linux = pytest.mark.skipif(sys.platform != "linux", reason="memory and descriptors are read from /proc")


@linux
@pytest.mark.nightly(unless_changed=(*HERE, "packages/bitnet-core/src/bitnet/core/text"))
def test_reloads_leave_no_memory(running: Any) -> None:
    """What a reload leaves is a tenth of what the tokenizer of each model would leave that is not let go whole."""

    def load() -> Model:
        return load_model(device="cpu", max_seqs=MAX_SEQS, threads=1)

    with running(None, sources=[Source(("m",), Path(default_model_path()), load)]) as server:
        fill_pools(server.state)
        sizes = []
        for _ in range(WARM_RELOADS + RELOADS):
            answer_many(server)
            assert server.client.post("/reload").json() == {"models": {"m": "reloaded"}}
            gc.collect()
            sizes.append(resident())
    sizes = sizes[WARM_RELOADS:]
    print("MB:", [round(size / 1e6, 1) for size in sizes])
    assert max(sizes[RELOADS // 2 :]) - max(sizes[: RELOADS // 2]) < RELOAD_BYTES * RELOADS // 2


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
