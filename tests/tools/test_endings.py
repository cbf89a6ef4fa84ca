"""Every tool says what it is for, and what is wrong with its arguments, without a traceback."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
STARTED = sorted(path.stem for path in TOOLS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def end(tool: str, *words: str, folder: Path) -> tuple[int, str]:
    """Exit status of a tool, and all it said."""
    if tool in ("make_golden", "make_demo_golden") and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed.")
    command = [sys.executable, str(TOOLS / f"{tool}.py"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    assert list(folder.iterdir()) == [], words
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("tool", [name for name in STARTED if "golden" not in name])
def test_help_is_asked_for(tool: str, tmp_path: Path) -> None:
    status, said = end(tool, "--help", folder=tmp_path)
    assert status == 0
    assert tool in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("bench_browser", "runs in Pyodide alone"),
        ("bench_chain none:0", "only CUDA devices can be measured, such as cuda:0"),
        ("bench_device none:0", "there is no device 'none:0'"),
        ("bench_host --rounds 0", "0 is too few: the least is 1"),
        ("bench_draft none.gguf cpu", "none.gguf: cannot be opened"),
        ("bench_http -m none.gguf", "none.gguf: cannot be opened"),
        ("bench_lookup cpu --pairs 0", "0 is too few"),
        ("bench_model none.gguf cpu", "none.gguf: cannot be opened"),
        ("bench_submit none:0", "there is no device 'none:0'"),
        ("check_head -m none.gguf", "none.gguf: cannot be opened"),
        ("check_head -n 0", "0 is too few"),
        ("ci_matrix none", "tests|wheels|smoke"),
        ("count_intel none", "none is none of skl, tgllp"),
        ("make_random_model none/model.gguf", "cannot be written"),
        ("make_random_model --layers 0 model.gguf", "0 is too few"),
        ("make_screenshots http://127.0.0.1:1/ none", "there is no screenshot none"),
        ("measure_errors --seeds 0", "0 is too few"),
        ("measure_load none.gguf", "none.gguf: cannot be opened"),
        ("measure_states --tokens 0", "0 is too few"),
        ("release complete none", "none is no folder"),
        ("sanitize opencl --device none:0", "none:0 is none of opencl"),
        ("sanitize vulkan --logs /dev/null/logs", "Not a directory"),
    ],
)
def test_what_cannot_be_done_is_told(command: str, says: str, tmp_path: Path) -> None:
    status, said = end(*command.split(), folder=tmp_path)
    assert status in (1, 2, 4)
    assert says in said


def test_to_watch_nothing_is_no_success(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    logs = tmp_path_factory.mktemp("logs")
    status, said = end("sanitize", "vulkan", "--logs", str(logs), "--only", "none", folder=tmp_path)
    assert status == 2
    assert "no tool has 'none' in its name" in said
