"""Codex CLI: a task of three tool rounds in a session of 50,000 tokens, and a session of 20 turns, over a scripted
model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import Model
from bitnet.server.launch.clients import CLIENTS, KEY, Endpoint

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # npm installs 424 MB
TASK = "BEGIN-OF-TASK: add up what is in the file."


@pytest.fixture(scope="module")
def program(npm_install: Callable[..., Path]) -> str:
    found = shutil.which("codex", path=str(npm_install("@openai/codex@0.171.0") / "node_modules" / ".bin"))
    assert found
    return found


def codex(words: Sequence[str], folder: Path, said: str = "", seconds: float = 180) -> list[Any]:
    """What ``codex exec`` tells of, in its order; it reads ``said``."""
    home = folder / "home"
    (home / ".codex").mkdir(parents=True, exist_ok=True)
    others = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "CODEX_"))}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**others, "HOME": str(home), "CODEX_HOME": str(home / ".codex"), KEY: "none"},
        input=said,
        capture_output=True,
        encoding="utf-8",
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def completed(events: list[Any], kind: str) -> list[Any]:
    return [e["item"] for e in events if e["type"] == "item.completed" and e["item"]["type"] == kind]


FLAGS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def test_three_rounds_of_tools(
    program: str, long_model: Model, running: Any, scripted: Any, long_text: Callable[[int], str], tmp_path: Path
) -> None:
    (tmp_path / "numbers.txt").write_text("17 and 25\n", encoding="utf-8")

    def call(command: str) -> str:
        return json.dumps({"name": "exec_command", "arguments": {"cmd": command}})

    def said(prompt: str) -> str:
        so_far = prompt.rpartition(TASK)[2]
        if "the sum is 42" in so_far:
            return "It is 42."
        if "numbers.txt sum.py" in so_far.replace("\n", " "):
            return call(f'"{sys.executable}" sum.py')
        if "17 and 25" in so_far:
            return call("""echo 'print("the sum" + f" is {17 + 25}")' > sum.py && ls *.txt *.py""")
        return call("cat numbers.txt")

    engine = scripted(long_model, said)
    with running(long_model, names=("m",)) as server:
        at = Endpoint(server.url, "none", "m", long_model.context)
        words = [program, *CLIENTS["codex"].words(at), "exec", *FLAGS, "-"]
        events = codex(words, tmp_path, said=long_text(70_000) + TASK)
    commands = completed(events, "command_execution")
    assert [command["exit_code"] for command in commands] == [0, 0, 0]
    assert "the sum is 42" in commands[2]["aggregated_output"]
    assert [message["text"] for message in completed(events, "agent_message")] == ["It is 42."]
    usage = events[-1]["usage"]
    first = len(long_model.tokenizer.encode(engine.prompts[0], parse_special=True))
    computed = usage["input_tokens"] - usage["cached_input_tokens"]
    print(f"the three later requests computed {computed - first} tokens; the first one had {first}")
    assert first > 50_000
    assert computed - first < 3 * 0.02 * first


def test_a_session_of_twenty_turns(
    program: str, long_model: Model, running: Any, scripted: Any, shown: Callable[[str, str], str], tmp_path: Path
) -> None:
    """With the page's settings."""
    scripted(long_model, lambda prompt: f"Turn {prompt.count('and the next')}.")
    settings = tmp_path / "home" / ".codex" / "config.toml"
    settings.parent.mkdir(parents=True)
    with running(long_model, names=("model",)) as server:
        settings.write_text(shown("codex", server.url), encoding="utf-8")
        codex([program, "exec", *FLAGS, "Begin."], tmp_path)
        for i in range(1, 20):
            events = codex([program, "exec", "resume", "--last", *FLAGS, "and the next"], tmp_path)
            assert [message["text"] for message in completed(events, "agent_message")] == [f"Turn {i}."]


def test_the_command_of_the_page(
    program: str, long_file: Path, shown: Callable[[str], str], shell: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").symlink_to(long_file)
    events = codex(shell(shown("codex-launch"), *FLAGS, programs=Path(program).parent), tmp_path, seconds=500)
    assert completed(events, "agent_message"), events
