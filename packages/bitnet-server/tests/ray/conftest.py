"""Clusters of this machine, each with a token of its own."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import pytest

TOKEN = secrets.token_hex(16)


@pytest.fixture(scope="session")
def environment() -> Mapping[str, str]:
    """The environment of what uses these clusters."""
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@pytest.fixture(scope="session")
def head(environment: Mapping[str, str]) -> Callable[..., AbstractContextManager[str]]:
    """``head(cpus, NAME=value)`` is a context with a cluster of one node, as its address; NAME is in its processes'
    environment."""

    @contextmanager
    def head(cpus: int, **variables: str) -> Iterator[str]:
        port = random.randrange(20_000, 30_000)
        options = ["--num-cpus", str(cpus), "--include-dashboard", "false", "--object-store-memory", str(128 << 20)]
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port), *options],
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "Ray runtime started" in line:
                    break
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield f"127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # asked to end, it takes longer than the tests
            process.wait()

    return head
