"""Ray Data: what an actor makes of a block of rows, and ``bitnet batch --ray`` where processes are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bitnet.core import Model, load_model
from bitnet.server.batch.rows import PATHS
from bitnet.server.commands.batch import batch

if TYPE_CHECKING:
    from .conftest import Node

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("ray", "pyarrow", "pandas")), reason="Ray Data is not installed"
)
SLOW = pytest.mark.nightly(
    unless_changed=(
        "packages/bitnet-server/src/bitnet/server/data.py",
        "packages/bitnet-server/src/bitnet/server/http/offline.py",
    )
)


class Loads:
    """Settings that load the demo model in this process, without a cluster."""

    def load(self) -> Model:
        return load_model(device="cpu", max_seqs=4, threads=1)


@pytest.fixture(scope="module")
def generator() -> Any:
    from bitnet.server.data import Generator

    return Generator(Loads(), {"max_tokens": 8, "temperature": 0.0})  # type: ignore[arg-type]


def test_each_row_gets_what_the_model_answers(generator: Any, demo_model: Model) -> None:
    """Whatever the other rows are; what is wrong with one is its value."""
    import pyarrow as pa

    question = [{"role": "user", "content": "What is 17 + 25?"}]
    rows: list[dict[str, Any]] = [
        {"id": "text", "prompt": "Once upon a time"},
        {"id": "chat", "messages": question},
        {"id": "more", "prompt": "Once", "options": {"max_tokens": 3, "logprobs": 1}},
        {"id": "option", "prompt": "Once", "options": {"max_tokens": -1}},
        {"id": "neither"},
        {"id": "long", "prompt": "word " * 9000},
    ]
    random.shuffle(rows)
    table = pa.Table.from_pylist([{"prompt": None, "messages": None, "options": None, **row} for row in rows])
    found = {row["id"]: row for row in generator(table).to_pylist()}
    assert [row["id"] for row in generator(table).to_pylist()] == [row["id"] for row in rows]
    want = demo_model.generate("Once upon a time", max_tokens=8)
    assert (found["text"]["text"], found["text"]["tokens"]) == (want.text, list(want.tokens))
    assert found["text"]["finish_reason"] == want.finish_reason
    assert found["chat"]["text"] == demo_model.chat(question, max_tokens=8).text
    assert found["text"]["logprobs"] is None
    more = demo_model.generate("Once", max_tokens=3, logprobs=1)
    assert more.logprobs is not None
    assert found["more"]["logprobs"] == pytest.approx([one.logprob for one in more.logprobs], abs=1e-5)
    usage = found["more"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(more.prompt_tokens), 3)
    assert {id for id, row in found.items() if row["error"] is not None} == {"option", "neither", "long"}
    assert "max_tokens" in found["option"]["error"]
    assert "neither a prompt" in found["neither"]["error"]
    assert found["neither"]["text"] is found["neither"]["usage"] is None


def test_an_option_that_does_not_exist_is_the_rows_error(generator: Any) -> None:
    import pyarrow as pa

    (row,) = generator(pa.Table.from_pylist([{"prompt": "a", "options": {"colour": 1}}])).to_pylist()
    assert "options got an unexpected keyword argument 'colour'" in row["error"]


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(row("1")))
    arguments = ["-i", str(file), "-o", str(tmp_path / "out.jsonl")]
    for more, why in (
        (["--replicas", "2"], "--replicas needs --ray"),
        (["--ray", "--replicas", "auto"], "name a number"),
        (["--ray", "--address", "nowhere"], "auto, or HOST:PORT"),
    ):
        done = CliRunner().invoke(batch, [*arguments, *more])
        assert why in f"{done.output}{done.exception}"
        assert not (tmp_path / "out.jsonl").exists()


def row(id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": id,
        "url": PATHS[1],
        "body": {"prompt": f"Row {id}", "max_tokens": 4, "temperature": 0, **body},
    }


class Cluster:
    """A cluster of this machine, and runs of ``bitnet batch`` on it."""

    def __init__(self, folder: Path, node: Node, environment: Mapping[str, str]) -> None:
        self.folder, self.node, self.environment = folder, node, environment

    def start(self, *options: str) -> subprocess.Popen[str]:
        arguments = ["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--device", "cpu", "-t", "1", "-c", "256", *options]
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bitnet.core",
                *arguments,
                "--ray",
                "--address",
                self.node.address,
                "--replicas",
                "2",
            ],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def answered(self) -> int:
        file = self.folder / "out.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def until(self, count: int, process: subprocess.Popen[str]) -> None:
        ends = time.monotonic() + 300
        while self.answered() < count:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < ends
            time.sleep(0.05)


@pytest.fixture
def cluster(
    tmp_path: Path, head: Callable[..., AbstractContextManager[Node]], environment: Mapping[str, str]
) -> Iterator[Cluster]:
    """A cluster with room for two replicas."""
    with head(2) as node:
        yield Cluster(tmp_path, node, environment)


def _each_row_once(cluster: Cluster, count: int) -> None:
    """Rows get their answers, with an actor killed in the middle, and then the driver, whose run is resumed."""
    rows = [row(str(n)) for n in range(count - 1)] + [row("wrong", top_p=7)]
    (cluster.folder / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    process = cluster.start()
    cluster.until(count // 5, process)
    (first, _) = cluster.node.pids(".*Answerer")
    os.kill(first, signal.SIGKILL)
    cluster.until(count // 2, process)
    process.kill()
    process.wait()
    before = cluster.answered()
    assert before < count
    process = cluster.start("--resume")
    _, stderr = process.communicate(timeout=570)
    assert process.returncode == 0, stderr
    assert f"{before} of {count} rows have their answers" in stderr
    found = [json.loads(line) for line in (cluster.folder / "out.jsonl").read_text().splitlines()]
    assert Counter(one["custom_id"] for one in found) == Counter(one["custom_id"] for one in rows)
    status = {one["custom_id"]: one["response"]["status_code"] for one in found}
    assert {id for id, code in status.items() if code != 200} == {"wrong"}
    texts = {one["custom_id"]: one["response"]["body"] for one in found}
    with load_model(device="cpu", threads=1, context=256) as model:
        for one in random.sample(rows[:-1], 20):
            want = model.generate(one["body"]["prompt"], max_tokens=4)
            assert texts[one["custom_id"]]["choices"][0]["text"] == want.text


@SLOW
def test_each_row_once_whatever_is_killed(cluster: Cluster) -> None:
    _each_row_once(cluster, 600)


@pytest.mark.nightly
def test_ten_thousand_rows_once_whatever_is_killed(cluster: Cluster) -> None:
    _each_row_once(cluster, 10_000)
