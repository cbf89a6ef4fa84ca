"""A cluster of three nodes: the tests of the server's clients, unchanged, and a node that fails under load."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from bitnet.core.model.default import default_model_path

if TYPE_CHECKING:
    from .conftest import Node, Served

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly,
]
ENGINE = "ServeReplica:bitnet:engine"
TESTS = Path(__file__).parent.parent
CLIENTS = ["openai", "anthropic", "ollama", "langchain", "litellm"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A head and two more nodes, with a replica on each."""

    head: Node
    workers: tuple[Node, Node]
    server: Served


@pytest.fixture(scope="module")
def cluster(
    head: Callable[..., AbstractContextManager[Node]],
    worker: Callable[..., AbstractContextManager[Node]],
    served: Callable[..., AbstractContextManager[Served]],
    environment: Mapping[str, str],
) -> Iterator[Cluster]:
    with head(2) as first, worker(first.address, 2) as second, worker(first.address, 2) as third:
        options = ["--replicas", "3", "-np", "4", "--alias", "demo", "--address", first.address]
        with served(environment, *options) as server:
            yield Cluster(first, (second, third), server)


def test_clients(cluster: Cluster) -> None:
    files = [str(TESTS / f"test_{name}_client.py") for name in CLIENTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "nightly or not nightly", *files],
        env={**os.environ, "BITNET_TEST_URL": cluster.server.url},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r"^(\d+) passed in ", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout
    assert found is not None, done.stdout
    assert int(found[1]) >= 25


def test_a_node_that_fails(cluster: Cluster) -> None:
    """Requests that had not begun to stream are answered; streams end whole, with an error, or with their proxy."""
    lost = cluster.workers[1]
    assert [len(node.pids(ENGINE)) for node in (cluster.head, *cluster.workers)] == [1, 1, 1]
    endings: list[str] = []
    killed = 0.0

    async def load() -> list[int]:
        nonlocal killed
        # The node takes the connections of its own proxy with it: the official client then asks again.
        async with openai.AsyncOpenAI(base_url=f"{cluster.server.url}/v1", api_key="none", timeout=120) as client:
            running = [asyncio.Event() for _ in range(12)]
            streams = [asyncio.ensure_future(streamed(client, one)) for one in running]
            await until_ten(running)
            whole = [asyncio.ensure_future(ask(client)) for _ in range(12)]
            await asyncio.sleep(0.3)
            await until_ten(running)
            assert not all(one.done() for one in whole)
            lost.kill()
            killed = time.monotonic()
            answered = await asyncio.gather(*whole)
            endings.extend(await asyncio.gather(*streams))
            return answered

    async def until_ten(running: list[asyncio.Event]) -> None:
        """Wait until ten streams have begun. Two replicas have places for eight, so the third one has two at least."""
        while sum(one.is_set() for one in running) < 10:
            await asyncio.sleep(0.01)

    async def streamed(client: openai.AsyncOpenAI, running: asyncio.Event) -> str:
        """How the stream ends that is under way when the node is killed: one follows another until then."""
        ending = await stream(client, running)
        while not killed:
            ending = await stream(client, running)
        return ending

    assert asyncio.run(load()) == [200] * 12
    print(f"all were answered {time.monotonic() - killed:.1f} s after the node was killed; streams: {endings}")
    assert set(endings) <= {"length", "replica_lost", "connection"}
    assert set(endings) != {"length"}
    while sum(len(node.pids(ENGINE)) for node in (cluster.head, cluster.workers[0])) < 3:
        assert time.monotonic() - killed < 60
        assert cluster.server.status() == 200
        time.sleep(0.2)
    print(f"{time.monotonic() - killed:.1f} s after that, its replica had begun elsewhere")


async def ask(client: openai.AsyncOpenAI) -> int:
    """The tokens of an answer that has 200."""
    found = await client.completions.create(
        model="demo", prompt=os.urandom(8).hex(), max_tokens=200, extra_body={"ignore_eos": True}
    )
    assert found.usage is not None
    return found.usage.completion_tokens


async def stream(client: openai.AsyncOpenAI, running: asyncio.Event) -> str:
    """How a stream of 900 tokens ends; the event is set from its first chunk to its end."""
    chunks = await client.completions.create(
        model="demo", prompt=os.urandom(8).hex(), max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    reason = None
    try:
        async for chunk in chunks:
            running.set()
            reason = chunk.choices[0].finish_reason
    except openai.APIError as error:
        return str(error.code)
    except httpx.TransportError:
        return "connection"
    finally:
        running.clear()
    return str(reason)


def test_a_model_that_one_node_cannot_read(
    head: Callable[..., AbstractContextManager[Node]],
    worker: Callable[..., AbstractContextManager[Node]],
    environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    """One line, and nothing is deployed."""
    model = tmp_path / "hub" / "models--org--name"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    (snapshot / "model.gguf").symlink_to(default_model_path())
    here = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    there = {**here, "HF_HUB_CACHE": str(tmp_path / "empty")}
    with head(1, **here) as first, worker(first.address, 1, **there):
        options = ["--address", first.address, "--replicas", "2", "--device", "cpu", "-m", "hf:org/name"]
        done = subprocess.run(
            [sys.executable, "-m", "bitnet.core", "serve", "--ray", *options],
            env={**environment, **here},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert re.fullmatch(r"(bitnet: )?error: node \S+ cannot read the model: .*\n?", done.stderr), done.stderr
        assert first.pids("Serve") == []
