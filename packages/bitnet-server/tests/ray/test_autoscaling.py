"""``bitnet serve --ray --replicas auto``: from one replica to three, back, to none, and awake again."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly,
]
QUICK = """
from bitnet.core.cli import main
from bitnet.server.ray import application
application.UPSCALE_SECONDS, application.DOWNSCALE_SECONDS, application.IDLE_SECONDS = 2, 8, 8
main()
"""


def test_replicas_follow_the_load(
    head: Callable[..., AbstractContextManager[str]], environment: Mapping[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = [
        "--replicas",
        "auto",
        "--min-replicas",
        "0",
        "--device",
        "cpu",
        "-t",
        "1",
        "-c",
        "512",
        "-np",
        "4",
        "--max-queue",
        "60",
        "--port",
        str(port),
    ]
    with head(3, RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1", BITNET_TEST=str(tmp_path)) as address:
        process = subprocess.Popen(
            [sys.executable, "-c", QUICK, "serve", "--ray", "--address", address, *options],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            _follow(process, f"http://127.0.0.1:{port}", str(tmp_path))
        finally:
            process.terminate()
            process.wait(60)


def replicas(mark: str) -> int:
    """The processes of engines on the cluster whose environment holds ``mark``."""
    found = subprocess.run(
        ["pgrep", "-f", "^ray::ServeReplica:bitnet:engine"], capture_output=True, text=True, check=False
    )
    return sum(mark in _environment(int(pid)) for pid in found.stdout.split())


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def _follow(process: subprocess.Popen[str], url: str, mark: str) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("Logs: "):
            break
    assert re.search(r"as many replicas as needed", "".join(lines)), lines
    threading.Thread(target=process.stderr.read, daemon=True).start()
    seen = [replicas(mark)]
    assert seen == [1]
    statuses: list[int] = []
    ends = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not ends.is_set():
                body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
                statuses.append(client.post("/v1/completions", json=body).status_code)

    def until(count: int, seconds: float) -> None:
        late = time.monotonic() + seconds
        while (now := replicas(mark)) != count:
            assert time.monotonic() < late, (count, seen)
            if now != seen[-1]:
                seen.append(now)
            time.sleep(0.2)
        if count != seen[-1]:
            seen.append(count)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    until(3, 120)
    time.sleep(10)
    assert replicas(mark) == 3
    ends.set()
    for thread in threads:
        thread.join()
    until(0, 120)
    assert set(statuses) == {200}
    assert seen == [*sorted(seen[: seen.index(3) + 1]), *sorted(seen[seen.index(3) + 1 :], reverse=True)], seen
    began = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=120)
    assert answer.status_code == 200
    assert time.monotonic() - began < 60
    assert replicas(mark) == 1
