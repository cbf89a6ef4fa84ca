"""opencode, a programming agent: ``opencode run`` streams, reads a file by a tool, and goes on with its session; the
server that its programs share runs a task of three tool rounds and holds a session of 20 turns."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bitnet.core import Model

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # npm installs 350 MB
Environment = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def program(npm_install: Callable[..., Path]) -> str:
    found = shutil.which("opencode", path=str(npm_install("opencode-ai@1.18.33") / "node_modules" / ".bin"))
    assert found
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(project: Path, shown: Callable[[str, str], str]) -> Environment:
    """``environment(url)``: folders without anybody's settings; the project has the page's, for the server there."""

    def made(url: str) -> dict[str, str]:
        config = {**json.loads(shown("opencode", url)), "autoupdate": False, "share": "disabled"}
        (project / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
        folders = {f"XDG_{name}_HOME": str(project.parent / name) for name in ("DATA", "CONFIG", "CACHE", "STATE")}
        return {**os.environ, "HOME": str(project.parent / "home"), "PWD": str(project), **folders}

    return made


def call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_flows(
    program: str, long_model: Model, running: Any, scripted: Any, project: Path, environment: Environment
) -> None:
    (project / "weather.txt").write_text("27 degrees in Zürich\n", encoding="utf-8")

    def said(prompt: str) -> str:
        if "title generator" in prompt:
            return "The weather"
        if "And tomorrow?" in prompt:
            return "Tomorrow it is warm, too." if "It is warm." in prompt else "What do you mean?"
        if "27 degrees" in prompt:
            return "It is warm."
        return call("read", filePath=str(project / "weather.txt"))

    engine = scripted(long_model, said)
    with running(long_model, names=("model",)) as server:
        own = environment(server.url)

        def run(*words: str) -> list[Any]:
            """What opencode tells of, in its order."""
            done = subprocess.run(
                [program, "run", "--pure", "--format", "json", *words],
                cwd=project,
                env=own,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                timeout=180,
                check=False,
            )
            assert done.returncode == 0, f"{done.stdout}{done.stderr}"
            return [json.loads(line) for line in done.stdout.splitlines()]

        events = run("How is it in Zürich?")
        (used,) = (event["part"] for event in events if event["type"] == "tool_use")
        assert (used["tool"], used["state"]["status"]) == ("read", "completed"), used
        assert "27 degrees in Zürich" in used["state"]["output"]
        assert [event["part"]["text"] for event in events if event["type"] == "text"] == ["It is warm."]
        later = run("--continue", "And tomorrow?")
        assert [event["part"]["text"] for event in later if event["type"] == "text"] == ["Tomorrow it is warm, too."]
    assert any("title generator" in prompt for prompt in engine.prompts)


def test_three_rounds_and_twenty_turns(
    program: str,
    long_model: Model,
    running: Any,
    scripted: Any,
    long_text: Callable[[int], str],
    counted_tokens: Callable[[Any], dict[str, float]],
    project: Path,
    environment: Environment,
) -> None:
    """After the session's first request, the others compute less than 2 % of their prompts."""
    (project / "AGENTS.md").write_text(long_text(62_000), encoding="utf-8")  # it becomes part of the first message
    (project / "numbers.txt").write_text("17 and 25\n", encoding="utf-8")
    task = "BEGIN-OF-TASK: add up what is in the file."
    script = project / "sum.py"

    def said(prompt: str) -> str:
        if "title generator" in prompt:
            return "A sum"
        if turns := re.findall(r"This is turn (\d+) of our talk", prompt):
            return f"It was turn {turns[-1]}." if len(turns) == int(turns[-1]) + 1 else "Some turns are missing."
        so_far = prompt.rpartition(task)[2]
        if "the sum is 42" in so_far:
            return "It is 42."
        if "sum.py" in so_far:
            return call("bash", command=f'"{sys.executable}" sum.py')
        if "17 and 25" in so_far:
            return call("write", filePath=str(script), content='print("the sum" + f" is {17 + 25}")\n')
        return call("read", filePath=str(project / "numbers.txt"))

    engine = scripted(long_model, said)
    with (
        running(long_model, names=("model",)) as server,
        subprocess.Popen(
            [program, "serve", "--pure", "--port", "0"],
            cwd=project,
            env=environment(server.url),
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,  # the command starts the server as a child
        ) as process,
    ):
        try:
            assert process.stdout is not None
            address = next(filter(None, (re.search(r"http://\S+", line) for line in process.stdout)))[0]
            with httpx.Client(base_url=address, timeout=120) as client:
                session = client.post("/session", json={}).raise_for_status().json()["id"]

                def say(text: str) -> tuple[list[str], list[str]]:
                    """The tools that were called since the message before, and what was answered."""
                    before = len(client.get(f"/session/{session}/message").raise_for_status().json())
                    body = {"parts": [{"type": "text", "text": text}]}
                    client.post(f"/session/{session}/message", json=body).raise_for_status()
                    new = client.get(f"/session/{session}/message").raise_for_status().json()[before + 1 :]
                    assert not any(message["info"].get("error") for message in new), new
                    parts = [part for message in new for part in message["parts"]]
                    used = [part for part in parts if part["type"] == "tool"]
                    for part in used:
                        assert part["state"]["status"] == "completed", json.dumps(part["state"])
                    return [part["tool"] for part in used], [part["text"] for part in parts if part["type"] == "text"]

                assert say(task) == (["read", "write", "bash"], ["It is 42."])
                for i in range(20):
                    assert say(f"This is turn {i} of our talk.") == ([], [f"It was turn {i}."])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        counted = counted_tokens(server)
    begun = next(prompt for prompt in engine.prompts if "title generator" not in prompt)
    first = len(long_model.tokenizer.encode(begun, parse_special=True))
    print(f"all other requests computed {counted['prompt'] - first} tokens; the session's first one had {first}")
    assert first > 50_000
    assert counted["prompt"] - first < 23 * 0.02 * first
