"""``bitnet chat``, through a pipe and at a terminal."""

from __future__ import annotations

import errno
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
from bitnet.core.cli import history

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
        # A random model may give one answer to many texts: one is taken whose answer depends on what was said before.
        for text in ("two\nlines", "Why?\nNo.", "17 + 25\nis", "a\nb", "Tell me\na story"):
            second = loaded.chat(said("Hello", first, text), max_tokens=5).text
            fresh = loaded.chat(said(text), max_tokens=5).text
            if second != fresh:
                break
    assert second != fresh
    again = text.replace("\n", "\\\n")
    typed = f"Hello\n{again}\n/reset\n\n{again}\n/exit\nnever\n"
    ran = bitnet("chat", "-m", model, "-n", "5", stdin=typed)
    assert ran.status == 0, ran.err
    assert ran.out == f"{first}\n{second}\n{fresh}\n"
    assert ran.err.count("[cpu:") == 3


def test_bytes_that_are_no_text_do_not_end_a_conversation(bitnet: Bitnet, model: Path) -> None:
    with load_model(model, device="cpu") as loaded:
        first = loaded.chat(said("Hello"), max_tokens=5).text
        second = loaded.chat(said("Hello", first, "more"), max_tokens=5).text
    ran = bitnet("chat", "-m", model, "-n", "5", stdin=b"\xe9t\xe9\nHello\n\xc3\xa9caf\xe9\nmore\n")
    assert (ran.status, ran.out) == (0, f"{first}\n{second}\n")
    wrong = [line for line in ran.err.splitlines() if not line.startswith("[cpu:")]
    assert wrong == [f"the message is not UTF-8 (at byte {byte})." for byte in (0, 5)]


def test_commands(bitnet: Bitnet, model: Path) -> None:
    ran = bitnet("chat", "-m", model, stdin="/help\n/nope\n")
    assert (ran.status, ran.out) == (0, "")
    assert "/reset" in ran.err
    assert "unknown command /nope" in ran.err


@pytest.mark.parametrize("leave", ["/exit\r\n", " /exit \n", "/exit\r"])
def test_commands_of_a_pipe_with_other_line_ends(bitnet: Bitnet, model: Path, leave: str) -> None:
    ran = bitnet("chat", "-m", model, stdin=f"/help\r\n{leave}Hello\n")
    assert (ran.status, ran.out, "there is no" in ran.err, "/reset" in ran.err) == (0, "", False, True)


class TestHistory:
    """What a conversation keeps of what was typed."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "cache" / "chat_history"

    def test_it_is_kept_for_its_user_alone(self, path: Path) -> None:
        assert history.read_history() == []
        history.add_to_history([f"line {i}" for i in range(999)])
        history.add_to_history(["ä", "\udcff", "last"])
        assert history.read_history()[-4:] == ["line 998", "ä", "?", "last"]
        assert len(history.read_history()) == 1000
        if os.name == "posix":
            path.chmod(0o644)
            history.add_to_history(["more"])
            assert path.stat().st_mode & 0o777 == 0o600
        assert history.clear_history() == 1000
        assert not path.exists()
        assert history.clear_history() == 0

    def test_a_read_only_folder_without_one_is_clear(self, bitnet: Bitnet, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        monkeypatch.setattr(Path, "unlink", refuse)
        assert bitnet("cache", "clear").status == 0

    @pytest.mark.skipif(os.name == "nt", reason="links and pipes need rights there, or are not")
    @pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
    def test_what_is_no_file_is_not_touched(self, path: Path, tmp_path: Path, kind: str) -> None:
        path.parent.mkdir()
        other = tmp_path / "other"
        if kind == "link":
            other.write_text("theirs\n")
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(other)
        for use in (history.read_history, lambda: history.add_to_history(["typed"])):
            with pytest.raises(OSError, match=r"not a regular file|symbolic|Is a directory|No such device"):
                use()
        if kind != "folder":
            assert history.clear_history() == 0
            assert not path.is_symlink()
        assert not other.exists() or other.read_text() == "theirs\n"


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
@pytest.mark.parametrize("kept", [True, False])
def test_at_a_terminal(script_path: str, model: Path, tmp_path: Path, kept: bool) -> None:
    """Ctrl-C stops the answer and not the program, or clears a half-typed line; Ctrl-D leaves; lines are remembered."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "dumb"
        options = ("-n", "-1", "--device", "cpu:numpy", *(() if kept else ("--no-history",)))
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
    assert history.read_history() == (["Hello"] if kept else [])
    assert kept or not (tmp_path / "cache").exists()
