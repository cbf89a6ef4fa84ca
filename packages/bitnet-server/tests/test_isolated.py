"""Models in processes of their own: the same answers, streams, cancellation and metrics; a crash takes one model."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bitnet.core import Model
from bitnet.core.errors import BitNetError, DeviceLostError, InvalidInputError, ModelFileError
from bitnet.core.model.default import default_model_path
from bitnet.server.isolated import backend
from bitnet.server.isolated.backend import load_isolated
from bitnet.server.models.service import Source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it sends signals and looks into /proc")
STORY: dict[str, Any] = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0}


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def load(path: Path) -> Any:
    return load_isolated(path, device="cpu", threads=1, max_seqs=4, max_queue=64)


@pytest.fixture(scope="module")
def server(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server over two isolated models."""
    folder = tmp_path_factory.mktemp("isolated")
    files = [Path(shutil.copy(default_model_path(), folder / f"{name}.gguf")) for name in "ab"]
    sources = [Source((file.stem,), file, lambda file=file: load(file)) for file in files]  # type: ignore[misc]
    with running(None, sources=sources) as found:
        yield found


def pid_of(server: Any, index: int) -> int:
    return int(server.state.pool.models[index].service.model._process.pid)


def models_of(pid: int) -> set[int]:
    """The processes of models that a process has started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"bitnet.server.isolated.child" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def chat(server: Any, model: str, **fields: Any) -> httpx.Response:
    answer: httpx.Response = server.chat(model=model, **fields)
    return answer


def test_vectors_are_those_of_a_model_in_this_process(server: Any, demo: Any) -> None:
    texts = ["What is BitNet?", "Weather", "word " * 300]
    for pooling in ("mean", "last"):
        made = server.client.post("/v1/embeddings", json={"model": "a", "input": texts, "pooling": pooling}).json()
        rows = np.array([one["embedding"] for one in made["data"]], np.float32)
        np.testing.assert_array_equal(rows, demo.model.embed(texts, pooling=pooling))
    ranked = server.client.post("/v1/rerank", json={"model": "b", "query": texts[0], "documents": texts}).json()
    assert ranked["results"][0]["index"] == 0
    too_long = server.client.post("/v1/embeddings", json={"model": "a", "input": "word " * 2000})
    assert (too_long.status_code, "text 0 has" in too_long.text) == (400, True)


def test_a_crash_while_vectors_are_computed() -> None:
    isolated = load(default_model_path())

    def embed(texts: list[list[int]]) -> Any:
        return asyncio.run(isolated.embed(texts))

    try:
        with pytest.raises(InvalidInputError, match="has the token"):
            embed([[10**6]])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(embed, [[5] * 900] * 500)
            until(lambda: bool(isolated._running))
            os.kill(isolated.model._process.pid, signal.SIGKILL)
            with pytest.raises(DeviceLostError):
                waiting.result(30)
        with pytest.raises(DeviceLostError):
            embed([[5]])
    finally:
        isolated.model.close()


def test_answers_are_those_of_a_model_in_this_process(server: Any, demo: Any) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 20, "n": 3, "seed": 7, "temperature": 1, "logprobs": 2}),
        ("/v1/completions", {"prompt": ["a b", "c d"], "max_tokens": 5, "temperature": 0, "echo": True}),
        ("/v1/completions", {**STORY, "max_tokens": 12, "guided_regex": None, "logit_bias": {"5": -100}}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "go"}],
                "temperature": 0,
                "max_tokens": 40,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
                    },
                },
            },
        ),
    ]

    def comparable(answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    for path, body in asked:
        assert comparable(server.client.post(path, json=body)) == comparable(demo.client.post(path, json=body)), body


def _content(stream: str) -> str:
    """The text of a streamed answer; how it is cut depends on time."""
    return "".join(re.findall(r'"content":"([^"]*)"', stream))


def test_streams_and_receipts(server: Any, demo: Any) -> None:
    streamed = chat(server, "a", stream=True).text
    assert len(re.findall("data:", streamed)) > 3
    assert _content(streamed) == _content(demo.chat(stream=True).text) != ""
    receipt = chat(server, "a", x_bitnet_receipt=True).json()["x_bitnet_receipt"]
    assert receipt.keys() == demo.chat(x_bitnet_receipt=True).json()["x_bitnet_receipt"].keys()


def test_errors_are_the_requests_own(server: Any) -> None:
    for fields, status in (
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            400,
        ),
        ({"allowed_token_ids": [10**6]}, 400),
    ):
        assert chat(server, "a", **fields).status_code == status, fields
    assert chat(server, "a").status_code == 200


def test_a_client_that_leaves_ends_its_generation(server: Any) -> None:
    backend = server.state.pool.models[0].service.backend
    with server.client.stream(
        "POST", "/v1/completions", json={**STORY, "model": "a", "max_tokens": 3000, "stream": True}
    ) as answer:
        next(answer.iter_lines())
        assert backend._running
    until(lambda: bool(backend.model.load().running == 0 and not backend._running))


def test_metrics_count_what_the_process_computes(server: Any) -> None:
    def count(name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", server.client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = count('bitnet_tokens_total{kind="generated"}')
    answer = server.client.post("/v1/completions", json={**STORY, "model": "a", "max_tokens": 21})
    assert answer.json()["usage"]["completion_tokens"] == 21
    assert count('bitnet_tokens_total{kind="generated"}') == before + 21
    assert count("bitnet_kv_blocks") > 0
    assert count("bitnet_requests_running") == 0


def test_a_crash_takes_one_model_which_comes_back(server: Any) -> None:
    assert chat(server, "b").status_code == 200
    (first, second) = (pid_of(server, 0), pid_of(server, 1))
    assert len({first, second, os.getpid()}) == 3
    body = {**STORY, "model": "a", "max_tokens": 3000, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(first, signal.SIGSEGV)
        rest = "".join(lines)
    assert "the model's process crashed (SIGSEGV" in rest
    assert chat(server, "b").json()["choices"][0]["message"]["content"] == "17 + 25 = 42."
    assert pid_of(server, 1) == second
    until(lambda: chat(server, "a").status_code == 200)
    assert pid_of(server, 0) != first
    os.kill(pid_of(server, 0), signal.SIGKILL)  # while nothing runs
    until(lambda: server.client.get("/health").status_code == 503)
    until(lambda: chat(server, "a").status_code == 200)
    assert pid_of(server, 1) == second


def test_a_model_that_cannot_be_loaded_leaves_no_process(
    tmp_path: Path, demo_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.getpid()
    before = models_of(me)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo_model.path.read_bytes()[:5000])
    with pytest.raises(ModelFileError, match="left in the file"):
        load_isolated(broken, device="cpu")
    with pytest.raises(InvalidInputError, match="context"):
        load_isolated(demo_model.path, device="cpu", context=-1)
    monkeypatch.setattr(backend, "Listener", partial(Listener, str(tmp_path / ("x" * 108)), "AF_UNIX"))
    with pytest.raises(BitNetError, match="TMPDIR"):
        load_isolated(demo_model.path, device="cpu")
    monkeypatch.undo()
    until(lambda: models_of(me) == before)
    found = load(demo_model.path)
    pid = found.model._process.pid
    found.close()
    found.model.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    until(lambda: found.model.lost is not None)
    with pytest.raises(DeviceLostError, match="the model's process was ended"):
        found.submit([[1]], {"max_tokens": 1})


def test_the_command_serves_a_folder_of_isolated_models(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copy(default_model_path(), tmp_path / f"{name}.gguf")
    (tmp_path / "models.toml").write_text("[two]\ncontext = 200\nisolate = true\n")
    command = [
        sys.executable,
        "-m",
        "bitnet.core",
        "serve",
        "--models",
        str(tmp_path),
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "Serving" in line)
        found = re.search(r"Serving 2 models of .* at (http\S+)", line)
        assert found
        with httpx.Client(base_url=found[1], timeout=60) as client:
            for name in ("one", "two"):
                answer = client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 2})
                assert answer.status_code == 200, answer.text
            listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
            assert listed["two"]["max_model_len"] == 200 != listed["one"]["max_model_len"]
        assert len(models_of(process.pid)) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
