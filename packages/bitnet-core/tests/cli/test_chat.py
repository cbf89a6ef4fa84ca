"""``bitnet chat``, through a pipe and at a terminal."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import load_model

Bitnet = Callable[..., Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_DEVICE", "cpu")


def said(text: str, *more: str) -> list[dict[str, str]]:
    """A conversation: user, assistant, user, …"""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate((text, *more))]


def test_a_conversation_goes_on_until_it_is_reset(bitnet: Bitnet, model: Path) -> None:
    with load_model(model, device="cpu") as loaded:
        first = loaded.chat(said("Hello"), max_tokens=5).text
        second = loaded.chat(said("Hello", first, "two\nlines"), max_tokens=5).text
        fresh = loaded.chat(said("two\nlines"), max_tokens=5).text
    assert second != fresh
    typed = "Hello\ntwo\\\nlines\n/reset\n\ntwo\\\nlines\n/exit\nnever\n"
    ran = bitnet("chat", "-m", model, "-n", "5", stdin=typed)
    assert ran.status == 0, ran.err
    assert ran.out == f"{first}\n{second}\n{fresh}\n"
    assert ran.err.count("[cpu:") == 3


def test_bytes_that_are_no_text_do_not_end_a_conversation(bitnet: Bitnet, model: Path) -> None:
    with load_model(model, device="cpu") as loaded:
        first = loaded.chat(said("Hello"), max_tokens=5).text
        second = loaded.chat(said("Hello", first, "more"), max_tokens=5).text
    ran = bitnet("chat", "-m", model, "-n", "5", stdin=b"\xe9t\xe9\nHello\ncaf\xe9\nmore\n")
    assert (ran.status, ran.out) == (0, f"{first}\n{second}\n")
    assert ran.err.count("which is no Unicode character") == 2


def test_commands(bitnet: Bitnet, model: Path) -> None:
    ran = bitnet("chat", "-m", model, stdin="/help\n/nope\n")
    assert (ran.status, ran.out) == (0, "")
    assert "/reset" in ran.err
    assert "there is no /nope" in ran.err


def test_system_message(bitnet: Bitnet, model: Path) -> None:
    with load_model(model, device="cpu") as loaded:
        system = [{"role": "system", "content": "Be brief."}]
        wanted = loaded.chat([*system, *said("Hello")], max_tokens=5).text
    ran = bitnet("chat", "-m", model, "-n", "5", "--system", "Be brief.", stdin="Hello\n/reset\nHello\n")
    assert ran.out == f"{wanted}\n" * 2


def test_a_full_context_forgets_the_oldest(bitnet: Bitnet, model: Path) -> None:
    """Enough to leave a quarter of the context to the answer. A message too long by itself is refused, nothing lost."""
    long, too_long = "7" * 60, "8" * 400
    typed = f"{long}\n{too_long}\nHello\n{long}\n"
    ran = bitnet("chat", "-m", model, "-n", "5", "-c", "160", stdin=typed)
    assert ran.status == 0, ran.err
    answers = [line for line in ran.err.splitlines() if line.startswith("[cpu:")]
    assert len(answers) == 3
    prompts = [int(line.split()[2]) for line in answers]
    assert prompts[1] > prompts[0] + 10
    assert prompts[2] <= 120
    assert re.search("your first (message is|2 messages are) forgotten", ran.err)
    assert ran.err.count("the context holds 160") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals in Python")
def test_at_a_terminal(script_path: str, model: Path, tmp_path: Path) -> None:
    """Ctrl-C stops the answer and not the program, or clears a half-typed line; Ctrl-D leaves; lines are remembered."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "dumb"
        options = ("-n", "-1", "--device", "cpu:numpy")
        os.execv(script_path, [script_path, "chat", "-m", str(model), *options])
    seen = b""

    def until(pattern: bytes) -> None:
        nonlocal seen
        while not re.search(pattern, seen):
            ready, _, _ = select.select([terminal], [], [], 60)
            assert ready, seen
            seen += os.read(terminal, 4096)
        seen = b""

    try:
        until(rb"/help for help.\r\n.*> ")
        os.write(terminal, b"half a line")
        until(rb"half a line")
        time.sleep(0.2)  # CPython misses an interrupt just before it waits for the next key
        os.write(terminal, b"\x03")
        until(rb"Ctrl-D or /exit leaves\.\r\n.*> ")
        os.write(terminal, b"Hello\r")
        until(rb"Hello\r\n[^\r\n]")
        os.write(terminal, b"\x03")
        until(rb"interrupted\]\r\n.*> ")
        os.write(terminal, b"\x04")
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "cache" / "chat_history").read_text().split() == ["Hello"]
