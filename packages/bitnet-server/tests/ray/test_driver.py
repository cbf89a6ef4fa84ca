"""The command dies, the deployment goes on, and the same command finds it again."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec

import httpx
import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly,
]


def test_a_killed_command_finds_its_deployment_again(
    head: Callable[..., AbstractContextManager[str]], environment: Mapping[str, str]
) -> None:
    port = random.randrange(10_000, 20_000)  # below those that the system gives Ray's processes meanwhile
    url = f"http://127.0.0.1:{port}"

    def start(address: str) -> subprocess.Popen[str]:
        options = ["--device", "cpu", "-t", "1", "-c", "512", "--port", str(port), "--address", address]
        process = subprocess.Popen(
            [sys.executable, "-m", "bitnet.core", "serve", "--ray", *options],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("Logs: "):
                break
        assert lines, process.wait(60)
        assert lines[-1].startswith("Logs: "), lines
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return process

    def answers() -> int:
        body = {"prompt": "Once", "max_tokens": 3}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code

    with head(2) as address:
        first = start(address)
        assert answers() == 200
        first.kill()
        first.wait()
        assert answers() == 200
        second = start(address)
        assert answers() == 200
        second.terminate()
        assert second.wait(60) == 0
        with pytest.raises(httpx.TransportError):
            answers()
