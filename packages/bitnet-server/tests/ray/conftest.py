"""Clusters of this machine, each with a token of its own, and the command that serves on them."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from ports import free_port

TOKEN = secrets.token_hex(16)
COMMAND = "from bitnet.core.cli import main; main()"


def _session(leader: int, pattern: str = "") -> list[int]:
    """The processes of a session whose command lines match a pattern."""
    command = ["pgrep", "-s", str(leader), "-f", pattern]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


class Node:
    """A node of a cluster on this machine.

    Attributes:
        address: The cluster's.
    """

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process, self.address = process, address

    def pids(self, name: str) -> list[int]:
        """The node's processes that Ray calls by a name."""
        return _session(self._process.pid, f"^ray::{name}")

    def kill(self) -> None:
        """End all processes of the node at once, as if its power failed."""
        for pid in _session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class Served:
    """``bitnet serve --ray`` that runs, and a client for it.

    Attributes:
        said: The lines that it had written when it served.
        logs: The folder of the cluster's logs.
    """

    def __init__(self, process: subprocess.Popen[str], port: int, said: list[str]) -> None:
        self.process, self.said, self.logs = process, said, Path(said[-1].removeprefix("Logs: ").strip())
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def status(self) -> int:
        """The status of a short request."""
        return self.client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3}).status_code

    def gauge(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def until(self, name: str, value: float, seconds: float = 10) -> None:
        """Wait for a gauge's value."""
        ends = time.monotonic() + seconds
        while self.gauge(name) != value:
            assert time.monotonic() < ends, (name, self.gauge(name))
            time.sleep(0.1)

    def pids(self, name: str) -> list[int]:
        """The processes that Ray calls by a name, on the cluster that the command has started."""
        return _session(self.process.pid, f"^ray::{name}")

    def log(self, name: str) -> str:
        return "".join(file.read_text() for file in self.logs.glob(f"*{name}*.log"))


@pytest.fixture(scope="session")
def served() -> Callable[..., AbstractContextManager[Served]]:
    """``served(environment, *options)`` is a context with the command, which has ended when it is left.

    ``program`` is the Python that runs it.
    """

    @contextmanager
    def served(
        environment: Mapping[str, str], *options: str, port: int | None = None, program: str = COMMAND
    ) -> Iterator[Served]:
        port = port or free_port()
        arguments = ["--port", str(port), "--device", "cpu", "-t", "1", *options]
        process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", "--ray", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("Logs: "):
                    break
            else:
                raise AssertionError("".join(said))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            found = Served(process, port, said)
            with found.client:
                yield found
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    return served


@pytest.fixture(scope="session")
def environment() -> Mapping[str, str]:
    """The environment of what uses these clusters."""
    return {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_raylet_start_wait_time_s": "180",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else programs of tests send the clusters the checkout
    }


@contextmanager
def _node(environment: Mapping[str, str], address: str, *options: str) -> Iterator[Node]:
    store = ["--object-store-memory", str(128 << 20)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *store, *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    node = Node(process, address)
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise AssertionError("".join(said))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield node
    finally:
        node.kill()  # asked to end, it takes longer than the tests


@pytest.fixture(scope="session")
def head(environment: Mapping[str, str]) -> Callable[..., AbstractContextManager[Node]]:
    """``head(cpus, *options, NAME=value)`` is a context with a cluster of one node.

    The options are those of ``ray start``; NAME is in its processes' environment.
    """

    def head(cpus: int, *more: str, **variables: str) -> AbstractContextManager[Node]:
        port = str(free_port())
        options = ["--head", "--port", port, "--num-cpus", str(cpus), "--include-dashboard", "false", *more]
        return _node({**environment, **variables}, f"127.0.0.1:{port}", *options)

    return head


@pytest.fixture(scope="session")
def worker(environment: Mapping[str, str]) -> Callable[..., AbstractContextManager[Node]]:
    """``worker(address, cpus, NAME=value)`` is a context with one more node of a cluster."""

    def worker(address: str, cpus: int, **variables: str) -> AbstractContextManager[Node]:
        return _node({**environment, **variables}, address, "--address", address, "--num-cpus", str(cpus))

    return worker
