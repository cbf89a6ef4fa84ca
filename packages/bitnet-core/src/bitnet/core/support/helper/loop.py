"""The loop of a helper process: reads requests, has a program answer them, and writes the answers.

It imports nothing of this package and runs without ``site``: ``process.py`` says where the program and its packages
are. Requests and answers are bytes behind their length; a request also has its limit of processor time, and an answer
begins with a letter for its kind. The process is limited before it reads a request: by the system if possible, else by
its parent, which watches it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

READY, ANSWER, QUESTION, MEMORY = b"r", b"a", b"q", b"m"
"""The kinds of answers: the process has started; the program's answer; its question, whose answer is sent before the
next request; memory has run out."""


def limit(memory: int) -> None:
    """Limit this process if the system can; ``memory`` is bytes of address space beyond its present size."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.SetErrorMode(msvcrt.SEM_FAILCRITICALERRORS | msvcrt.SEM_NOGPFAULTERRORBOX)
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "darwin":  # takes no such limit
        return
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


def _read(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(0, min(count - len(data), 1 << 20))
        if not part:  # the parent has ended
            os._exit(0)
        data += part
    return bytes(data)


def _number() -> int:
    return int.from_bytes(_read(8), "big")


def _write(kind: bytes, answer: bytes = b"") -> None:
    left = memoryview((len(answer) + 1).to_bytes(8, "big") + kind + answer)
    while left:
        left = left[os.write(1, left) :]


def ask(question: bytes) -> bytes:
    """Ask the parent, for a program during a request."""
    _write(QUESTION, question)
    return _read(_number())


def _serve(program: str, memory: int) -> NoReturn:
    names: dict[str, Any] = {"__name__": "program", "ask": ask}
    with open(program, "rb") as file:  # noqa: PTH123
        exec(compile(file.read(), program, "exec"), names)
    answer: Callable[[bytes], bytes] = names["answer"]
    if setup := _read(_number()):
        names["prepare"](setup)
    del setup
    limit(memory)
    _write(READY)
    while True:
        _time(0)
        microseconds = _number()
        request = _read(_number())
        _time(microseconds)
        try:
            answered = answer(request)
        except MemoryError:
            _time(0)
            _write(MEMORY)
            os._exit(0)
        _time(0)
        del request
        _write(ANSWER, answered)


def main(program: str, memory: int, stack: int) -> None:
    """Answer requests until the parent ends or memory runs out.

    Args:
        program: Path of the program, which defines ``answer(request)`` and, if it needs a setup, ``prepare(setup)``.
        memory: Bytes of memory that it may use beyond its size after startup.
        stack: Bytes of its stack; 0: as the system has it.
    """
    if sys.platform == "win32":
        import msvcrt

        for file in (0, 1):
            msvcrt.setmode(file, os.O_BINARY)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if not stack:
        _serve(program, memory)
    threading.stack_size(stack)
    thread = threading.Thread(target=_run, args=(program, memory))
    thread.start()
    thread.join()


def _run(program: str, memory: int) -> None:
    try:
        _serve(program, memory)
    finally:  # an error would end the thread alone
        os._exit(1)
