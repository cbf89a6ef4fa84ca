"""Measures a bomb's cost at an entry point: CPU time, memory, and reaction time to Ctrl-C.

A server imports everything once and forks a process for each measurement; one JSON object a line, both ways::

    {"door": "run", "path": "bomb.gguf", "interrupt": null} -> {"status": 4, "seconds": 0.1, "bytes": 9e7, "text": …}

Processors differ, and one that other work slows down differs from itself. So a yardstick, the same work each time, is
timed beside each case, and a case's seconds are those of a processor on which the yardstick takes :data:`YARDSTICK`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import numpy as np

from bombs.family import Door

MEMORY = 1 << 30
SECONDS = 2.0
ANSWER = 0.5
"""Bounds on a case: bytes of resident memory, seconds of processor time, and seconds of it after Ctrl-C."""
YARDSTICK = 0.030
"""Seconds that the yardstick takes on the processor whose seconds are counted: the one on which the bounds were set.
The tokenizers library built Llama 3's vocabulary there in 0.33 s, and one of that size takes 11 times the yardstick."""
KILLED_AT = 5.0
"""Seconds of processor time, and gigabytes of memory in tenths above the bound, at which a case is ended."""
WAIT = 60
"""Seconds in all after which a case is ended, for one that waits without computing."""


class Cost(NamedTuple):
    """The cost of one case.

    Attributes:
        status: Its exit status, negative for a signal.
        seconds: Processor time, of all its threads; after Ctrl-C where that was sent. In seconds of the processor on
            which the yardstick takes :data:`YARDSTICK`.
        bytes: Most resident memory.
        text: The end of what it printed.
    """

    status: int
    seconds: float
    bytes: int
    text: str


class Meter:
    """The server, started with the context and ended with it. For systems with ``fork`` and ``/proc``."""

    def __enter__(self) -> Meter:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "BITNET_THREADS": "1",
            "BITNET_DEVICE": "cpu",
            "BITNET_GPU_FAKE": "none",  # no driver is opened, which takes a second of `bitnet inspect` on any file
        }
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "bombs.measure"]
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.communicate()

    def cost(self, door: Door, path: Path, *, interrupt: float | None = None) -> Cost:
        """Bring a file to a door; with ``interrupt``, over and over until Ctrl-C, that many seconds of work later."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"door": door, "path": str(path), "interrupt": interrupt}) + "\n")
        self._server.stdin.flush()
        return Cost(**json.loads(self._server.stdout.readline()))


def _serve() -> None:
    import jinja2  # noqa: F401 - so that no process has to

    import bitnet.core.api
    import bitnet.core.cli
    import bitnet.core.cpu.device
    import bitnet.core.model.convert
    import bitnet.core.text.tokenizer  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_measure(**json.loads(line))._asdict()), flush=True)


def _measure(door: Door, path: str, interrupt: float | None) -> Cost:
    before = _yardstick()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            _child(door, path, output.fileno(), folder, again=interrupt is not None)
        begun, sent = time.monotonic(), None
        while True:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                break
            seconds, size = _used(child)
            late = seconds - (sent or 0) > KILLED_AT or time.monotonic() - begun > WAIT
            if late or size > MEMORY * 1.2:
                os.kill(child, signal.SIGKILL)
            elif interrupt is not None and sent is None and seconds * YARDSTICK / before >= interrupt:
                os.kill(child, signal.SIGINT)
                sent = seconds
            time.sleep(0.002)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 2000))
        text = output.read().decode(errors="replace")
    speed = YARDSTICK / ((before + _yardstick()) / 2)
    seconds = (usage.ru_utime + usage.ru_stime - (sent or 0)) * speed
    return Cost(os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss * 1024, text)


def _yardstick() -> float:
    """Seconds of processor time for a fixed piece of work: objects of Python, and small arrays."""
    begun = time.process_time()
    words = {str(number): number for number in range(40_000)}
    sum(words[word] for word in sorted(words))
    numbers = np.arange(64.0)
    for _ in range(4000):
        np.add.reduce(numbers - numbers[0])
    return time.process_time() - begun


def _used(process: int) -> tuple[float, int]:
    """Seconds of processor time, with those of its own children, and resident bytes of a process that runs."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return processor_seconds(process), pages * resource.getpagesize()


def processor_seconds(process: int) -> float:
    """Processor time of a process and of all processes below it, in seconds. For systems with ``/proc``."""
    return _ticks(process) / os.sysconf("SC_CLK_TCK")


def _ticks(process: int) -> int:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        children = [
            child for task in Path(f"/proc/{process}/task").glob("*/children") for child in task.read_text().split()
        ]
    except OSError:  # it has just ended
        return 0
    return sum(map(int, fields[11:15])) + sum(_ticks(int(child)) for child in children)


def _child(door: Door, path: str, output: int, folder: str, *, again: bool) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - the server's own holds requests
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    status = 1
    try:
        status = _knock(door, path, folder)
        while again and not asked:
            status = _knock(door, path, folder)
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _knock(door: Door, path: str, folder: str) -> int:
    from bitnet.core.cli import main

    if door == "encode":
        from bitnet.core.errors import ModelFileError
        from bitnet.core.model.file import open_model

        try:
            tokenizer = open_model(path).tokenizer
        except ModelFileError as error:
            print(error)
            return 4
        tokenizer.decode(tokenizer.encode("The <|quick|> brown fox jumps aaaa over it. " * 500, parse_special=True))
        return 0
    commands = {
        "inspect": ["inspect", path],
        "run": ["run", "-m", path, "-n", "2", "hello"],
        "convert": ["convert", path, f"{folder}/out.gguf", "--force"],
    }
    return main(commands[door])


if __name__ == "__main__":
    _serve()
