"""A server in a process of its own, and a client that streams answers from it: what does a request cost others?

As a program, it is that client: for each line on its standard input it prints the longest time between two events of
its streams since the line before, in seconds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

STREAM = {"model": "bitnet-demo", "prompt": "Once", "max_tokens": 800, "ignore_eos": True, "stream": True}


@dataclass
class Live:
    """A server with a streaming client.

    Attributes:
        port: The server's port on this machine.
    """

    process: subprocess.Popen[str]
    bystander: subprocess.Popen[str]
    port: int

    def post(self, path: str, body: bytes, timeout: float = 60) -> tuple[int, float, str]:
        """Send a body; status, seconds until the answer was complete, and the answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        begin = time.monotonic()
        try:
            connection.request("POST", path, body)
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        return answer.status, time.monotonic() - begin, said.decode("utf-8", "replace")

    def longest_gap(self) -> float:
        """The longest time between two events of the client's streams since this was last asked, in seconds."""
        assert self.bystander.stdin is not None
        assert self.bystander.stdout is not None
        self.bystander.stdin.write("\n")
        self.bystander.stdin.flush()
        return float(json.loads(self.bystander.stdout.readline()))

    def memory(self) -> int:
        """The most bytes that the server has had in memory, without its helper processes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(dict(line.split(":", 1) for line in status.splitlines())["VmHWM"].split()[0]) << 10


@contextmanager
def serving(*arguments: str) -> Iterator[Live]:
    """A server of the demo model on the CPU, with more arguments; its streaming client has had its first events."""
    code = "from bitnet.core.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--device", "cpu", "--port", "0", "--threads", "1", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    bystander = None
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"Serving .*:(\d+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        stderr = process.stderr
        threading.Thread(target=lambda: [None for _ in stderr], daemon=True).start()
        bystander = subprocess.Popen(
            [sys.executable, __file__, found[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        live = Live(process, bystander, int(found[1]))
        live.longest_gap()
        yield live
        assert process.poll() is None, "the server has ended"
        assert bystander.poll() is None, "the client was cut off"
    finally:
        for one in (bystander, process):
            if one is not None:
                one.kill()
                one.communicate()


class _Streams:
    """Streams one answer after another, in a thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._longest, self._last = 0.0, time.monotonic()
        self._begun = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        while True:
            connection.request("POST", "/v1/completions", json.dumps(STREAM))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            self._last = time.monotonic()
            while answer.readline():
                self._note()
                self._begun.set()

    def _note(self) -> None:
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now

    def longest(self) -> float:
        """The longest gap, that which has not ended included."""
        self._begun.wait(60)
        found = max(self._longest, time.monotonic() - self._last)
        self._longest = 0.0
        return found


def main(port: int) -> None:
    streams = _Streams(port)
    for _ in sys.stdin:
        print(json.dumps(streams.longest()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
