"""``bitnet bench-serve`` against the server: delays that are known, refusals, a server that dies, and wrong servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from bitnet.core import Model
from bitnet.core.errors import BitNetError, DeviceLostError
from bitnet.server.commands.bench_serve import bench_serve

STEP = 0.05
"""Seconds that a scripted step takes: as long as bursts may, so that each step gives one token."""
WORDS = "seven and eight are fifteen, " * 20


def bench(url: str, **options: object) -> dict[str, Any]:
    """The JSON that the command prints.

    Raises:
        BitNetError: The command's error.
    """
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = CliRunner().invoke(bench_serve, ["--base-url", url, "--json", *given], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_known_delays_are_found(running: Any, scripted: Any, script_model: Model, endpoint: str) -> None:
    engine = scripted(script_model, WORDS)
    engine.seconds = STEP
    with running(script_model) as server:
        found = bench(
            server.url, endpoint=endpoint, num_prompts=8, max_concurrency=4, input_len=20, output_len=9, seed=3
        )
    assert (found["completed"], found["failed"], found["errors"]) == (8, 0, {})
    assert found["total_output_tokens"] == 8 * 9
    if endpoint == "completions":
        assert found["total_input_tokens"] == 8 * 20
    # Two waves of four; a token is a step. Nothing comes before its step.
    assert found["duration"] >= 2 * 9 * STEP
    assert found["p50_ttft_ms"] >= STEP * 1e3
    assert found["median_itl_ms"] > 0.9 * STEP * 1e3
    assert found["median_tpot_ms"] > 0.9 * STEP * 1e3
    assert found["median_e2el_ms"] >= 9 * STEP * 1e3
    # How late they come depends on the machine, but not how they add up: a place answers two requests, one by one.
    assert 2 * found["mean_e2el_ms"] <= found["duration"] * 1e3
    assert found["mean_ttft_ms"] + 8 * found["mean_tpot_ms"] == pytest.approx(found["mean_e2el_ms"])
    assert found["mean_itl_ms"] == pytest.approx(found["mean_tpot_ms"])
    assert 9 * found["median_itl_ms"] < 1.2 * found["median_e2el_ms"]
    assert found["output_throughput"] == pytest.approx(8 * 9 / found["duration"])
    assert len(engine.prompts) == 9  # the first request does not count
    assert len(set(engine.prompts)) == 9


def test_prompts_of_a_file_and_goodput(running: Any, scripted: Any, script_model: Model, tmp_path: Path) -> None:
    engine = scripted(script_model, WORDS)
    engine.seconds = STEP
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "red", "output_tokens": 2}\n{"prompt": "blue", "output_tokens": 40}\n')
    with running(script_model) as server:
        goodput = f"e2el:{20 * STEP * 1e3},ttft:10000"
        found = bench(server.url, dataset_path=path, num_prompts=4, max_concurrency=1, goodput=goodput)
    assert [prompt.rpartition(">")[2] for prompt in engine.prompts] == ["red", "red", "blue", "red", "blue"]
    assert found["total_output_tokens"] == 2 * (2 + 40)
    assert found["request_goodput"] == pytest.approx(2 / found["duration"])


def test_further_fields_of_requests(running: Any, scripted: Any, script_model: Model) -> None:
    scripted(script_model, WORDS)
    with running(script_model) as server:
        found = bench(server.url, num_prompts=2, output_len=9, extra_body='{"max_tokens": 3}')
        assert (found["total_output_tokens"], found["max_tokens"]) == (2 * 3, 3)
        for wrong in ("{", "[1]"):
            with pytest.raises(AssertionError, match=r"is not (a )?JSON"):
                bench(server.url, extra_body=wrong)


def test_requests_come_at_their_rate(running: Any, scripted: Any, script_model: Model) -> None:
    scripted(script_model, WORDS)
    durations: list[float] = []
    with running(script_model) as server:
        while not durations or (durations[-1] >= 2.0 and len(durations) < 3):  # other work only slows a try down
            found = bench(server.url, num_prompts=20, request_rate=20, input_len=4, output_len=2)
            assert found["failed"] == 0
            durations.append(found["duration"])
    assert 1.0 <= min(durations) < 2.0


def test_refused_requests_are_counted(running: Any, scripted: Any, script_model: Model) -> None:
    scripted(script_model, WORDS).seconds = STEP
    with running(script_model, max_queue=0) as server:
        found = bench(server.url, num_prompts=12, input_len=4, output_len=20)
    assert (found["completed"], found["errors"]) == (4, {"429 queue_full": 8})
    assert found["total_output_tokens"] == 4 * 20


def test_a_device_that_fails_is_counted(running: Any, scripted: Any, script_model: Model) -> None:
    engine = scripted(script_model, WORDS)
    engine.seconds = STEP
    asked = []

    def script(_: str) -> str:
        asked.append(_)
        if len(asked) == 1 + 4 + 4:  # the second wave has begun
            engine.failure = DeviceLostError("it stopped answering.", device="cuda:7")
        return WORDS

    engine.script = script
    with running(script_model) as server:
        found = bench(server.url, num_prompts=12, max_concurrency=4, input_len=4, output_len=5)
    assert found["completed"] == 4
    assert found["errors"]["error in the stream: device_error"] > 0
    assert set(found["errors"]) <= {"error in the stream: device_error", "503 device_error"}
    assert sum(found["errors"].values()) == found["failed"] == 8


def kill_amid(process: subprocess.Popen[str], url: str) -> None:
    """Kill a server once it has answered the first request, which does not count, and two more."""
    ended = r'^bitnet_http_responses_total\{path="/v1/completions",status="200"\} (\S+)'
    while process.poll() is None:
        found = re.search(ended, httpx.get(url + "/metrics").text, re.MULTILINE)
        if found is not None and float(found[1]) >= 3:
            process.kill()
            return
        time.sleep(0.01)


def test_a_server_that_dies_is_told_of() -> None:
    command = [sys.executable, "-m", "bitnet.core", "serve", "--device=cpu", "--threads=1", "--port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(word for line in process.stderr for word in line.split() if word.startswith("http://"))
            dying = threading.Thread(target=kill_amid, args=(process, url))
            dying.start()
            found = bench(url, num_prompts=400, max_concurrency=4, input_len=4, output_len=30)
            dying.join()
            with pytest.raises(BitNetError, match=r"no server answers at http.*bitnet serve"):
                bench(url)
        finally:
            process.kill()
    assert found["completed"] > 0
    assert found["failed"] > 0
    assert found["completed"] + found["failed"] == 400
    kinds = {why.split(":")[0] for why in found["errors"]}
    assert "no connection" in kinds
    assert kinds <= {"no connection", "connection lost", "the stream ended early"}


def test_a_key_is_needed_and_sent(running: Any, scripted: Any, script_model: Model) -> None:
    scripted(script_model, WORDS)
    with running(script_model, api_keys=("secret",)) as server:
        with pytest.raises(BitNetError, match="requires an API key"):
            bench(server.url)
        assert bench(server.url, api_key="secret", num_prompts=2, output_len=2)["completed"] == 2
        with pytest.raises(BitNetError, match="did not answer a first request: 404 model_not_found"):
            bench(server.url, api_key="secret", model="other")


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server that answers paths with a status and a body, and everything else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = answers.get(self.path, (404, b"none"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


MODELS = (200, b'{"data": [{"id": "m"}]}')
PATH = "/v1/completions"
WRONG: list[tuple[dict[str, tuple[int, bytes]], str]] = [
    ({}, "cannot be measured: it answers 404 to /v1/models"),
    ({"/v1/models": (200, b"<html>")}, "cannot be measured: it answers no JSON"),
    ({"/v1/models": (200, b"[]")}, "cannot be measured: it answers no JSON"),
    ({"/v1/models": (200, b'{"data": []}')}, "it lists no model"),
    ({"/v1/models": MODELS}, "did not answer a first request: 404"),
    ({"/v1/models": MODELS, PATH: (200, b"hello")}, "the stream ended early"),
    ({"/v1/models": MODELS, PATH: (200, b"data: {nonsense\n\n")}, "no event of OpenAI's API"),
    ({"/v1/models": MODELS, PATH: (200, b'data: {"choices": 7}\n\n')}, "no event of OpenAI's API"),
    ({"/v1/models": MODELS, PATH: (200, b'data: {"error": {"code": "x"}}\n\n')}, "error in the stream: x"),
]


@pytest.mark.parametrize(("answers", "why"), WRONG)
def test_a_wrong_server_is_named(answers: dict[str, tuple[int, bytes]], why: str) -> None:
    with answering(answers) as url, pytest.raises(BitNetError, match=why):
        bench(url)


def test_a_server_without_usage_is_counted_by_events() -> None:
    event = b'data: {"choices": [{"text": "a"}]}\n\n'
    with answering({"/v1/models": MODELS, PATH: (200, event * 3 + b"data: [DONE]\n\n")}) as url:
        found = bench(url + "/v1/", num_prompts=2, input_len=11)
    assert (found["total_output_tokens"], found["total_input_tokens"]) == (6, 22)


def test_thoughts_and_calls_are_tokens_as_the_answer_is() -> None:
    """The first token of a model that thinks is its thought's."""
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "So", "reasoning": "So"},
        {"reasoning": "."},
        {"content": "Yes."},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ]
    events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode() for delta in deltas]
    stream = b"".join(events) + b"data: [DONE]\n\n"
    text = (200, b'{"content": "Why?", "prompt": "Why?"}')
    with answering({"/v1/models": MODELS, "/detokenize": text, "/v1/chat/completions": (200, stream)}) as url:
        found = bench(url, endpoint="chat", num_prompts=2)
    assert found["total_output_tokens"] == 2 * 4


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1", "http://[::1", "http://127.0.0.1:99999", "http://"])
def test_a_wrong_address_is_named(url: str) -> None:
    with pytest.raises(BitNetError, match="is not a server address"):
        bench(url)


