"""``bitnet serve --ray --replicas auto``: from one replica to three, back, to none, and awake again."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from .conftest import Node, Served

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly,
]
SCALING = r"scaling Deployment\(name='engine', app='bitnet'\) from \d+ to (\d+) replicas"
QUICK = """
from bitnet.core.cli import main
from bitnet.server.ray import application
application.UPSCALE_SECONDS, application.DOWNSCALE_SECONDS, application.IDLE_SECONDS = 2, 8, 8
main()
"""


def test_replicas_follow_the_load(
    head: Callable[..., AbstractContextManager[Node]],
    served: Callable[..., AbstractContextManager[Served]],
    environment: Mapping[str, str],
) -> None:
    options = ["--replicas", "auto", "--min-replicas", "0", "-c", "512", "-np", "4", "--max-queue", "60"]
    with (
        head(3, RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1") as node,
        served(environment, "--address", node.address, *options, program=QUICK) as server,
    ):
        assert "as many replicas as needed" in "".join(server.said)
        _follow(server, lambda: len(node.pids("ServeReplica:bitnet:engine")))


def _follow(server: Served, replicas: Callable[[], int]) -> None:
    assert replicas() == 1
    before = len(server.log("controller"))
    statuses: list[int] = []
    ends = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            while not ends.is_set():
                body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
                statuses.append(client.post("/v1/completions", json=body).status_code)

    def until(count: int, seconds: float) -> None:
        late = time.monotonic() + seconds
        while replicas() != count:
            assert time.monotonic() < late, (count, replicas())
            time.sleep(0.2)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    until(3, 120)
    time.sleep(10)
    assert replicas() == 3
    ends.set()
    for thread in threads:
        thread.join()
    until(0, 120)
    assert set(statuses) == {200}
    wanted = [int(count) for count in re.findall(SCALING, server.log("controller")[before:])]
    top = wanted.index(max(wanted))
    assert wanted == [*sorted(wanted[:top]), *sorted(wanted[top:], reverse=True)], wanted
    began = time.monotonic()
    assert server.status() == 200
    assert time.monotonic() - began < 60
    assert replicas() == 1
