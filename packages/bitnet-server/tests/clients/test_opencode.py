"""opencode, a programming agent: ``opencode run`` streams, reads a file by a tool, and goes on with its session."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import Model

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # npm installs 350 MB


def test_flows(
    npm_install: Callable[..., Path], long_model: Model, running: Any, scripted: Any, tmp_path: Path
) -> None:
    bin_folder = npm_install("opencode-ai@1.18.33") / "node_modules" / ".bin"
    program = shutil.which("opencode", path=str(bin_folder))
    assert program
    project = tmp_path / "project"
    project.mkdir()
    (project / "weather.txt").write_text("27 degrees in Zürich\n", encoding="utf-8")

    def said(prompt: str) -> str:
        if "title generator" in prompt:
            return "The weather"
        if "And tomorrow?" in prompt:
            return "Tomorrow it is warm, too." if "It is warm." in prompt else "What do you mean?"
        if "27 degrees" in prompt:
            return "It is warm."
        return json.dumps({"name": "read", "arguments": {"filePath": str(project / "weather.txt")}})

    engine = scripted(long_model, said)
    with running(long_model, names=("m",)) as server:
        options = {"baseURL": f"{server.url}/v1", "apiKey": "none"}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"m": {}}}
        config = {"provider": {"bitnet": provider}, "model": "bitnet/m", "autoupdate": False, "share": "disabled"}
        (project / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
        folders = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("DATA", "CONFIG", "CACHE", "STATE")}
        own = {"HOME": str(tmp_path / "home"), "PWD": str(project), **folders}

        def run(*words: str) -> list[Any]:
            """What opencode tells of, in its order."""
            done = subprocess.run(
                [program, "run", "--pure", "--format", "json", *words],
                cwd=project,
                env={**os.environ, **own},
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
