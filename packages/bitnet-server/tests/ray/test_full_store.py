"""Clusters whose object stores are full, and whose disks have no room, either."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bitnet.core import Model

if TYPE_CHECKING:
    from .conftest import Node, Served

pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("ray", "pyarrow", "pandas")), reason="Ray Data is not installed"
    ),
    pytest.mark.nightly(
        unless_changed=(
            "packages/bitnet-server/src/bitnet/server/ray",
            "packages/bitnet-server/src/bitnet/server/data.py",
        )
    ),
]
NO_DISK = json.dumps({"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0001})
"""What makes Ray take the disk for full: it then moves no objects there."""
FILLER = """
import os, sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
held = []
print("ready", flush=True)
sys.stdin.readline()
while True:
    for size in (8 << 20, 1 << 20, 110_000):
        try:
            while True:
                held.append(ray.put(os.urandom(size)))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            pass
    print("full", flush=True)
    time.sleep(0.02)
"""
ROWS = 1000


class Cluster:
    """A cluster of one node, without room on its disk, and commands that use it."""

    def __init__(self, node: Node, environment: Mapping[str, str]) -> None:
        self.node, self.environment = node, environment

    @contextmanager
    def filler(self) -> Iterator[Callable[[], None]]:
        """A context with a function that fills the object store at once, which then stays full until the end."""
        program = subprocess.Popen(
            [sys.executable, "-c", FILLER, self.node.address],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stdin, stdout = program.stdin, program.stdout
        assert stdin is not None
        assert stdout is not None

        def fill() -> None:
            stdin.write("\n")
            stdin.flush()
            assert any("full" in line for line in stdout)

        try:
            assert any("ready" in line for line in stdout)
            yield fill
        finally:
            program.kill()
            program.wait()

    @contextmanager
    def filled(self) -> Iterator[None]:
        """In this context, the object store is full."""
        with self.filler() as fill:
            fill()
            yield

    def command(self, name: str, *options: str) -> list[str]:
        common = ["--ray", "--address", self.node.address, "--device", "cpu", "-t", "1"]
        return [sys.executable, "-m", "bitnet.core", name, *common, *options]

    def refused(self, name: str, *options: str) -> str:
        """The error of a command that must end with one line and status 1."""
        done = subprocess.run(
            self.command(name, *options),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return self.error(done.returncode, done.stderr)

    def error(self, status: int, written: str) -> str:
        assert status == 1, written
        assert "Traceback" not in written
        assert "is a bug" not in written
        (line,) = [line for line in written.splitlines() if "error:" in line]
        return line


@pytest.fixture(scope="module")
def cluster(head: Callable[..., AbstractContextManager[Node]], environment: Mapping[str, str]) -> Iterator[Cluster]:
    with head(4, "--system-config", NO_DISK) as node:
        yield Cluster(node, environment)


def test_a_server_is_not_deployed(cluster: Cluster) -> None:
    with cluster.filled():
        error = cluster.refused("serve", "--port", "8000")
    assert re.search(r"node \S+ cannot take part: an object store of the cluster is full", error), error
    assert cluster.node.pids("Serve") == []


def test_a_batch_is_not_begun(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.filled():
        error = cluster.refused("batch", "-i", rows(tmp_path), "-o", str(tmp_path / "out.jsonl"))
    assert re.search(r"node \S+ cannot take part: an object store of the cluster is full", error), error
    assert not (tmp_path / "out.jsonl").exists()


def test_a_server_goes_on(
    cluster: Cluster, served: Callable[..., AbstractContextManager[Served]], demo_model: Model
) -> None:
    """But for requests so large that Ray stores them, whose error is clear. Answers may be of any length."""
    question: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    want = demo_model.generate(question["prompt"], max_tokens=12, temperature=0).text
    with served(cluster.environment, "--address", cluster.node.address) as server, cluster.filled():
        large = server.client.post("/v1/completions", json={**question, "user": "x" * 1_000_000})
        assert (large.status_code, large.json()["error"]["code"]) == (503, "object_store_full")
        assert int(large.headers["retry-after"]) >= 1
        answer = server.client.post("/v1/completions", json=question)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == want
        long = {**question, "max_tokens": 150, "n": 8, "logprobs": 5, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json=long)
        assert answer.status_code == 200, answer.text
        assert len(answer.content) > 200_000
        assert [len(one["logprobs"]["tokens"]) for one in answer.json()["choices"]] == [150] * 8
        longest = {"prompt": "word " * 900, "max_tokens": 1, "n": 24, "logprobs": 20, "echo": True}
        answer = server.client.post("/v1/completions", json=longest, timeout=500)
        assert answer.status_code == 200, answer.text
        assert len(answer.content) > 11_000_000
        assert len(answer.json()["choices"]) == 24


def test_a_batch_keeps_the_answers_it_has(cluster: Cluster, tmp_path: Path) -> None:
    """It ends with one line once an answer cannot be stored, and goes on when there is room again."""
    out = tmp_path / "out.jsonl"
    arguments = ["-i", rows(tmp_path), "-o", str(out)]
    with (
        cluster.filler() as fill,
        subprocess.Popen(
            cluster.command("batch", *arguments),
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        while not (out.exists() and out.read_bytes().count(b"\n")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.02)
        fill()
        try:
            _, written = process.communicate(timeout=300)
        finally:
            process.kill()
    error = cluster.error(process.returncode, written)
    assert "the replicas failed: an object store of the cluster is full" in error
    before = out.read_bytes().count(b"\n")
    assert 0 < before < ROWS
    done = subprocess.run(
        [*cluster.command("batch", *arguments), "--resume"],
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert sorted(found, key=int) == [str(n) for n in range(ROWS)]


def rows(folder: Path) -> str:
    """A file of requests whose answers are too long to be sent without the object store, 32 of them together."""
    body = {"max_tokens": 20, "logprobs": 5, "ignore_eos": True}
    found = [
        {"custom_id": str(n), "url": "/v1/completions", "body": {"prompt": f"Row {n}", **body}} for n in range(ROWS)
    ]
    file = folder / "in.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in found))
    return str(file)
