"""The loop of a helper process: reads requests, has a program answer them, and writes the answers.

It imports nothing of this package and can run without ``site``: what it reads first says where the program's packages
are, and has its setup. Then come requests. Requests and answers are bytes behind their length. Before it, a request has
its limit of processor time, and an answer a letter for its kind. If memory is limited, it is before the first request:
by the system if possible, else by the parent, which watches the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn, TypeAlias

READY, ANSWER, QUESTION, MEMORY = b"r", b"a", b"q", b"m"
"""The kinds of answers: the process has started; the program's answer; its question, whose answer is sent before the
next request; memory has run out."""
SMALL = 1 << 16
"""Maximum bytes that are copied to be written at once."""

Data: TypeAlias = "bytes | Sequence[bytes | memoryview]"
"""A request or an answer: bytes, or parts that are written one after another."""


def write(pipe: IO[bytes], head: bytes, data: Data) -> None:
    """Write ``head``, the number of bytes in ``data``, and ``data``.

    Raises:
        OSError: The other end no longer reads.
    """
    parts = [data] if isinstance(data, bytes) else data
    size = sum(map(len, parts))
    parts = [head + size.to_bytes(8, "big"), *parts]
    for part in [b"".join(parts)] if size <= SMALL else parts:
        left = memoryview(part)
        while left:
            left = left[pipe.write(left) :]


def read(pipe: IO[bytes], head: int, most: int = sys.maxsize) -> tuple[bytes, bytearray]:
    """Read ``head`` bytes and data, as :func:`write` writes them; ``most``: maximum bytes of the data.

    Raises:
        EOFError: The other end has closed the pipe, or it announces more data.
        OSError: The pipe cannot be read.
    """
    before = _exactly(pipe, head + 8)
    size = int.from_bytes(before[head:], "big")
    if size > most:
        raise EOFError
    return bytes(before[:head]), _exactly(pipe, size)


def _exactly(pipe: IO[bytes], count: int) -> bytearray:
    data = bytearray(count)
    left = memoryview(data)
    while left:
        taken = pipe.readinto(left)  # type: ignore[attr-defined]
        if not taken:
            raise EOFError
        left = left[taken:]
    return data


def limit(memory: int) -> None:
    """Limit this process if the system can; ``memory`` is bytes of address space beyond its present size."""
    if sys.platform in ("win32", "darwin"):  # the parent does it
        return
    import resource

    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib takes long to import
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        taken = 1 << 30  # more than Python uses at startup on any platform
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = taken + memory if hard == resource.RLIM_INFINITY else min(hard, taken + memory)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _time(microseconds: int) -> None:
    """Have the system end this process after so much processor time; 0: never."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, microseconds / 1e6)


class _Loop:
    """Takes the pipes for requests and answers away from stdin and stdout, which a program may use otherwise."""

    def __init__(self) -> None:
        if sys.platform == "win32":
            import msvcrt

            for file in (0, 1):
                msvcrt.setmode(file, os.O_BINARY)
        self._requests: IO[bytes] = open(os.dup(0), "rb", buffering=0)  # noqa: PTH123, SIM115 - open to the end
        self._answers: IO[bytes] = open(os.dup(1), "wb", buffering=0)  # noqa: PTH123, SIM115
        self._asking = threading.Lock()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        if sys.stderr is None:
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        os.dup2(sys.stderr.fileno(), 1)
        os.close(nothing)
        sys.stdin, sys.stdout = open(os.devnull, encoding="utf-8"), sys.stderr  # noqa: PTH123, SIM115

    def ask(self, question: Data) -> bytearray:
        """Ask the parent, for a program during a request; from any thread."""
        with self._asking:
            write(self._answers, QUESTION, question)
            return self._read()[1]

    def serve(self, code: str, memory: int) -> NoReturn:
        names: dict[str, Any] = {"__name__": "program"}
        try:
            setup = self._read()[1]
        except EOFError:
            os._exit(0)
        size = int.from_bytes(setup[:8], "big")
        path = bytes(setup[8 : 8 + size])
        places = [os.fsdecode(place) for place in path.split(b"\0")] if path else []
        del setup[: 8 + size]
        if os.path.isabs(code):  # noqa: PTH117
            sys.path += places
            with open(code, "rb") as file:  # noqa: PTH123
                exec(compile(file.read(), code, "exec"), names)
        else:
            import importlib

            sys.path[:] = places
            names = vars(importlib.import_module(code))
        if setup:
            names["prepare"](setup, self.ask)
        del setup
        if memory:
            limit(memory)
        write(self._answers, READY, b"")
        answer: Callable[[bytearray], Data] = names["answer"]
        while True:
            try:
                microseconds, request = self._read()
            except (EOFError, OSError):  # the parent has ended, or has enough
                break
            if microseconds:
                _time(microseconds)
            try:
                answered = answer(request)
            except MemoryError:
                _time(0)
                write(self._answers, MEMORY, b"")
                os._exit(0)
            if microseconds:
                _time(0)
            del request
            try:
                write(self._answers, ANSWER, answered)
            except OSError:
                break
            del answered
        if "finish" in names:
            names["finish"]()
        os._exit(0)  # skip drivers' exit handlers, whose failures nobody would see

    def _read(self) -> tuple[int, bytearray]:
        head, data = read(self._requests, 8)
        return int.from_bytes(head, "big"), data

    def run(self, code: str, memory: int) -> None:
        """As :meth:`serve`, for a thread, which an error would end alone."""
        try:
            self.serve(code, memory)
        finally:
            os._exit(1)


def main(code: str, memory: int, stack: int) -> None:
    """Answer requests until the parent ends or memory runs out.

    Args:
        code: Path of a file, or name of a module. It defines ``answer(request)``; if it needs a setup,
            ``prepare(setup, ask)``, whose ``ask(question)`` asks the parent during a request; and if anything is to be
            closed at the end, ``finish()``.
        memory: Bytes of memory that it may use beyond its size after startup; 0: as many as it gets.
        stack: Bytes of its stack; 0: as the system has it.
    """
    if sys.platform == "win32":
        import msvcrt

        msvcrt.SetErrorMode(  # no dialogs
            msvcrt.SEM_FAILCRITICALERRORS | msvcrt.SEM_NOGPFAULTERRORBOX | msvcrt.SEM_NOOPENFILEERRORBOX
        )
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    loop = _Loop()
    if not stack:
        loop.serve(code, memory)
    threading.stack_size(stack)
    thread = threading.Thread(target=loop.run, args=(code, memory))
    thread.start()
    thread.join()
