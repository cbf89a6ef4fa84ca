"""Pipes, devices, sockets and folders in place of the files that commands read and write."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bitnet.core.support import files

pytestmark = [
    pytest.mark.usefixtures("on_the_cpu"),
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files"),
]
Bitnet = Callable[..., Any]


@pytest.fixture
def special(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[str, str]]]:
    """Files of each kind: the path, and what an error says about it when it is read."""
    monkeypatch.setattr(files, "WAIT", 0.5)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        yield {
            "pipe": ("pipe", "it is a named pipe that no process writes to"),
            "socket": ("socket", "No such device or address"),
            "folder": ("folder", "Is a directory"),
        }


READING = {
    "receipt verify": ("receipt", "verify", "FILE"),
    "receipt show": ("receipt", "show", "FILE"),
    "the key": ("receipt", "verify", "s.json", "--key", "FILE"),
    "the answer": ("receipt", "verify", "s.json", "--answer", "@FILE"),
    "the prompt": ("receipt", "verify", "s.json", "--prompt", "@FILE"),
    "the signing key": ("run", "Hi", "--receipt", "new.json", "--receipt-key", "FILE"),
    "the prompt's file": ("run", "-f", "FILE"),
    "a text": ("perplexity", "-f", "FILE"),
}


@pytest.mark.parametrize("command", READING.values(), ids=READING)
def test_reading_ends(
    bitnet: Bitnet, signed: dict[str, Any], special: dict[str, tuple[str, str]], command: tuple[str, ...]
) -> None:
    for path, said in special.values():
        begin = time.monotonic()
        ran = bitnet(*(part.replace("FILE", path) for part in command))
        assert (ran.status, f"{path} cannot be read: {said}." in ran.err) == (2, True), ran
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize("command", list(READING.values())[:5], ids=list(READING)[:5])
def test_a_device_without_end_is_too_large(
    bitnet: Bitnet, signed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("bitnet.core.cli.console.MAX_TEXT", 1 << 16)
    ran = bitnet(*(part.replace("FILE", "/dev/zero") for part in command))
    said = "Ed25519" if "--key" in command else "has more than"
    assert (ran.status in (2, 6), said in ran.err) == (True, True), ran


def test_a_pipe_that_is_opened_or_written_late_is_read(
    bitnet: Bitnet, signed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer may open it while the command waits, and may then be silent for longer than that."""
    os.mkfifo(tmp_path / "late")
    receipt = (tmp_path / "s.json").read_bytes()

    def write(before_open: float, before_data: float) -> None:
        time.sleep(before_open)
        with (tmp_path / "late").open("wb") as pipe:
            time.sleep(before_data)
            pipe.write(receipt)

    for times, wait in (((0.2, 0.0), 20.0), ((0.0, 0.6), 0.3)):
        monkeypatch.setattr(files, "WAIT", wait)
        writer = Thread(target=write, args=times)
        writer.start()
        ran = bitnet("receipt", "show", "late")
        writer.join()
        assert (ran.status, signed["digest"] in ran.out) == (0, True), ran


def test_pipes_of_a_shell(script_path: str, signed: dict[str, Any]) -> None:
    done = subprocess.run(
        ["bash", "-c", f"cat s.json | {script_path} receipt verify <(cat s.json) && "
         f"cat s.json | {script_path} receipt verify /dev/stdin --key <(cat k.pub)"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("nothing in it contradicts itself")) == (0, 2), done


def test_a_receipt_into_a_pipe(
    bitnet: Bitnet, model: Path, special: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    run = ("run", "-m", model, "Hello", "-n", "4", "--receipt")
    ran = bitnet(*run, "pipe")
    assert (ran.status, "pipe cannot be written: it is a named pipe that no process reads." in ran.err) == (1, True)
    assert ran.out.strip()  # the answer is not lost
    ran = bitnet(*run, "socket")
    assert (ran.status, "socket cannot be written: No such device or address." in ran.err) == (1, True)
    found: list[bytes] = []
    reader = Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    ran = bitnet(*run, "pipe")
    reader.join(20)
    assert (ran.status, b'"schema_version"' in found[0]) == (0, True), ran
    ran = bitnet(*run, "/dev/full")
    assert (ran.status, "/dev/full cannot be written: No space left on device." in ran.err) == (1, True)


def test_a_model_into_a_pipe(bitnet: Bitnet, model: Path, special: dict[str, tuple[str, str]]) -> None:
    ran = bitnet("convert", "--force", model, "pipe")
    assert (ran.status, "pipe cannot be written: it is a named pipe that no process reads." in ran.err) == (1, True)
