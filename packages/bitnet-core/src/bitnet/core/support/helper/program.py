"""What helper processes run: programs, their limits, their command lines, and the errors of their ends."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bitnet.core.errors import BitNetError
from bitnet.core.support.helper.job import Job
from bitnet.core.support.helper.loop import Data

_BOOT = (
    "import sys; names = {'__name__': 'loop'}; "
    "exec(compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec'), names); "
    "names['main'](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)
NO_PROCESSES: bool = sys.platform == "emscripten"
"""Whether the platform has no processes, and no threads: Python in a browser."""
Kind = Literal["memory", "time", "processor", "crash"]


@dataclass(frozen=True, slots=True)
class Program:
    """What helper processes run, and their limits.

    Attributes:
        code: What defines ``answer(request)``, and ``prepare`` and ``finish`` if it needs them
            (:func:`bitnet.core.support.helper.loop.main`). For untrusted input, the path of a Python file, which cannot
            import this package; for libraries that may crash, the name of a module, which has our ``sys.path``.
        purpose: What it does, for errors, such as ``chat templates are rendered``.
        packages: Names of the packages that a file imports.
        memory: Bytes of memory that a process may use beyond its size after startup; 0: as many as it gets.
        base: Upper bound of its memory after startup, in bytes, for platforms where it cannot be measured separately.
        output: Maximum bytes of an answer.
        stack: Bytes of the stack on which it runs; 0: as the system has it.
        setup: Passed to ``prepare`` in each new process, before it is limited; empty: none.
        question: Answers what the program asks during a request.
        patience: Seconds that a process without a request has to end by itself; 0: it is killed.
        stderr: What becomes of its standard error: ``dropped``; ``shown``, in ours; ``kept``, so that
            :class:`HelperEnded` has the last line.
    """

    code: Path | str
    purpose: str
    packages: tuple[str, ...] = ()
    memory: int = 0
    base: int = 0
    output: int = sys.maxsize
    stack: int = 0
    setup: bytes = b""
    question: Callable[[bytearray], Data] | None = None
    patience: float = 0.0
    stderr: Literal["dropped", "shown", "kept"] = "dropped"


class Limits(NamedTuple):
    """Maximum time of one request: duration and, if it is not 0 and the system can limit it, processor time, in
    seconds."""

    seconds: float
    cpu_seconds: float = 0.0


class HelperEnded(Exception):
    """A process reached a limit or crashed before it answered, and was ended.

    The message continues a sentence: ``crashed (SIGSEGV: Segmentation fault)``.

    Attributes:
        kind: The limit; ``crash``: it crashed, or ended itself.
        how: How it crashed, such as ``SIGSEGV``.
        last_line: The last line of its standard error, if the program keeps that.
    """

    def __init__(self, kind: Kind, message: str = "", how: str = "", last_line: str = "") -> None:
        super().__init__(message or f"took more {kind} than it may")
        self.kind, self.how, self.last_line = kind, how, last_line


class HelperStartError(BitNetError):
    """A helper process does not start.

    Attributes:
        reason: Why, such as ``Cannot allocate memory``.
    """

    def __init__(self, purpose: str, python: str, reason: str) -> None:
        super().__init__(
            f"{purpose} in a separate Python process, which does not start ({python}): {reason}.",
            hint="If this program is not Python, set the path of one with multiprocessing.set_executable().",
        )
        self.reason = reason


def described(status: int) -> tuple[str, str]:
    """How a process ended, in a word and in a sentence: ``SIGSEGV``, ``crashed (SIGSEGV: Segmentation fault)``."""
    if status < 0:
        with suppress(ValueError):
            found = signal.Signals(-status)
            return found.name, f"crashed ({found.name}: {signal.strsignal(found) or 'a signal'})"
        return f"status {status}", f"crashed (signal {-status})"
    if status >= 0xC0000000:  # an NTSTATUS on Windows
        return f"status {status}", f"crashed (0x{status:08X})"
    return f"status {status}", f"ended the process (exit status {status})"


def possible() -> bool:
    """Whether this Python can start another one. A program frozen into one file would start itself instead."""
    if NO_PROCESSES:
        return False
    with suppress(HelperStartError):
        return bool(_python(""))
    return False


def command(program: Program) -> list[str]:
    """The command line of a program's process, which has no path of packages: Windows limits its length.

    Raises:
        HelperStartError: There is none.
    """
    python = _python(program.purpose, launched=isinstance(program.code, str) and not program.memory)
    loop = Path(__file__).with_name("loop.py").absolute()
    options = ["-I"] if isinstance(program.code, str) else ["-I", "-S"]
    return [python, *options, "-c", _BOOT, str(loop), str(program.code), str(program.memory), str(program.stack)]


def first_message(program: Program) -> list[bytes]:
    """What a program's process reads first: where its packages are, as :mod:`~bitnet.core.support.helper.loop` reads
    it, and the setup.

    Raises:
        HelperStartError: A package is not installed.
    """
    if isinstance(program.code, str):
        places = [part for part in sys.path if isinstance(part, str)]
    else:
        places = [*dict.fromkeys(_place(program, package) for package in program.packages)]
    path = b"\0".join(os.fsencode(place) for place in places)
    return [len(path).to_bytes(8, "big"), path, program.setup]


def _python(purpose: str, *, launched: bool = False) -> str:
    """The interpreter's path.

    Args:
        launched: Whether it may start another process to do the work, as that of a virtual environment does on Windows.
            It then runs the environment's ``.pth`` files.
    """
    from multiprocessing import spawn  # knows how an embedded Python is told which program is Python

    python = os.fsdecode(spawn.get_executable() or "")
    if python == sys.executable:
        if getattr(sys, "frozen", False):
            raise HelperStartError(purpose, python, "it is a frozen program, not a Python interpreter")
        if sys.platform == "win32" and not launched:  # limits would not reach another process
            python = getattr(sys, "_base_executable", None) or python
    if not python:
        raise HelperStartError(purpose, "Python", "the path of this interpreter is unknown")
    return os.path.abspath(python)  # noqa: PTH100


def _place(program: Program, package: str) -> str:
    """The folder that contains a package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise HelperStartError(program.purpose, "Python", f"{package} is not installed")
    return str(Path(spec.origin).absolute().parent.parent)


def detached(program: Program) -> dict[str, Any]:
    """Options that keep the terminal's interrupts from a program's process, and hide its window on Windows if it shows
    nothing. A file does not run in the current folder."""
    options: dict[str, Any] = {} if isinstance(program.code, str) else {"cwd": os.sep}
    if sys.platform == "win32":
        hidden = 0 if program.stderr == "shown" else subprocess.CREATE_NO_WINDOW
        return {**options, "creationflags": hidden | subprocess.CREATE_NEW_PROCESS_GROUP}
    return {**options, "start_new_session": True}


def job(process: subprocess.Popen[bytes], program: Program) -> Job | None:
    """On Windows, the job object that limits the memory of a program's process."""
    if sys.platform != "win32" or not program.memory:
        return None
    return Job(ctypes.WinDLL("kernel32", use_last_error=True), int(process._handle), program.memory + program.base)