@pytest.mark.parametrize("goodput", ["ttft", "ttft:x", "ttft:0", "itl:5", "ttft:5,", "ttft:inf"])
def test_a_wrong_objective_is_refused(goodput: str) -> None:
    result = CliRunner().invoke(bench_serve, ["--goodput", goodput])
    assert result.exit_code == 2
    assert "is not an objective such as ttft:200" in result.output


@pytest.mark.parametrize(
    "words",
    [
        *(["--request-rate", "nan"], ["--burstiness", "nan"], ["--burstiness", "inf"], ["--temperature", "nan"]),
        *(["--temperature", "inf"], ["--top-p", "nan"], ["--random-range-ratio", "nan"]),
    ],
    ids=" ".join,
)
def test_what_is_not_a_number_is_refused(words: list[str]) -> None:
    result = CliRunner().invoke(bench_serve, words)
    assert result.exit_code == 2
    assert f"Invalid value for '{words[0]}'" in result.output


def test_the_table_names_what_it_shows(running: Any, scripted: Any, script_model: Model) -> None:
    scripted(script_model, WORDS)
    with running(script_model) as server:
        options = ["--num-prompts=3", "--output-len=4", "--goodput=ttft:10000"]
        shown = CliRunner().invoke(bench_serve, ["--base-url", server.url, *options], catch_exceptions=False).stdout
    assert "3 completed, 0 failed" in shown
    assert "requests/s with ttft ≤ 10000 ms" in shown
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert any(line.startswith(name) and len(line.split()[-5:]) == 5 for line in shown.splitlines())
