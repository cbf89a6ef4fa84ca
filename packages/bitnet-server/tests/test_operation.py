"""A full server, clients that leave or are slow, timeouts, and a failing device."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bitnet.core import Model, load_model
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.errors import DeviceLostError
from bitnet.server.request import call

LONG = "word " * 400
HERE = ("packages/bitnet-server",)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)


def post(server: Any, path: str, body: Any) -> socket.socket:
    """A connection on which a request was sent and nothing is read yet."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def hold(engine: Any, opened: threading.Event) -> None:
    """Hold up an engine's steps until ``opened`` is set."""
    advance = engine.advance
    engine.advance = lambda deliver: (opened.wait(60), advance(deliver))[1]


def said(events: list[str]) -> str:
    """The text of a stream's events."""
    bodies = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for body in bodies for choice in body["choices"])


BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go"}]},
    "/v1/completions": {"prompt": "go", "max_tokens": 900},
    "/v1/responses": {"input": "go"},
    "/v1/messages": {"model": "bitnet-demo", "max_tokens": 900, "messages": [{"role": "user", "content": "go"}]},
    "/api/chat": {"model": "bitnet-demo", "messages": [{"role": "user", "content": "go"}]},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_ends_its_generation(
    script_model: Model, running: Any, scripted: Any, path: str, stream: bool
) -> None:
    engine = scripted(script_model, LONG)
    engine.seconds = 0.1  # a step gives one token, so all of the answer takes 40 s
    with running(script_model) as server:
        connection = post(server, path, {**BODIES[path], "stream": stream})
        until(lambda: script_model.load().running == 1)
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.close()
        until(lambda: script_model.load().running == 0)
        until(lambda: server.state.admission.present == 0)
        assert server.client.get("/health").status_code == 200


def test_the_queue_is_bounded_and_says_when_to_come_back(script_model: Model, running: Any, scripted: Any) -> None:
    engine = scripted(script_model, lambda prompt: "".join(c for c in prompt if c.isdigit()))
    opened = threading.Event()
    hold(engine, opened)
    with running(script_model, max_queue=2) as server, ThreadPoolExecutor(6) as pool:
        taken = [pool.submit(server.chat, f"number {i}") for i in range(6)]  # 4 run, 2 wait
        until(lambda: server.state.admission.present == 6)
        for path in BODIES:
            refused = server.client.post(path, content=b"this is not even read")
            assert refused.status_code == 429, path
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        opened.set()
        answers = [future.result().json()["choices"][0]["message"]["content"] for future in taken]
        assert answers == [str(i) for i in range(6)]
        assert b"bitnet_requests_refused_total 5.0" in server.client.get("/metrics").content
        assert server.chat("number 7").status_code == 200


def test_many_continuations_count_in_the_engine(running: Any, scripted: Any, script_model: Model) -> None:
    scripted(script_model, "x")
    with running(script_model, max_queue=2) as server:  # the engine takes 4 + 64
        never = server.chat("x", n=100)
        assert never.status_code == 400
        assert "100 generations; at most 68 may run and wait" in never.json()["error"]["message"]
        assert "retry-after" not in never.headers
        assert len(server.chat("x", n=60, temperature=1).json()["choices"]) == 60


def test_an_answer_names_the_device_that_computed_it(running: Any, require_device: Callable[[str, str], None]) -> None:
    names = [info.name for info in BACKEND.probe().devices]
    if "cpu:scalar" not in names:
        require_device("cpu:scalar", "the native library is not there")
    pair = "cpu:scalar, cpu:numpy"
    with load_model(device=pair, context=128, threads=1, max_seqs=1) as model, running(model) as server:
        opened = threading.Event()
        for replica in model._worker.replicas:
            hold(replica.engine, opened)
        with ThreadPoolExecutor(4) as pool:
            body = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True}
            asked = [pool.submit(server.client.post, "/v1/completions", json=body) for _ in range(4)]
            until(lambda: model.load().running + model.load().waiting == 4)
            opened.set()
            assert {answer.result().headers["x-bitnet-device"] for answer in asked} == {*pair.split(", ")}
        stream = server.client.post("/v1/completions", json={**body, "stream": True})
        assert stream.headers["x-bitnet-device"] == pair
        assert server.client.get("/v1/models").json()["data"][0]["status"]["device"] == pair


def test_time_limit(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, LONG).seconds = 0.05  # as long as bursts may take: a step gives one token
    with running(script_model, timeout=2) as server, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.chat)
        lines = server.chat(stream=True).text.split("\n\n")
        assert said(lines[:-3]).startswith("word word")
        assert "longer than 2 seconds" in json.loads(lines[-3].removeprefix("data: "))["error"]["message"]
        assert whole.result().status_code == 504
        until(lambda: script_model.load().running == 0)


def test_a_device_that_fails(script_model: Model, running: Any, scripted: Any) -> None:
    engine = scripted(script_model, LONG)
    engine.seconds = 0.02
    with running(script_model) as server, ThreadPoolExecutor(2) as pool:
        whole, streamed = pool.submit(server.chat, "a"), pool.submit(server.chat, "b", stream=True)
        until(lambda: script_model.load().running == 2)
        time.sleep(0.1)
        engine.failure = DeviceLostError("it stopped answering.", device="cuda:7")
        assert whole.result().status_code == 503
        assert "cuda:7: it stopped answering" in whole.result().json()["error"]["message"]
        assert "cuda:7: it stopped answering" in streamed.result().text
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/health/live").status_code == 200
        again = server.chat()
        assert (again.status_code, again.headers["retry-after"]) == (503, "5")


@pytest.mark.nightly(unless_changed=HERE)
def test_a_reader_that_does_not_read_is_left(
    script_model: Model,
    running: Any,
    scripted: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(call, "SEND_SECONDS", 0.5)
    scripted(script_model, LONG)
    body = {**BODIES["/v1/chat/completions"], "stream": True, "n": 12, "logprobs": True, "top_logprobs": 20}
    with running(script_model) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        data = json.dumps(body).encode()
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data))
        connection.sendall(data)
        until(lambda: server.state.admission.present == 1)
        assert server.chat("others go on", max_tokens=3).status_code == 200
        until(lambda: server.state.admission.present == 0, 60)
        until(lambda: script_model.load().running == 0, 60)
        connection.close()
        assert "a stream failed" not in caplog.text
        counted = 'bitnet_http_responses_total{path="/v1/chat/completions",status="499"} 1.0'
        assert counted in server.client.get("/metrics").text.splitlines()


@pytest.mark.nightly(unless_changed=HERE)
def test_silence_is_broken_by_pings(
    script_model: Model, running: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "PING_SECONDS", 0.05)
    scripted(script_model, "done").seconds = 0.4
    with running(script_model) as server:
        text = server.chat(stream=True).text
        assert text.startswith(": ping\n\n: ping\n\n")
        assert said(text.split("\n\n")) == "done"
        lines = server.client.post("/api/chat", json=BODIES["/api/chat"]).text
        assert all(json.loads(line) for line in lines.splitlines())  # which know no pings


def test_a_server_that_ends_refuses_and_tells_why(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, LONG).seconds = 0.02
    with running(script_model) as server, ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(server.chat, "b", stream=True)
        until(lambda: script_model.load().running == 1)
        server.state.admission.draining = True
        assert server.chat().status_code == 503
        assert server.client.get("/health/ready").json() == {"status": "shutting down"}
        from bitnet.server.request.errors import RequestError

        server.state.shared.end_all(RequestError(503, "The server is shutting down."))
        assert "The server is shutting down." in streamed.result().text
