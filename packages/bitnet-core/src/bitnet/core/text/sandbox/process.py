"""Starts, queries, limits and ends a helper process that renders templates."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from bitnet.core.errors import BitNetError
from bitnet.core.text.sandbox import memory as watching
from bitnet.core.text.sandbox.job import Job

MEMORY = 256 << 20
"""Bytes of memory that a helper may use beyond its size after startup."""
BASE = 64 << 20
"""Upper bound of a helper's memory after startup, in bytes, for platforms where it cannot be measured separately."""
CPU_SECONDS = 1.0
"""Maximum CPU time of one rendering in seconds, if the system can limit it."""
SECONDS = 1.5
"""Maximum duration of one rendering in seconds."""
OUTPUT = 16 << 20
"""Maximum characters that one rendering may write."""
START_SECONDS = 30.0
"""Seconds within which a helper must start."""
PARTING = 0.5
"""Seconds within which a helper must end after closing its output."""
SLICE = 0.02
"""Seconds between checks of a helper's memory. On Windows, an interrupt is noticed only between such waits."""

_BOOT = (
    "import sys; sys.path += sys.argv[5:]; names = {'__name__': 'child'}; "
    "exec(compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec'), names); "
    "names['main'](int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))"
)
_REFUSED = {
    "memory": f"takes more than {MEMORY >> 20} MiB of memory",
    "output": f"writes more than {OUTPUT:,} characters",
    "time": f"takes longer than {SECONDS:g} s",
    "processor": f"takes more than {CPU_SECONDS:g} s of processor time",
}
Reply: TypeAlias = tuple[str, list[str | None]]
"""Its kind, and texts."""
_Messages: TypeAlias = "SimpleQueue[bytes | None]"


class TemplateError(Exception):
    """A template fails or reaches a limit. The message continues a sentence that begins with "the template"."""


class Helper:
    """A helper process, started on the first request and restarted after it has ended. For one thread at a time."""

    def __init__(self) -> None:
        self._running: _Running | None = None

    def ask(self, request: bytes) -> list[str | None]:
        """Send a request and return the resulting texts.

        Raises:
            TemplateError: The template fails, or reaches a bound.
            BitNetError: The helper does not start.
        """
        try:
            if self._running is None or not self._running.alive:
                self._running = _Running()
            kind, texts = self._running.answer(request, SECONDS)
        except BaseException:  # also on an interrupt, as nobody would read the answer
            self.end()
            raise
        if kind == "texts":
            return texts
        if kind != "error":
            self.end()
        raise TemplateError(_REFUSED.get(kind) or f"fails: {texts[0]}")

    def end(self) -> None:
        """End the process, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def __del__(self) -> None:
        self.end()


class _Running:
    """One process, and the thread that writes to it, reads from it and waits for its end."""

    def __init__(self) -> None:
        self._requests: _Messages = SimpleQueue()
        self._replies: _Messages = SimpleQueue()
        command = _command()
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
                    raise _no_start(command[0], str(error)) from error
                raise
            finally:
                os.close(read)
                os.close(write)
            _living.add(self)
        thread = threading.Thread(target=self._attend, name="bitnet-template", daemon=True)
        try:
            self._job = _job(self._process)
            thread.start()
            kind, _ = self._next(START_SECONDS)
        except BaseException:  # an interrupt, too: nobody else knows of it yet
            self.end()
            if not thread.is_alive():
                self._leave()
            raise
        if kind != "ready":
            self.end()
            raise _no_start(command[0], f"it ended with status {self._process.wait()}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, request: bytes, seconds: float) -> Reply:
        self._requests.put(request)
        return self._next(seconds)

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

    def _next(self, seconds: float) -> Reply:
        end = time.monotonic() + seconds
        while True:
            late = time.monotonic() > end  # this process may have been suspended: a reply that has arrived counts
            try:
                reply = self._replies.get(timeout=SLICE)
                break
            except Empty:
                if late:
                    return "time", []
                if watching.taken(self._process.pid) > MEMORY + BASE:
                    return "memory", []
        if reply is None:
            return _ended(self._process.wait())
        kind, texts = json.loads(reply)
        return kind, texts

    def _attend(self) -> None:
        """The thread's loop: only this thread waits for the process without a time limit."""
        try:
            self._replies.put(self._read())
            while (request := self._requests.get()) is not None:
                self._write(request)
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
        if count > 16 * OUTPUT:  # more than JSON can make of a text, so not from our program
            raise EOFError
        data = bytearray()
        while len(data) < count:
            part = os.read(self._out, min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _write(self, request: bytes) -> None:
        left = memoryview(len(request).to_bytes(8, "big") + request)
        while left:
            left = left[os.write(self._in, left) :]


def _command() -> list[str]:
    from multiprocessing import spawn  # knows how an embedded Python is told which program is Python

    python = os.fsdecode(spawn.get_executable() or "")
    if python == sys.executable:
        if getattr(sys, "frozen", False):
            raise _no_start(python, "it is a frozen program, not a Python interpreter")
        if (
            sys.platform == "win32"
        ):  # a virtual environment's python.exe starts another process, which our limits would not reach
            python = getattr(sys, "_base_executable", None) or python
    if not python:
        raise _no_start("Python", "the path of this interpreter is unknown")
    places = dict.fromkeys(map(_place, ("jinja2", "markupsafe")))
    program = str(Path(__file__).with_name("child.py").absolute())
    numbers = map(str, (MEMORY, CPU_SECONDS, OUTPUT))
    return [os.path.abspath(python), "-I", "-S", "-c", _BOOT, program, *numbers, *places]  # noqa: PTH100


def _place(package: str) -> str:
    """The folder that contains a package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise _no_start("Python", f"{package} is not installed")
    return str(Path(spec.origin).absolute().parent.parent)


def _detached() -> dict[str, Any]:
    """Options that shield the helper from the terminal's interrupts, and hide its window on Windows."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _job(process: subprocess.Popen[bytes]) -> Job | None:
    if sys.platform != "win32":
        return None
    return Job(ctypes.WinDLL("kernel32", use_last_error=True), int(process._handle), MEMORY + BASE)


def _no_start(program: str, reason: str) -> BitNetError:
    return BitNetError(
        f"chat templates are rendered in a separate Python process, which does not start ({program}): {reason}.",
        hint="If this program is not Python, set the path of one with multiprocessing.set_executable().",
    )


def _ended(status: int) -> Reply:
    """The error for a process that ended without a reply."""
    if sys.platform != "win32" and status == -signal.SIGPROF:
        return "processor", []
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"status {status}"
    return "error", [f"it crashes its interpreter ({name})"]


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
