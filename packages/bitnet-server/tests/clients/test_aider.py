"""aider: three rounds of edits until a test passes, and 20 turns, over a scripted model."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import Model

pytestmark = pytest.mark.nightly  # uv installs 108 packages, in minutes
SIGNS = ("-", "*", "/", "+")
CHECK = "from add import add; assert add(17, 25) == 42, f'add gave {add(17, 25)}'"


def edit(before: str, after: str) -> str:
    """A change of a line, as aider has its models write one."""
    change = f"<<<<<<< SEARCH\n    return a {before} b\n=======\n    return a {after} b\n>>>>>>> REPLACE"
    return f"add.py\n```python\n{change}\n```\n"


@pytest.fixture
def aider(
    uv: Callable[..., Any],
    installed: Callable[..., None],
    shown: Callable[[str, str], str],
    shell: Callable[..., list[str]],
    tmp_path: Path,
) -> Callable[..., str]:
    """``aider(url, *words, said=text)`` runs the page's lines in ``tmp_path``; what they printed."""
    own = {"HOME": str(tmp_path / "home"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    own["PYTHONDONTWRITEBYTECODE"] = "1"  # add.py changes within a second and keeps its size
    options = "--no-git --no-pretty --no-fancy-input --yes-always --no-check-update --no-show-release-notes"
    options += (
        " --no-browser --analytics-disable --no-show-model-warnings --no-detect-urls --map-tokens 0 --edit-format diff"
    )

    known = tmp_path / "models.json"  # aider would ask the network about a model that it does not know
    known.write_text(json.dumps({"openai/model": {"max_input_tokens": 65_536, "litellm_provider": "openai"}}))
    options += f" --model-metadata-file {known}"

    def run(url: str, *words: str, said: str = "") -> str:
        tool = ("--from", "aider-chat==0.86.2")
        installed("uv", uv("tool run", *tool, "python", "-c", ""))
        lines = shell(shown("aider", url), *options.split(), *words)
        done = uv("tool run", *tool, *lines, cwd=tmp_path, env=own, input=said)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        out: str = done.stdout
        return out

    return run


def test_three_rounds(
    aider: Callable[..., str], long_model: Model, running: Any, scripted: Any, tmp_path: Path
) -> None:
    (tmp_path / "add.py").write_text("def add(a, b):\n    return a - b\n", encoding="utf-8")

    edits = map(edit, SIGNS, SIGNS[1:])
    engine = scripted(long_model, lambda _: next(edits))
    check = shlex.join([sys.executable, "-c", CHECK])
    with running(long_model, names=("model",)) as server:
        out = aider(server.url, "--auto-test", "--test-cmd", check, "--message", "Mend add.", "add.py")
    assert (tmp_path / "add.py").read_text(encoding="utf-8") == "def add(a, b):\n    return a + b\n", out
    assert len(engine.prompts) == 3, out


def test_twenty_turns(
    aider: Callable[..., str],
    long_model: Model,
    running: Any,
    scripted: Any,
    long_text: Callable[[int], str],
    counted_tokens: Callable[[Any], dict[str, float]],
    tmp_path: Path,
) -> None:
    """After the first, they compute less than 2 % of their prompts, which have more than 50,000 tokens."""
    (tmp_path / "notes.txt").write_text(long_text(84_000), encoding="utf-8")
    engine = scripted(long_model, lambda prompt: f"Turn {prompt.rpartition('turn number ')[2].split()[0]} is over.")
    with running(long_model, names=("model",)) as server:
        said = "".join(f"This is turn number {i} , go on.\n" for i in range(20))
        out = aider(server.url, "--chat-mode", "ask", "--read", "notes.txt", said=said)
        counted = counted_tokens(server)
    assert [int(n) for n in re.findall(r"Turn (\d+) is over\.", out)] == list(range(20)), out
    first = len(long_model.tokenizer.encode(engine.prompts[0], parse_special=True))
    print(f"the 19 later requests computed {counted['prompt'] - first} tokens; the first one had {first}")
    assert first > 50_000
    assert counted["prompt"] - first < 19 * 0.02 * first
