"""``bitnet chat``, through a pipe and at a terminal."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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
        history.add_to_history(["two\nlines", "\udcff", "last"])
        assert history.read_history()[-4:] == ["line 998", "two\nlines", "?", "last"]
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


class Terminal:
    """``bitnet chat`` at a pseudo-terminal.

    Args:
        run: What starts it, with its arguments.
        term: The value of ``TERM``.
        errors: A file that takes what it writes to stderr; None: the terminal does.
    """

    def __init__(self, run: list[str], term: str = "dumb", errors: Path | None = None) -> None:
        import pty

        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = term
            if errors is not None:
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            os.execv(run[0], run)
        self.seen = b""

    def until(self, pattern: bytes) -> bytes:
        """Wait until the output since the last call matches; returns that output."""
        while not re.search(pattern, self.seen):
            ready, _, _ = select.select([self.end], [], [], 60)
            assert ready, self.seen
            self.seen += os.read(self.end, 4096)
        seen, self.seen = self.seen, b""
        return seen

    def type(self, keys: bytes) -> None:
        time.sleep(0.2)  # CPython misses an interrupt just before it waits for the next key
        os.write(self.end, keys)

    def leave(self) -> bytes:
        """Type Ctrl-D, and return what is written until the program ends."""
        self.type(b"\x04")
        with suppress(OSError):  # Linux' answer once nobody has the terminal open
            while more := os.read(self.end, 4096):
                self.seen += more
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        assert os.waitstatus_to_exitcode(status) == 0
        return self.seen


Chat = Callable[..., Terminal]


@pytest.fixture
def chat(script_path: str, model: Path) -> Iterator[Chat]:
    if sys.platform == "win32":
        pytest.skip("Windows has no pseudo-terminals in Python")
    opened = []

    def start(*options: str, **how: Any) -> Terminal:
        command = [script_path, "chat", "-m", str(model), "--device", "cpu:numpy", *options]
        opened.append(Terminal(command, **how))
        return opened[-1]

    yield start
    for one in opened:
        if one.pid:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
        os.close(one.end)


@pytest.mark.parametrize("kept", [True, False])
def test_at_a_terminal(chat: Chat, tmp_path: Path, kept: bool) -> None:
    """Ctrl-C stops the answer and not the program, or clears a half-typed line; Ctrl-D leaves; lines are remembered."""
    terminal = chat("-n", "-1", *(() if kept else ("--no-history",)))
    terminal.until(rb"/help for help.\r\n.*> ")
    terminal.type(b"half a line")
    terminal.until(rb"half a line")
    terminal.type(b"\x03")
    terminal.until(rb"Ctrl-D or /exit leaves\.\r\n.*> ")
    terminal.type(b"Hello\r")
    terminal.until(rb"Hello\r\n[^\r\n]")
    terminal.type(b"\x03")
    terminal.until(rb"interrupted\]\r\n.*> ")
    assert terminal.leave().endswith(b"\r\n")
    assert history.read_history() == (["Hello"] if kept else [])
    assert kept or not (tmp_path / "cache").exists()


def test_each_prompt_begins_a_line_where_stderr_is_redirected(chat: Chat, tmp_path: Path) -> None:
    terminal = chat(errors=tmp_path / "errors")
    terminal.until(rb"> ")
    for _ in range(3):
        terminal.type(b"\x03")
        assert b"\r\n> " in terminal.until(rb"> ")
    assert terminal.leave().endswith(b"\r\n")
    assert (tmp_path / "errors").read_text().count("Ctrl-D or /exit leaves.") == 3


def test_a_message_of_several_lines_is_discarded_by_an_interrupt(chat: Chat, tmp_path: Path) -> None:
    terminal = chat("-n", "1", "--no-stats")
    terminal.until(rb"> ")
    for command in (b"/multiline", b'"""'):
        terminal.type(command + b"\r")
        terminal.until("… $".encode())
        terminal.type(b"exit\r")
        terminal.until("exit\r\n.*… $".encode())
        terminal.type(b"\x03" if command == b"/multiline" else b'"""\r')
        assert b"[cpu:" not in terminal.until(rb"> $")
    terminal.type(b"/save a.json\r")
    terminal.until(rb"saved: a\.json\r\n.*> ")
    assert [message["content"] for message in json.loads((tmp_path / "a.json").read_text())][::2] == ["exit"]
    terminal.leave()


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_pasted_lines_are_one_message(chat: Chat, bitnet: Bitnet, model: Path, term: str) -> None:
    """Where the terminal marks what is pasted, and where it does not."""
    lines = ["Tell me", "", "/a story", "of two"]
    typed = "\\\n".join(lines)
    counted = bitnet("chat", "-m", model, "-n", "1", stdin=f"{typed}\nHello\n").err
    prompts = re.findall(r"prompt (\d+) tokens", counted)
    assert len(prompts) == 2
    terminal = chat("-n", "1", term=term)
    before = terminal.until(rb"> ")
    assert (b"\x1b[?2004h" in before) is (term != "dumb")
    pasted = "\r".join(lines).encode()
    terminal.type(b"\x1b[200~" + pasted + b"\x1b[201~" if term != "dumb" else pasted)
    terminal.type(b"\r")
    first = terminal.until(rb"max-tokens\]\r\n.*> ")
    terminal.type(b"Hello\r")
    second = terminal.until(rb"max-tokens\]\r\n.*> ")
    said = re.findall(rb"prompt (\d+) tokens", first + second)
    assert [int(number) for number in said] == [int(number) for number in prompts]
    terminal.leave()
    if term != "dumb":
        assert history.read_history() == ["\n".join(lines), "Hello"]
