"""The command ``bitnet serve``: options, listening, logs, and both ways of ending it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from bitnet.core.model.default import default_model_path
from bitnet.core.support.turns import TURN
from bitnet.server.commands.serve import serve as serve_command

BITNET = [sys.executable, "-m", "bitnet.core"]
STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
HERE = ("packages/bitnet-server",)


class Served:
    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        self.lines: list[str] = []

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=60, **options)


@contextmanager
def serve(*arguments: str, cwd: Path | None = None) -> Iterator[Served]:
    command = [*BITNET, "serve", "--device", "cpu", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"Serving .* at (\S+)", line):
                served = Served(process, found[1])
                served.lines = lines
                break
        else:
            raise AssertionError("".join(lines))
        stderr = process.stderr
        reader = threading.Thread(target=lambda: lines.extend(stderr), daemon=True)
        reader.start()
        yield served
    finally:
        process.kill()
        process.wait()


posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM that a process can handle")


def test_the_context_is_said_at_the_start() -> None:
    for arguments, said in (
        ((), "Context of bitnet-demo: 1,024 tokens.\n"),
        (("-c", "96"), "Context of bitnet-demo: 96 of the model's 1,024 tokens (--context sets another number).\n"),
    ):
        with serve(*arguments) as served:
            assert said in served.lines


@pytest.mark.parametrize("model", ["model", "claude-opus-4-8"])
def test_the_commands_of_the_clients_pages(shown: Callable[[str], str], tmp_path: Path, model: str) -> None:
    shutil.copyfile(default_model_path(), tmp_path / "model.gguf")
    text = shown("serve") if model == "model" else shown("claude-serve")
    program, command, *arguments = shlex.split(text)
    assert (program, command) == ("bitnet", "serve")
    with serve(*arguments, cwd=tmp_path) as served, served.client() as client:
        assert [found["id"] for found in client.get("/v1/models").json()["data"]] == ["model"]
        said = {"model": model, "max_tokens": 20, "temperature": 0, "messages": [{"role": "user", "content": "2 + 3"}]}
        answer = client.post("/v1/messages", json=said).raise_for_status().json()
        assert (answer["model"], answer["content"][0]["text"]) == ("model", "2 + 3 = 5.")


@posix
def test_sigterm_lets_requests_finish() -> None:
    with serve() as served, served.client() as client, client.stream("POST", "/v1/completions", json=STORY) as answer:
        events = answer.iter_lines()
        next(events)
        served.process.send_signal(signal.SIGTERM)
        lines = [line for line in events if line]
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        assert served.process.wait(20) == 0


@pytest.mark.nightly(unless_changed=HERE)
@posix
def test_a_second_signal_ends_at_once() -> None:
    with serve("--threads", "1") as served, served.client() as client:
        many = {**STORY, "n": 64}
        with client.stream("POST", "/v1/completions", json=many) as answer:
            events = answer.iter_lines()
            next(events)
            served.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            served.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert served.process.wait(20) == 0
            assert time.monotonic() - began < 10


@pytest.mark.nightly(unless_changed=HERE)
@posix
def test_what_outlasts_the_drain_is_ended_with_an_error() -> None:
    with serve("--drain", "0.3", "--threads", "1") as served, served.client() as client:
        with client.stream("POST", "/v1/completions", json={**STORY, "n": 64}) as answer:
            events = answer.iter_lines()
            next(events)
            served.process.send_signal(signal.SIGTERM)
            errors = [line for line in events if "error" in line]
        assert "The server is shutting down." in errors[-1]
        assert served.process.wait(20) == 0


@pytest.mark.nightly(unless_changed=HERE)
def test_keys_from_a_file_and_a_log_of_json(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n  two \n")
    with serve("--api-key-file", str(keys), "--log-format", "json", "--alias", "mine") as served:
        with served.client(headers={"authorization": "Bearer two"}) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
            assert client.post("/tokenize", json={"content": "a secret"}).json()["count"] > 0
        with served.client() as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/health").status_code == 200
        end = time.monotonic() + 10
        while sum(line.startswith("{") for line in list(served.lines)) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        entries = [json.loads(line) for line in served.lines if line.startswith("{")]
        assert [(e["method"], e["path"], e["status"]) for e in entries] == [
            ("GET", "/v1/models", 200),
            ("POST", "/tokenize", 200),
            ("GET", "/v1/models", 401),
            ("GET", "/health", 200),
        ]
        assert "secret" not in "".join(served.lines)


@pytest.mark.nightly(unless_changed=HERE)
@posix
def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serve("--uds", str(path)) as served:
        assert served.address == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://local") as client:
            assert client.get("/health").json() == {"status": "ok"}
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
    assert not path.exists()


def test_behind_a_root_path_and_at_this_machines_names_alone() -> None:
    """The address that it tells is its own; what a proxy makes of it, the proxy knows."""
    with serve("--root-path", "/llm") as served, served.client() as client:
        assert not served.address.endswith("/llm")
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert client.post("/api/nothing").json() == {"error": "There is no such path."}


def bitnet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BITNET, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.nightly(unless_changed=HERE)
def test_errors_are_one_line(tmp_path: Path) -> None:
    with serve() as served:
        port = served.address.rpartition(":")[2]
        taken = bitnet("serve", "--device", "cpu", "--port", port)
        assert taken.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use." in taken.stderr
        assert "Errno" not in taken.stderr
    none = tmp_path / "none.pem"
    missing = bitnet("serve", "--ssl-certfile", str(none))
    assert missing.returncode == 2
    assert f"--ssl-certfile {none} cannot be read: No such file or directory." in missing.stderr
    os.mkfifo(tmp_path / "pipe.pem")
    for odd in (tmp_path / "pipe.pem", tmp_path):
        assert f"--ssl-certfile {odd} is not a file." in bitnet("serve", "--ssl-certfile", str(odd)).stderr
    folder = bitnet("serve", "--uds", str(tmp_path / "none" / "socket"))
    assert (folder.returncode, "its folder does not exist" in folder.stderr) == (2, True)
    slots = bitnet("serve", "--slot-save-path", str(tmp_path / "none"))
    assert (slots.returncode, "is not a folder" in slots.stderr) == (2, True)
    later = bitnet("serve", "-m", str(default_model_path()), "-m", str(none))
    assert (later.returncode, f"{none}: cannot be opened" in later.stderr) == (4, True), later.stderr
    keys = bitnet("serve", "--api-key-file", str(none)).stderr
    assert str(none) in keys
    assert "No such file or directory." in keys
    empty = tmp_path / "keys"
    empty.write_text("\n")
    assert bitnet("serve", "--api-key-file", str(empty)).returncode == 2
    assert all("Traceback" not in run.stderr for run in (taken, missing))


@pytest.mark.nightly(unless_changed=HERE)
def test_a_warning_beyond_this_machine_without_a_key() -> None:
    with serve("--host", "0.0.0.0") as served:
        assert any("without an API key" in line for line in served.lines)
    with serve("--host", "0.0.0.0", "--api-key", "x") as served:
        assert not any("without an API key" in line for line in served.lines)


@pytest.mark.nightly(unless_changed=HERE)
@posix
def test_models_by_name_ps_and_a_reload_by_signal(tmp_path: Path) -> None:
    """One process for all of it, as each start takes a second."""
    files = [Path(shutil.copy(default_model_path(), tmp_path / f"{name}.gguf")) for name in ("one", "two")]
    more = [part for file in files for part in ("-m", str(file))]
    with serve(*more, "--alias", "a", "--alias", "b", "--api-key", "k", "--max-stored", "0") as served:

        def ps(*arguments: str, key: str = "k") -> subprocess.CompletedProcess[str]:
            return bitnet("ps", served.address, "--api-key", key, *arguments)

        lines = [line.split() for line in ps().stdout.splitlines()]
        assert lines[0] == ["MODEL", "STATE", "DEVICE", "MEMORY", "RUNNING", "WAITING"]
        assert [(line[0], line[1], line[-2:]) for line in lines[1:]] == [
            ("a", "loaded", ["0", "0"]),
            ("b", "unloaded", ["-", "-"]),
        ]
        with served.client(headers={"authorization": "Bearer k"}) as client:
            # Eight stories at once take far longer than the start of another process.
            with client.stream("POST", "/v1/completions", json={**STORY, "model": "b", "n": 8}) as answer:
                events = answer.iter_lines()
                next(events)
                found = json.loads(ps("--json").stdout)
                assert [(m["id"], m["state"], m["running"]) for m in found] == [("a", "loaded", 0), ("b", "loaded", 8)]
                assert found[0]["device"].startswith("cpu")
                files[0].with_name("bad").write_bytes(b"no model")
                files[0].with_name("bad").replace(files[0])
                served.process.send_signal(signal.SIGHUP)
                assert '"finish_reason":"length"' in [line for line in events if line][-2]
            said = ("a was not reloaded", "b was reloaded")
            end = time.monotonic() + 20
            while not all(part in "".join(served.lines) for part in said):
                assert time.monotonic() < end, served.lines
                time.sleep(0.02)
            for name in "ab":
                assert client.post("/v1/completions", json={**STORY, "model": name, "stream": False}).status_code == 200
        assert "requires an API key" in ps(key="x").stderr
    gone = bitnet("ps", served.address)
    assert (gone.returncode, "no server answers" in gone.stderr, "Traceback" in gone.stderr) == (1, True, False)
    unnamed = bitnet("serve", *more, "--alias", "a")
    assert (unnamed.returncode, "--alias names 1 of 2 models" in unnamed.stderr) == (2, True)
    assert "two models have the same name" in bitnet("serve", "-m", str(files[0]), "-m", str(files[0])).stderr


WRONG = [("--max-body", "inf"), ("--max-memory", "inf"), ("--drain", "inf"), ("--timeout", "nan"), ("--drain", "nan")]
EMPTY = [("--root-path", "/ü"), ("--host", ""), ("--alias", ""), ("--api-key", " ")]


@pytest.mark.parametrize("words", [*WRONG, *EMPTY, ("--ssl-keyfile", "key.pem")], ids=" ".join)
def test_what_cannot_be_meant_is_said_before_a_model_is_loaded(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitnet.server.http.listening.serve_models", lambda *_: pytest.fail("it would serve"))
    done = CliRunner().invoke(serve_command, words)
    assert done.exit_code == 2, done.output
    assert "Error: " in done.output
    assert words[0] in done.output


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["-hf", "org/one"], [("org/one", "model-i2_s")]),
        (["-hf", "org/one:i2_s"], [("org/one:i2_s", "org/one", "model-i2_s")]),
        (["-m", "hf:org/one", "-m", "hf:org/two"], [("org/one",), ("org/two",)]),
        (["-m", "hf:org/one:i2_s", "-m", "hf:org/one:tq2_0"], [("org/one:i2_s",), ("org/one:tq2_0",)]),
        (["-hf", "org/one", "--alias", "mine"], [("mine",)]),
    ],
)
def test_a_model_from_the_hub_goes_by_its_repositorys_name(
    words: list[str], names: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = shutil.copy(default_model_path(), tmp_path / "model-i2_s.gguf")
    monkeypatch.setattr("bitnet.core.hub.local_path", lambda *_, **__: Path(file))
    served: list[Any] = []
    monkeypatch.setattr("bitnet.server.http.listening.serve_models", lambda sources, *_: served.extend(sources))
    done = CliRunner().invoke(serve_command, words)
    assert done.exit_code == 0, done.output
    assert [source.names for source in served] == names


def test_threads_of_a_server_take_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 64 agents need them; a program in which the server has ended has its own turns again."""
    turns: list[float] = []
    monkeypatch.setattr("bitnet.server.http.listening._log_access", lambda _: None)  # handlers of this whole process
    monkeypatch.setattr("bitnet.server.http.listening.Server.run", lambda _: turns.append(sys.getswitchinterval()))
    before = sys.getswitchinterval()
    done = CliRunner().invoke(serve_command, ["--port", "0", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert turns == [pytest.approx(TURN)]
    assert sys.getswitchinterval() == before > TURN


def test_help_groups_options_and_imports_no_server() -> None:
    shown = bitnet("serve", "--help").stdout
    for group in ("Model:", "Clients:", "Limits:", "Network:"):
        assert f"\n{group}\n" in shown
    code = "import sys; from bitnet.core.cli import main; main(['--help']); print('uvicorn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.rstrip().endswith("False")
    assert "serve" in done.stdout
