"""``bitnet launch``: a server and a client of it, with a program of the client's name in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bitnet.server.commands.launch import _given, launch
from bitnet.server.launch.clients import CLIENTS, Endpoint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BITNET = [sys.executable, "-m", "bitnet.core"]
AT = Endpoint("http://127.0.0.1:1", "key", 'a "b', 4096)
PROGRAM = """#!{python}
import json, os, sys, urllib.request
url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_AUTH_TOKEN"]
body = {{"model": "claude-opus-4-8", "max_tokens": 20, "temperature": 0,
         "messages": [{{"role": "user", "content": "What is 17 + 25?"}}]}}
sent = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), {{"x-api-key": key}})
answer = json.load(urllib.request.urlopen(sent))
unset = "ANTHROPIC_API_KEY" not in os.environ
print(json.dumps([sys.argv[1:], url, answer["model"], answer["content"][0]["text"], unset]))
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """The environment with a program ``claude`` first on the PATH."""
    if os.name == "nt":
        pytest.skip("a script is no program on Windows")
    file = tmp_path / "claude"
    file.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
    file.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ANTHROPIC_API_KEY": "theirs"}


def test_a_client_is_told_of_its_server(programs: dict[str, str]) -> None:
    command = [*BITNET, "launch", "claude", "--device", "cpu", "-c", "512", "--", "-p", "--model"]
    done = subprocess.run(command, env=programs, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    words, url, model, text, unset = json.loads(done.stdout)
    assert words == ["-p", "--model"]
    assert (model, text, unset) == ("bitnet-demo", "17 + 25 = 42.", True)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=5)


def test_the_commands_of_the_page(
    tmp_path: Path, long_file: Path, shown: Callable[[str], str], shell: Callable[..., list[str]]
) -> None:
    """Each runs with a program that prints its words in the client's place."""
    (tmp_path / "model.gguf").symlink_to(long_file)
    lines = shown("launch").splitlines()
    said = []
    for name, line in zip(("claude", "codex", "opencode"), lines, strict=True):
        (tmp_path / name).write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
        (tmp_path / name).chmod(0o755)
        words = shell(line, programs=tmp_path)
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        program, *rest = json.loads(done.stdout)
        assert Path(program).name == name
        said.append(rest)
    claude, codex, opencode = said
    assert claude == []
    assert "model_context_window=65536" in codex
    assert opencode == ["run", "Explain this folder"]


def test_a_server_that_does_not_start_ends_the_command(programs: dict[str, str]) -> None:
    command = [*BITNET, "launch", "claude", "-m", "missing.gguf"]
    done = subprocess.run(command, env=programs, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 1
    assert not done.stdout
    assert "missing.gguf" in done.stderr
    assert "the server has not started" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = subprocess.run([*BITNET, "launch", "codex"], capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 1
    assert "npm install -g @openai/codex" in done.stderr


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], []),
        (["-m", "a.gguf", "--strict"], ["-m", "a.gguf", "--strict"]),
        (["-hf", "org/name"], ["-m", "hf:org/name"]),
        (["--no-prompt-lookup", "-c", "9", "-t", "2"], ["-t", "2", "--no-prompt-lookup", "-c", "9"]),
        (["--kv-dtype", "i8", "--kv-dtype", "f16"], []),
    ],
)
def test_options_reach_the_server(given: list[str], passed: list[str]) -> None:
    with launch.make_context("launch", [*given, "claude"]) as context:
        assert _given(context) == passed


def test_what_clients_are_told() -> None:
    words = CLIENTS["codex"].words(AT)
    assert words[::2] == ["-c"] * 4
    settings: dict[str, Any] = {}
    for word in words[1::2]:
        settings |= tomllib.loads(word)
    assert settings["model"] == 'a "b'
    assert settings["model_context_window"] == 4096
    assert settings["model_providers"]["bitnet"]["base_url"] == "http://127.0.0.1:1/v1"
    assert CLIENTS["codex"].variables(AT)[settings["model_providers"]["bitnet"]["env_key"]] == "key"
    config = json.loads(CLIENTS["opencode"].variables(AT)["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["bitnet"]["models"]['a "b']["limit"]["context"] == 4096
    assert CLIENTS["claude"].variables(AT)["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
