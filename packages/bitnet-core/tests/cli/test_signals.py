"""Signals that end a command: nothing is left half-written, and the exit status says which signal it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")

STALLING = """\
import os, sys, time
from bitnet.core.support import files

def stall(handle):
    print("written", flush=True)
    time.sleep(60)

os.fsync = stall
if sys.argv[1] == "named":
    files._unnamed = lambda folder: None
from bitnet.core.cli import main
sys.exit(main(sys.argv[2:]))
"""
"""The command, which stops before a file it has written takes its name."""


def end(number: int, kind: str, *args: str | Path, ignored: bool = False) -> int:
    """Send a signal to a command that has written its file; the status it ends with."""
    command = [sys.executable, "-c", STALLING, kind, *map(str, args)]
    running = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command] if ignored else command, stdout=subprocess.PIPE
    )
    try:
        assert running.stdout
        assert running.stdout.readline() == b"written\n"
        running.send_signal(number)
        if ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(2)
            running.send_signal(signal.SIGTERM)
        return running.wait(30)
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("kind", ["unnamed", "named"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_convert_leaves_nothing(model: Path, tmp_path: Path, name: str, kind: str) -> None:
    number = getattr(signal, name)
    assert end(number, kind, "convert", model, "new.gguf") == 128 + number
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.gguf").write_text("old")
    assert end(number, kind, "convert", model, "old.gguf", "--force") == 128 + number
    assert [p.name for p in tmp_path.iterdir()] == ["old.gguf"]
    assert (tmp_path / "old.gguf").read_text() == "old"


def test_a_signal_that_nothing_can_be_done_about(model: Path, tmp_path: Path) -> None:
    """Nothing is left where files can be without a name; elsewhere the next run removes what this one has left."""
    if sys.platform == "linux":
        assert end(signal.SIGKILL, "unnamed", "convert", model, "new.gguf") == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        assert end(signal.SIGKILL, "named", "convert", model, "new.gguf") == -signal.SIGKILL
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".new.gguf.")
    assert end(signal.SIGTERM, "named", "convert", model, "new.gguf") == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_nohup_is_heeded(model: Path, tmp_path: Path) -> None:
    assert end(signal.SIGHUP, "unnamed", "convert", model, "new.gguf", ignored=True) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_conversation_from_a_pipe(script_path: str, model: Path) -> None:
    command = [script_path, "chat", "-m", str(model), "--device", "cpu:numpy"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as running:
        try:
            assert running.stdin
            assert running.stderr
            running.stdin.write(b"/nope\n")
            running.stdin.flush()
            assert b"unknown command /nope" in running.stderr.readline()
            time.sleep(0.2)  # CPython misses an interrupt just before it waits for the next line
            running.send_signal(signal.SIGINT)
            assert running.wait(30) == 130
            assert running.stderr.read() == b"\n"
        finally:
            running.kill()


@pytest.mark.parametrize("command", ["run", "chat"])
def test_an_answer_is_ended(script_path: str, model: Path, command: str) -> None:
    """A conversation too, though Ctrl-C ends no more than an answer there."""
    words = [script_path, command, "-m", str(model), "-n", "-1", "--device", "cpu:numpy"]
    running = subprocess.Popen(
        [*words, "Hello"] if command == "run" else words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "BITNET_DEVICE": "cpu"},
    )
    try:
        assert running.stdin
        assert running.stdout
        if command == "chat":
            running.stdin.write(b"Hello\n")
            running.stdin.flush()
        assert running.stdout.read(1)
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=30)
        assert (running.returncode, err) == (128 + signal.SIGTERM, b"")
    finally:
        running.kill()
        running.wait()
