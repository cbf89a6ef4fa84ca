"""``bitnet completion`` in real shells: what it completes, and that inserted names are quoted safely."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Bitnet = Callable[..., Any]

HOSTILE = [
    "x;touch PWNED;.gguf",
    "x$(touch PWNED).gguf",
    "x`touch PWNED`.gguf",
    "x&touch PWNED&.gguf",
    "x|touch PWNED|.gguf",
    "x a  b.gguf",
    "x*.gguf",
    "x'q.gguf",
    'x"q.gguf',
    "x\\b.gguf",
    "x>PWNED.gguf",
    "x,1,2.gguf",
    "x#!{a,b}~$HOME.gguf",
    "xé.gguf",
]
"""Names of files that begin with x; only one of them is there at a time."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_DEVICE", "cpu")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(bitnet: Bitnet, shell: str) -> None:
    ran = bitnet("completion", shell)
    assert ran.status == 0, ran.err
    assert f"_BITNET_COMPLETE={shell}_complete" in ran.out
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=ran.out, text=True, check=False).returncode == 0


def test_what_it_knows(bitnet: Bitnet, tmp_path: Path) -> None:
    (tmp_path / "one.gguf").touch()
    (tmp_path / "other.txt").touch()
    (tmp_path / "o\nplain,two.gguf").touch()

    def complete(*words: str, **env: str) -> list[str]:
        variables = {"_BITNET_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), **env}
        ran = bitnet(**variables, COMP_CWORD=str(len(words) - 1))
        assert ran.status == 0, ran.err
        return [line.partition(",")[2] for line in ran.out.splitlines()]

    assert complete("bitnet", "per") == ["perplexity"]
    assert complete("bitnet", "run", "--rec") == ["--receipt", "--receipt-key"]
    assert complete("bitnet", "run", "--device", "cu", BITNET_GPU_FAKE="cuda,cuda") == ["cuda", "cuda:0", "cuda:1"]
    assert complete("bitnet", "run", "-m", "o") == ["one.gguf"]
    assert complete("bitnet", "run", "-m", "./o") == ["./one.gguf"]
    assert complete("bitnet", "run", "-m", "x") == ["x"]  # the shell's own files


class Terminal:
    """A shell at a pseudo-terminal, with the completion script loaded."""

    def __init__(self, shell: str, script_path: str, folder: Path) -> None:
        import pty

        commands = {
            "bash": ["bash", "--norc", "--noprofile", "-i"],
            "zsh": ["zsh", "-f", "-i"],
            "fish": ["fish", "--no-config", "-i"],
        }
        setup = {
            "bash": 'PS1="ready> "; eval "$(bitnet completion bash)"',
            "zsh": 'PS1="ready> "; autoload -U compinit; compinit -u -D; eval "$(bitnet completion zsh)"',
            "fish": 'function fish_prompt; echo "ready> "; end; bitnet completion fish | source',
        }
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.environ |= {
                "PATH": f"{Path(script_path).parent}{os.pathsep}{os.environ['PATH']}",
                "TERM": "xterm",
                "HOME": str(folder),
                "XDG_CONFIG_HOME": str(folder),
                "LC_ALL": "C.UTF-8",
            }
            os.execvp(shell, commands[shell])
        self.seen = b""
        # In two halves, so that what the terminal echoes is not taken for what is printed.
        self.type(f"{setup[shell]}; printf 'lo%s\\n' aded\r")
        self.until(b"loaded")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def until(self, text: bytes) -> None:
        while text not in self.seen:
            assert self.reads(30), self.seen
        self.seen = b""

    def until_there(self, path: Path) -> None:
        """Until a file is there that what runs in the shell makes; then it is removed."""
        end = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < end, self.seen
            self.reads(0.05)
        path.unlink()

    def reads(self, seconds: float) -> bool:
        """Whether the shell has written something within this time."""
        ready, _, _ = select.select([self.terminal], [], [], seconds)
        if ready:
            self.seen += os.read(self.terminal, 4096)
        return bool(ready)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals in Python")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_an_inserted_name_is_one_word_and_runs_nothing(
    shell: str, script_path: str, tmp_path: Path, require_device: Callable[[str, str | None], None]
) -> None:
    """``-m x<Tab>`` at the shell, then Enter: a program that stands for bitnet gets the file's name as it is."""
    require_device(shell, None if shutil.which(shell) else f"{shell} is not here")
    received, asked = tmp_path / "received", tmp_path / "asked"
    program = tmp_path / "bin" / "bitnet"
    program.parent.mkdir()
    program.write_text(f"""\
#!{sys.executable}
import os, subprocess, sys
if "_BITNET_COMPLETE" in os.environ or sys.argv[1] == "completion":
    status = subprocess.call([{script_path!r}, *sys.argv[1:]])
    if "_BITNET_COMPLETE" in os.environ:
        open({str(asked)!r}, "w")
    sys.exit(status)
with open({str(received)!r}, "a") as file:
    file.write(repr(sys.argv[1:]) + "\\n")
""")
    program.chmod(0o755)
    folder = tmp_path / "models"
    folder.mkdir()
    os.chdir(folder)
    terminal = Terminal(shell, str(program), tmp_path)
    try:
        for name in HOSTILE:
            (folder / name).touch()
            for begun in ("x", "./x", "'x") if shell == "bash" and name == HOSTILE[0] else ("x",):
                terminal.type(f"bitnet run -m {begun}\t")
                terminal.until_there(asked)
                while terminal.reads(0.25):
                    pass
                terminal.type("\r")  # the shell has closed the quote
                wanted = f"./{name}" if begun == "./x" else name
                while not received.exists() or not (got := received.read_text()).endswith("\n"):
                    assert terminal.reads(20), (name, begun, terminal.seen)
                received.unlink()
                assert got == f"{['run', '-m', wanted]!r}\n", (name, begun)
                assert [p.name for p in folder.iterdir()] == [name]
            (folder / name).unlink()
    finally:
        terminal.close()
