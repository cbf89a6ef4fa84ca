"""Helper processes: how one that does not start is described, and how one finds its packages."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.devices import examine
from bitnet.core.devices.plugin import Plugin
from bitnet.core.hal import ProbeStatus
from bitnet.core.support.helper import Helper, HelperEnded, HelperProcess, HelperStartError, Limits, Program
from bitnet.core.support.helper import process as processes
from bitnet.core.support.helper.program import command, job

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
WINDOWS_LIMIT = 32_767
"""Maximum characters of a command line on Windows."""


def program(folder: Path, text: str) -> Path:
    file = folder / "program.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("dies", "reason"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "it crashed (SIGSEGV: Segmentation fault)", marks=posix),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "it crashed (SIGKILL: Killed)", marks=posix),
        ("os._exit(7)", "it ended the process (exit status 7)"),
        ("raise OSError('no driver')", "it ended the process (exit status 1): OSError: no driver"),
    ],
)
def test_how_a_process_dies_at_its_start_is_said(tmp_path: Path, dies: str, reason: str) -> None:
    code = program(tmp_path, f"import os, signal\n{dies}")
    process = HelperProcess(Program(code, "it is tried", stderr="kept"))
    with pytest.raises(HelperStartError) as caught:
        process.ready()
    assert caught.value.reason == reason


def test_a_program_may_end_while_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at exit ends processes that a thread has started, but not attended to yet."""

    def ending(*given: Any) -> Any:
        processes.end_all()
        return job(*given)

    monkeypatch.setattr(processes, "job", ending)
    process = HelperProcess(Program(program(tmp_path, "import sys\nsys.stdin.read()"), "it is tried"))
    process.end(wait=True)
    assert not process.alive


@pytest.fixture
def deathless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that no kill ends, as in a driver that hangs in the kernel."""
    begun: list[subprocess.Popen[bytes]] = []

    def survive(process: subprocess.Popen[bytes]) -> None:
        begun.append(process)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", survive)
        yield
    for process in begun:
        process.kill()


def test_a_process_that_neither_starts_nor_dies_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deathless: None
) -> None:
    monkeypatch.setattr(processes, "START_SECONDS", 0.3)
    process = HelperProcess(Program(program(tmp_path, "import time\ntime.sleep(30)"), "it is tried"))
    began = time.monotonic()
    with pytest.raises(HelperStartError, match=r"it did not answer within 0\.3 s"):
        process.ready()
    assert time.monotonic() - began < 10


def test_long_paths_of_packages_are_not_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(tmp_path / f"{i:03}-{'ä' * 90}") for i in range(WINDOWS_LIMIT // 90)]
    (tmp_path / "seen.py").write_text("import os, sys\ndef answer(_):\n    return os.fsencode(chr(0).join(sys.path))\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), *folders])
    module = Program("seen", "it is tried")
    assert sum(map(len, command(module))) < WINDOWS_LIMIT / 10
    assert Helper(module).ask(b"", Limits(30)).decode().split("\0") == sys.path


def test_which_python_runs_a_helper_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment's interpreter runs its ``.pth`` files, but in a process that no limit reaches."""
    base = str(tmp_path / "base" / "python.exe")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "_base_executable", base, raising=False)
    assert command(Program("module", ""))[0] == sys.executable
    assert command(Program("module", "", memory=1 << 20))[0] == base
    assert command(Program(tmp_path / "program.py", ""))[0] == base


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ("b'nonsense'", "It answered with something other than JSON while it was probed."),
        ("b'\\xff'", "It answered with something other than JSON while it was probed."),
        ("b'[1]'", "It answered with something other than a JSON object while it was probed."),
        ("b''", "It answered with something other than JSON while it was probed."),
    ],
)
def test_an_examined_backend_that_answers_nonsense_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: str, reason: str
) -> None:
    (tmp_path / "examinee.py").write_text(f"def prepare(setup, ask): pass\ndef answer(_): return {answers}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(examine, "MODULE", "examinee")
    (found,) = examine.examine_all({"b": Plugin("b", "bitnet-b", "1", lambda: None)})
    assert (found.report.probe.status, found.crashed) == (ProbeStatus.BROKEN, {"b": reason})


def test_a_helper_that_another_thread_ends_meanwhile(tmp_path: Path) -> None:
    """Whatever moment it is, a request is answered or its helper has ended."""
    helper = Helper(Program(program(tmp_path, "import sys\nsys.stdin.read()"), "it is tried"))

    class Ended:
        """A process that another thread ends as it is looked at."""

        @property
        def alive(self) -> bool:
            helper.end()
            return True

        def end(self) -> None:
            pass

        def ready(self) -> None:
            raise HelperEnded("crash")

    helper._running = Ended()  # type: ignore[assignment]
    assert not helper.fresh
    helper._running = Ended()  # type: ignore[assignment]
    with pytest.raises(HelperEnded):
        helper.ask(b"", Limits(30))
