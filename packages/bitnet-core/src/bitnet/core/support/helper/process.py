"""Starts, queries, limits and ends helper processes. :mod:`~bitnet.core.support.helper.loop` is the child's side."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeAlias

from bitnet.core.errors import BitNetError
from bitnet.core.support.helper import memory as watching
from bitnet.core.support.helper.job import Job

START_SECONDS = 30.0
"""Seconds within which a helper must start."""
PARTING = 0.5
"""Seconds within which a helper must end after closing its output."""
SLICE = 0.02
"""Seconds between checks of a helper's memory. On Windows, an interrupt is noticed only between such waits."""

_BOOT = (
    "import sys; sys.path += sys.argv[5:]; names = {'__name__': 'loop'}; "
    "exec(compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec'), names); "
    "names['main'](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)
_READY, _ANSWER, _QUESTION, _MEMORY = b"r", b"a", b"q", b"m"  # as the loop has them
_Messages: TypeAlias = "SimpleQueue[bytes | None]"
Kind = Literal["memory", "time", "processor", "crash"]


@dataclass(frozen=True, slots=True)
class Program:
    """What helper processes run, and their limits.

    Attributes:
        path: A Python file that defines ``answer(request: bytes) -> bytes`` and, if there is a setup,
            ``prepare(setup: bytes)``. It cannot import this package.
        packages: Names of the packages that it imports.
        purpose: What it does, for errors, such as ``chat templates are rendered``.
        memory: Bytes of memory that a process may use beyond its size after startup.
        base: Upper bound of its memory after startup, in bytes, for platforms where it cannot be measured separately.
        output: Maximum bytes of an answer.
        stack: Bytes of the stack on which it runs; 0: as the system has it.
        setup: Passed to ``prepare`` in each new process, before it is limited; empty: none.
        question: Answers what the program asks with ``ask(question: bytes) -> bytes`` during a request.
    """

    path: Path
    packages: tuple[str, ...]
    purpose: str
    memory: int
    base: int
    output: int
    stack: int = 0
    setup: bytes = b""
    question: Callable[[bytes], bytes] | None = None


class Limits(NamedTuple):
    """Maximum time of one request: duration and, if the system can limit it, processor time, in seconds."""

    seconds: float
    cpu_seconds: float


class HelperEnded(Exception):
    """A process reached a limit or crashed before it answered, and was ended.

    Attributes:
        kind: The limit; ``crash``: it crashed.
        how: How it crashed, such as ``SIGSEGV``.
    """

    def __init__(self, kind: Kind, how: str = "") -> None:
        super().__init__(how or kind)
        self.kind, self.how = kind, how


class Helper:
    """A helper process, started on the first request and restarted after it has ended. For one thread at a time."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._running: _Running | None = None

    @property
    def fresh(self) -> bool:
        """Whether the next request starts a process."""
        return self._running is None or not self._running.alive

    def ask(self, request: bytes, limits: Limits) -> bytes:
        """Send a request and return the answer.

        Raises:
            HelperEnded: The process reached a limit or crashed. The next request starts another.
            BitNetError: The process does not start.
        """
        try:
            if self._running is None or not self._running.alive:
                self._running = _Running(self._program)
            return self._running.answer(request, limits)
        except BaseException:  # also on an interrupt, as nobody would read the answer
            self.end()
            raise

    def end(self) -> None:
        """End the process, if there is one. May be called from any thread."""
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def __del__(self) -> None:
        self.end()


class _Running:
    """One process, and the thread that writes to it, reads from it and waits for its end."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._requests: _Messages = SimpleQueue()
        self._replies: _Messages = SimpleQueue()
        command = _command(program)
        with _living_lock:  # a fork at this point would keep the other ends of the pipes open
            read, self._in = os.pipe()
            self._out, write = os.pipe()
            try:
                self._process = subprocess.Popen(
                    command, stdin=read, stdout=write, stderr=subprocess.DEVNULL, cwd=os.sep, **_detached()
                )
            except BaseException as error:
                os.close(self._in)
                os.close(self._out)
                if isinstance(error, OSError):
                    raise _no_start(program, command[0], str(error)) from error
                raise
            finally:
                os.close(read)
                os.close(write)
            _living.add(self)
        thread = threading.Thread(target=self._attend, name="bitnet-helper", daemon=True)
        ready = False
        try:
            self._job = _job(self._process, program.memory + program.base)
            thread.start()
            self._requests.put(_framed(program.setup))
            with suppress(HelperEnded):
                ready = self._next(START_SECONDS) == _READY
        except BaseException:  # an interrupt, too: nobody else knows of it yet
            self.end()
            if not thread.is_alive():
                self._leave()
            raise
        if not ready:
            self.end()
            raise _no_start(program, command[0], f"it ended with status {self._process.wait()}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, request: bytes, limits: Limits) -> bytes:
        self._requests.put(round(limits.cpu_seconds * 1e6).to_bytes(8, "big") + _framed(request))
        end = time.monotonic() + limits.seconds
        while (answer := self._next(end - time.monotonic()))[:1] == _QUESTION:
            assert self._program.question is not None
            self._requests.put(_framed(self._program.question(answer[1:])))
        if answer[:1] != _ANSWER:
            raise HelperEnded("memory" if answer[:1] == _MEMORY else "crash")
        return answer[1:]

    def end(self) -> None:
        self._process.kill()
        self._requests.put(None)

    def wait(self) -> None:
        """Wait until a process that was told to end has ended."""
        self._process.wait()

    def forget(self) -> None:
        """In a fork of this process: close what belongs to the parent."""
        os.close(self._in)
        os.close(self._out)
        self._process.returncode = 0  # it is not a child of this process

    def _next(self, seconds: float) -> bytes:
        end = time.monotonic() + seconds
        while True:
            late = time.monotonic() > end  # this process may have been suspended: a reply that has arrived counts
            try:
                reply = self._replies.get(timeout=SLICE)
                break
            except Empty:
                if late:
                    raise HelperEnded("time") from None
                if watching.taken(self._process.pid) > self._program.memory + self._program.base:
                    raise HelperEnded("memory") from None
        if reply is None:
            raise _ended(self._process.wait())
        return reply

    def _attend(self) -> None:
        """The thread's loop: only this thread waits for the process without a time limit."""
        try:
            while (request := self._requests.get()) is not None:
                self._write(request)
                del request
                self._replies.put(self._read())
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # it is already ending, and its exit status will say why
                self._process.wait(PARTING)
        finally:
            self._leave()
            self._replies.put(None)

    def _leave(self) -> None:
        with _living_lock:
            if self in _living:  # else it has left
                _living.discard(self)
                os.close(self._in)
                os.close(self._out)
        self._process.kill()
        self._process.wait()

    def _read(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(8), "big"))

    def _exactly(self, count: int) -> bytes:
        if count > self._program.output:  # so not from our program
            raise EOFError
        data = bytearray()
        while len(data) < count:
            part = os.read(self._out, min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _write(self, request: bytes) -> None:
        left = memoryview(request)
        while left:
            left = left[os.write(self._in, left) :]


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _command(program: Program) -> list[str]:
    from multiprocessing import spawn  # knows how an embedded Python is told which program is Python

    python = os.fsdecode(spawn.get_executable() or "")
    if python == sys.executable:
        if getattr(sys, "frozen", False):
            raise _no_start(program, python, "it is a frozen program, not a Python interpreter")
        if (
            sys.platform == "win32"
        ):  # a virtual environment's python.exe starts another process, which our limits would not reach
            python = getattr(sys, "_base_executable", None) or python
    if not python:
        raise _no_start(program, "Python", "the path of this interpreter is unknown")
    places = dict.fromkeys(_place(program, package) for package in program.packages)
    loop = Path(__file__).with_name("loop.py").absolute()
    arguments = map(str, (loop, program.path.absolute(), program.memory, program.stack))
    return [os.path.abspath(python), "-I", "-S", "-c", _BOOT, *arguments, *places]  # noqa: PTH100


def _place(program: Program, package: str) -> str:
    """The folder that contains a package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise _no_start(program, "Python", f"{package} is not installed")
    return str(Path(spec.origin).absolute().parent.parent)


def _detached() -> dict[str, Any]:
    """Options that shield the helper from the terminal's interrupts, and hide its window on Windows."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _job(process: subprocess.Popen[bytes], memory: int) -> Job | None:
    if sys.platform != "win32":
        return None
    return Job(ctypes.WinDLL("kernel32", use_last_error=True), int(process._handle), memory)


def _no_start(program: Program, python: str, reason: str) -> BitNetError:
    return BitNetError(
        f"{program.purpose} in a separate Python process, which does not start ({python}): {reason}.",
        hint="If this program is not Python, set the path of one with multiprocessing.set_executable().",
    )


def _ended(status: int) -> HelperEnded:
    """The error for a process that ended without an answer."""
    if sys.platform != "win32" and status == -signal.SIGPROF:
        return HelperEnded("processor")
    try:
        return HelperEnded("crash", signal.Signals(-status).name)
    except ValueError:
        return HelperEnded("crash", f"status {status}")


_living: set[_Running] = set()
_living_lock = threading.Lock()


def _forget() -> None:
    for running in _living:
        running.forget()
    _living.clear()
    _living_lock.release()


@atexit.register
def end_all() -> None:
    for running in list(_living):
        running.end()
        running.wait()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_living_lock.acquire, after_in_parent=_living_lock.release, after_in_child=_forget)
