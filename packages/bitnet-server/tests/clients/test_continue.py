"""Continue's program for terminals, with the settings of its page: a task of three tool rounds."""

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

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # npm installs 81 MB
TASK = "BEGIN-OF-TASK: add up what is in the file."


@pytest.fixture(scope="module")
def program(npm_install: Callable[..., Path]) -> str:
    found = shutil.which("cn", path=str(npm_install("@continuedev/cli@1.5.47") / "node_modules" / ".bin"))
    assert found
    return found


def test_three_rounds_of_tools(
    program: str, long_model: Model, running: Any, scripted: Any, shown: Callable[[str, str], str], tmp_path: Path
) -> None:
    (tmp_path / "numbers.txt").write_text("17 and 25\n", encoding="utf-8")

    def call(name: str, **arguments: str) -> str:
        return json.dumps({"name": name, "arguments": arguments})

    def said(prompt: str) -> str:
        so_far = prompt.rpartition(TASK)[2]
        if so_far.count("the sum is 42") == 2:  # what was written, and what was read
            return "It is 42."
        if "sum.txt" in so_far:
            return call("Read", filepath=str(tmp_path / "sum.txt"))
        if "17 and 25" in so_far:
            return call("Write", filepath=str(tmp_path / "sum.txt"), content="the sum is 42")
        return call("Read", filepath=str(tmp_path / "numbers.txt"))

    engine = scripted(long_model, said)
    settings = tmp_path / "config.yaml"
    with running(long_model, names=("model",)) as server:
        settings.write_text(shown("continue", server.url), encoding="utf-8")
        done = subprocess.run(
            [program, "--config", str(settings), "--auto", "-p", TASK],
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path / "home"), "CONTINUE_TELEMETRY_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert done.stdout.strip().endswith("It is 42."), f"{done.stdout}{done.stderr}"
    assert (tmp_path / "sum.txt").read_text(encoding="utf-8") == "the sum is 42"
    assert len([prompt for prompt in engine.prompts if TASK in prompt]) == 4
