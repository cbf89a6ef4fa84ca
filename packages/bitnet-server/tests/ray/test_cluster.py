"""``bitnet serve --ray`` on a cluster of this machine: two replicas, one of which is killed, and the way it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bitnet.core import Model

if TYPE_CHECKING:
    from .conftest import Served

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly(unless_changed=("packages/bitnet-server/src/bitnet/server/ray",)),
]
STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def cluster(served: Callable[..., AbstractContextManager[Served]]) -> Iterator[Served]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with served(environment, "--replicas", "2", "-c", "1024", "-np", "4", "--max-queue", "40") as found:
        yield found


def test_answers_are_those_of_the_model(cluster: Served, demo_model: Model) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    expected = demo_model.chat(question, max_tokens=30, temperature=0)
    body = {"messages": question, "max_tokens": 30, "temperature": 0, "x_bitnet_receipt": True}
    answer = cluster.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "a-request-of-mine"})
    document = answer.json()
    assert document["choices"][0]["message"]["content"] == expected.text
    assert document["usage"]["completion_tokens"] == len(expected.tokens)
    assert answer.headers["x-request-id"] == "a-request-of-mine"
    replica = document["x_bitnet_receipt"]["environment"]["replica"]
    assert f"replica {replica['id']} on node {replica['node']} serves" in cluster.log("engine")
    for name in ("ingress", "engine"):
        assert "a-request-of-mine" in cluster.log(name)
    with cluster.client.stream("POST", "/v1/completions", json={**STORY, "max_tokens": 40, "n": 2}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_each_replica_has_gauges_in_the_servers_form_and_in_rays(cluster: Served) -> None:
    """Both say the same, of as many replicas, once nothing changes any more."""

    def gauges(text: str, prefix: str) -> dict[tuple[str, str], float]:
        return {
            (sample.name.removeprefix(prefix), sample.labels["replica"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(prefix)
        }

    (file,) = cluster.logs.parent.parent.glob("metrics_export_port_*")
    body = {"prompt": "The sun shone on the house by the sea. " * 9, "max_tokens": 3}
    usage = [cluster.client.post("/v1/completions", json=body).json()["usage"] for _ in range(3)]
    assert usage[2]["prompt_tokens_details"]["cached_tokens"] > 64
    ends = time.monotonic() + 120  # Ray asks its processes every 10 s
    while True:
        ours = gauges(cluster.client.get("/metrics").text, "bitnet_replica_")
        rays = gauges(httpx.get(f"http://127.0.0.1:{file.read_text()}/metrics").text, "ray_bitnet_replica_")
        if ours == pytest.approx(rays) and len({replica for _, replica in ours}) == 2 and max(ours.values()) > 0:
            break
        assert time.monotonic() < ends, (ours, rays)
        time.sleep(0.5)
    assert {name for name, _ in ours} == {"prompt_tokens_waiting", "kv_use_ratio", "cached_ratio"}
    assert {value for (name, _), value in ours.items() if name != "cached_ratio"} == {0}
    assert all(replica in cluster.log("engine") for _, replica in ours)


def test_errors_and_forms_are_the_servers(cluster: Served) -> None:
    long = cluster.client.post("/v1/completions", json={"prompt": "a " * 3000, "max_tokens": 5})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    broken = cluster.client.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "("}})
    assert broken.status_code == 400
    assert broken.json()["error"]["message"].startswith("structured_outputs.regex cannot be compiled")
    asked = {"prompt": "A number:", "structured_outputs": {"regex": "[0-9]{3}"}, "max_tokens": 10}
    assert re.fullmatch("[0-9]{3}", cluster.client.post("/v1/completions", json=asked).json()["choices"][0]["text"])
    assert cluster.client.post("/v1/completions", json={"prompt": "a", "model": "other"}).status_code == 404


def test_vectors_are_those_of_the_model(cluster: Served, demo_model: Model) -> None:
    texts = ["What is BitNet?", "Weather", "naïve 😀 text"]
    answer = cluster.client.post("/v1/embeddings", json={"input": texts})
    found = np.array([one["embedding"] for one in answer.json()["data"]], np.float32)
    np.testing.assert_array_equal(found, demo_model.embed(texts))
    last = cluster.client.post("/v1/embeddings", json={"input": texts[1], "pooling": "last"}).json()
    np.testing.assert_array_equal(
        np.array(last["data"][0]["embedding"], np.float32), demo_model.embed(texts[1:2], pooling="last")[0]
    )
    ranked = cluster.client.post("/v1/rerank", json={"query": texts[1], "documents": texts}).json()["results"]
    assert (ranked[0]["index"], round(ranked[0]["relevance_score"], 5)) == (1, 1)
    long = cluster.client.post("/v1/embeddings", json={"input": "a " * 3000})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_client_that_leaves_ends_its_generation(cluster: Served) -> None:
    def cancelled() -> int:
        return cluster.log("engine").count("CALL generate CANCELLED")

    before = cancelled()
    with cluster.client.stream("POST", "/v1/completions", json={**STORY, "n": 4}) as stream:
        next(stream.iter_lines())
    ends = time.monotonic() + 10
    while cancelled() == before:
        assert time.monotonic() < ends, cluster.log("engine")
        time.sleep(0.02)
    cluster.until("bitnet_requests_running", 0, 5)


def test_more_than_the_queue_holds_is_refused(cluster: Served) -> None:
    async def burst() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:
            body = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(80)))

    answers = asyncio.run(burst())
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} == {429}
    assert len(refused) + 8 >= 80 - 2 * 4 - 40
    for answer in refused:
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1


def test_conversations_stay_where_their_prefix_is(cluster: Served) -> None:
    async def talk(client: httpx.AsyncClient, number: int) -> int:
        messages: list[dict[str, str]] = []
        hits = before = 0
        for turn in range(5):
            text = f"Question {number}.{turn} of {os.urandom(4).hex()}: what is 17 + 25, and who said so?"
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "max_tokens": 8, "temperature": 0}
            document = (await client.post("/v1/chat/completions", json=body)).json()
            usage = document["usage"]
            hits += turn > 0 and usage["prompt_tokens_details"]["cached_tokens"] >= before - 32
            before = usage["prompt_tokens"]
            messages.append({"role": "assistant", "content": document["choices"][0]["message"]["content"]})
        return hits

    async def talks() -> int:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            return sum(await asyncio.gather(*(talk(client, i) for i in range(10))))

    assert asyncio.run(talks()) >= 0.9 * 40
    used = re.findall(r"replica (\w+), \d+ of \d+ tokens cached", cluster.log("ingress"))
    assert len(set(used)) == 2


def test_a_killed_replica_loses_no_request_that_has_not_begun_to_stream(cluster: Served) -> None:
    def pids() -> list[int]:
        return cluster.pids("ServeReplica:bitnet:engine")

    async def load() -> tuple[list[httpx.Response], list[str]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
            whole = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(8)]
            streams = [asyncio.ensure_future(streamed(client)) for _ in range(4)]
            await asyncio.sleep(0.5)
            os.kill(pids()[0], signal.SIGKILL)
            return await asyncio.gather(*whole), await asyncio.gather(*streams)

    async def streamed(client: httpx.AsyncClient) -> str:
        async with client.stream("POST", "/v1/completions", json=STORY) as stream:
            return "\n".join([line async for line in stream.aiter_lines()])

    assert len(pids()) == 2
    whole, streams = asyncio.run(load())
    assert [answer.status_code for answer in whole] == [200] * 8
    for text in streams:
        assert ("replica_lost" in text) != ('"finish_reason":"length"' in text)
    ends = time.monotonic() + 60
    while len(pids()) < 2:
        assert time.monotonic() < ends
        time.sleep(0.2)
    assert cluster.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("name", ["ServeController", "ServeReplica:bitnet:prefixes"])
def test_requests_go_on_without_what_only_steers_them(cluster: Served, name: str) -> None:
    """The controller and the index are killed under load, and replaced."""

    async def load() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}

            async def several() -> list[httpx.Response]:
                return [await client.post("/v1/completions", json=body) for _ in range(4)]

            asked = [asyncio.ensure_future(several()) for _ in range(8)]
            await asyncio.sleep(0.5)
            (pid,) = cluster.pids(name)
            os.kill(pid, signal.SIGKILL)
            return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    before = cluster.pids(name)
    assert [answer.status_code for answer in asyncio.run(load())] == [200] * 32
    ends = time.monotonic() + 60
    while (now := cluster.pids(name)) == before or not now:
        assert time.monotonic() < ends
        time.sleep(0.2)
    assert cluster.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200


def test_a_killed_ingress_serves_again_within_30_seconds(cluster: Served) -> None:
    """Requests in it are lost, as Serve does not repeat them."""
    (pid,) = cluster.pids("ServeReplica:bitnet:ingress")
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while True:
        try:
            answer = cluster.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=5)
            if answer.status_code == 200:
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() - began < 30
        time.sleep(0.2)


def test_sigterm_lets_requests_finish(cluster: Served) -> None:
    with cluster.client.stream("POST", "/v1/completions", json=STORY) as stream:
        events = stream.iter_lines()
        next(events)
        cluster.process.send_signal(signal.SIGTERM)
        lines = [line for line in events if line]
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    assert cluster.process.wait(60) == 0


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "bitnet.core", "serve", "--ray", "--device", "cpu", "-t", "1", "--port", port],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            timeout=200,
            check=False,
        )
    assert done.returncode == 1
    assert f"Serve cannot listen at 127.0.0.1:{port} on every node: Failed to bind to address" in done.stderr
    assert "Traceback" not in done.stderr
