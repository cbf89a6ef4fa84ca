"""Starts, queries, limits and ends helper processes. :mod:`~bitnet.core.support.helper.loop` is the child's side."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import IO, TypeAlias

from bitnet.core.support.helper import memory as watching
from bitnet.core.support.helper.loop import ANSWER, MEMORY, QUESTION, READY, Data, read, write
from bitnet.core.support.helper.program import (
    HelperEnded,
    HelperStartError,
    Limits,
    Program,
    command,
    described,
    detached,
    first_message,
    job,
)

START_SECONDS = 30.0
"""Seconds within which a helper must start."""
PARTING = 0.5
"""Seconds within which a helper must end after closing its output."""
SLICE = 0.02
"""Seconds between checks of a helper's memory. On Windows, an interrupt is noticed only between such waits."""

_Reply: TypeAlias = "tuple[bytes, bytearray]"
"""An answer's kind, as the loop has them, and the answer."""


class Helper:
    """A helper process, started on the first request and restarted after it has ended. For one thread at a time."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._running: HelperProcess | None = None

    @property
    def fresh(self) -> bool:
        """Whether the next request starts a process."""
        running = self._running  # once: another thread may end it at any time
        return running is None or not running.alive

    def ask(self, request: Data, limits: Limits) -> bytearray:
        """Send a request and return the answer.

        Raises:
            HelperEnded: The process reached a limit or crashed. The next request starts another.
            HelperStartError: The process does not start.
        """
        try:
            running = self._running  # once: another thread may end it at any time
            if running is None or not running.alive:
                self._running = running = HelperProcess(self._program)
            running.ready()
            running.send(request, limits.cpu_seconds)
            return running.answer(limits.seconds)
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


class HelperProcess:
    """One process, and the thread that writes to it, reads from it and waits for its end. For one thread at a time.

    Raises:
        HelperStartError: It does not start.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._requests: SimpleQueue[tuple[bytes, Data] | None] = SimpleQueue()
        self._replies: SimpleQueue[_Reply | None] = SimpleQueue()
        self._ready, self._due = False, 0
        self._last_line = ""
        self._errors = TemporaryFile() if program.stderr == "kept" else None  # noqa: SIM115
        arguments = command(program)
        where = {"dropped": subprocess.DEVNULL, "shown": None, "kept": self._errors}[program.stderr]
        self._thread = threading.Thread(target=self._attend, name="bitnet-helper", daemon=True)
        with _living_lock:  # a fork at this point would keep the other ends of the pipes open
            (requests, to_it), (from_it, answers) = os.pipe(), os.pipe()
            self._in: IO[bytes] = open(to_it, "wb", buffering=0)  # noqa: PTH123, SIM115 - _leave closes them
            self._out: IO[bytes] = open(from_it, "rb", buffering=0)  # noqa: PTH123, SIM115
            try:
                self._process = subprocess.Popen(
                    arguments, stdin=requests, stdout=answers, stderr=where, **detached(program)
                )
            except BaseException as error:
                self._close()
                if isinstance(error, OSError):
                    raise HelperStartError(program.purpose, arguments[0], error.strerror or str(error)) from error
                raise
            finally:
                os.close(requests)
                os.close(answers)
            _living.add(self)
        self._started = self._asked = time.monotonic()
        try:
            self._job = job(self._process, program)
            self._thread.start()
            self._put(first_message(program))
        except BaseException:  # an interrupt, too: nobody else knows of it yet
            self._process.kill()
            self._requests.put(None)
            if not self._thread.is_alive():
                self._leave()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        """Wait until the process has started.

        Raises:
            HelperStartError: It has ended instead, or takes longer than :data:`START_SECONDS`.
        """
        if self._ready:
            return
        how = "answered before it was ready"
        try:
            self._ready = self._next(self._started + START_SECONDS, START_SECONDS)[0] == READY
        except HelperEnded as error:
            how = f"{error}: {error.last_line}" if error.last_line else str(error)
        if not self._ready:
            self._process.kill()
            self.end()
            raise HelperStartError(self._program.purpose, command(self._program)[0], f"it {how}")

    def send(self, request: Data, cpu_seconds: float = 0.0) -> None:
        """Send a request without waiting, not even for the start."""
        self._asked = time.monotonic()
        self._put(request, cpu_seconds)

    def answer(self, seconds: float) -> bytearray:
        """The answer to the request that was sent, which may take so many seconds from then on.

        Raises:
            HelperEnded: The process reached a limit or crashed.
            HelperStartError: It has not started.
        """

        def replied(answer: Data) -> _Reply:
            self._put(answer)
            return self._next(end, seconds)

        self.ready()
        end = self._asked + seconds
        return self._answer(self._next(end, seconds), replied)

    def exchange(self, request: Data) -> bytearray:
        """Send a request and return the answer, without a limit of time. The caller's thread reads it, which is faster.

        Raises:
            HelperEnded: The process crashed.
            HelperStartError: It has not started.
        """
        self.ready()
        return self._answer(self._directly(request), self._directly)

    def end(self, wait: bool = False) -> None:
        """End the process. May be called from any thread.

        Args:
            wait: Return when it has ended, or not even a kill has ended it.
        """
        if self._due or not self._program.patience:
            self._process.kill()
        self._requests.put(None)
        if (
            wait and self._thread.ident is not None
        ):  # it has begun; else the program ends while another thread starts it
            self._thread.join(self._program.patience + 2 * PARTING)

    def forget(self) -> None:
        """In a fork of this process: close what belongs to the parent."""
        self._close()
        self._process.returncode = 0  # it is not a child of this process

    def _put(self, data: Data, cpu_seconds: float = 0.0) -> None:
        self._due += 1
        self._requests.put((round(cpu_seconds * 1e6).to_bytes(8, "big"), data))

    def _answer(self, reply: _Reply, exchange: Callable[[Data], _Reply]) -> bytearray:
        """The answer, after the program's questions have been answered."""
        kind, data = reply
        while kind == QUESTION:
            assert self._program.question is not None
            kind, data = exchange(self._program.question(data))
        if kind == MEMORY:
            raise HelperEnded("memory")
        if kind != ANSWER:
            raise HelperEnded("crash", "answered with something other than a result", "no answer")
        return data

    def _directly(self, data: Data) -> _Reply:
        try:
            return self._exchange(bytes(8), data)
        except (OSError, EOFError, ValueError):  # ValueError: the pipe is closed
            self.end(wait=True)
            raise self._ended() from None

    def _next(self, end: float, seconds: float) -> _Reply:
        """The next reply. At the time ``end``, the process has had ``seconds``."""
        while True:
            now = time.monotonic()
            late = now > end  # this process may have been suspended: a reply that has arrived counts
            try:
                reply = self._replies.get(timeout=SLICE)
                break
            except Empty:
                if late:
                    if not self.alive:
                        raise self._ended() from None
                    raise HelperEnded("time", f"did not answer within {seconds:g} s") from None
                if not self.alive:  # what it has started may hold the pipe open, so that nobody else notices
                    end = min(end, now + PARTING)
                elif self._program.memory and watching.taken(self.pid) > self._program.memory + self._program.base:
                    raise HelperEnded("memory") from None
        if reply is None:
            raise self._ended()
        self._due -= 1
        return reply

    def _ended(self) -> HelperEnded:
        """The error for a process that ended without an answer."""
        status = self._process.poll()
        if status is None:
            return HelperEnded("crash", "can neither answer nor be ended", "no end")
        if sys.platform != "win32" and status == -signal.SIGPROF:
            return HelperEnded("processor")
        how, message = described(status)
        return HelperEnded("crash", message, how, self._last_line)

    def _attend(self) -> None:
        """The thread's loop: only this thread waits for the process without a time limit."""
        try:
            while (request := self._requests.get()) is not None:
                self._replies.put(self._exchange(*request))
                del request
        except (OSError, EOFError):
            pass
        finally:
            self._leave()
            self._replies.put(None)

    def _leave(self) -> None:
        with _living_lock:
            _living.discard(self)
            self._in.close()
        with suppress(subprocess.TimeoutExpired):  # if it is already ending, its exit status will say why
            self._process.wait(max(PARTING, self._program.patience))
        self._process.kill()
        self._process.wait()
        if self._errors is not None:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self._last_line = " ".join(lines[-1].split()) if lines else ""
        self._close()

    def _close(self) -> None:
        for file in (self._in, self._out, self._errors):
            if file is not None:
                file.close()

    def _exchange(self, head: bytes, data: Data) -> _Reply:
        write(self._in, head, data)
        return read(self._out, 1, self._program.output)


_living: set[HelperProcess] = set()
_living_lock = threading.Lock()


def _forget() -> None:
    for running in _living:
        running.forget()
    _living.clear()
    _living_lock.release()


@atexit.register
def end_all() -> None:
    ending = list(_living)
    for running in ending:
        running.end()
    for running in ending:
        running.end(wait=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_living_lock.acquire, after_in_parent=_living_lock.release, after_in_child=_forget)
