"""``tools/bench_peers.py`` with a stand-in for llama-bench, which prints the fields that llama-bench documents."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bench_peers
from bitnet.core.errors import BitNetError
from make_random_model import make_model
from random_shapes import PRESETS

STAND_IN = """#!{python}
import json, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with pathlib.Path(__file__).with_suffix(".log").open("a") as log:
    print(json.dumps(given), file=log)
row = dict(build_commit="0", model_type="x", n_threads=int(given["-t"]), n_depth=0, stddev_ts=0.0)
row |= dict(n_prompt=int(given["-p"]), n_gen=int(given["-n"]), avg_ns=5, samples_ns=[5])
row["avg_ts"] = 4.0 if row["n_gen"] else 50.0
row["samples_ts"] = [row["avg_ts"]]
print("load: 1 of 1", file=sys.stderr)
{then}
"""
PRINT = "print(json.dumps([row]))"

Peer = Callable[[str], Path]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("BITNET_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "model.gguf"
    make_model(path, PRESETS["small"])
    return path


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    """``peer("print(…)")``: a program that ends so."""

    def make(then: str) -> Path:
        path = tmp_path / "llama-bench"
        path.write_text(STAND_IN.format(python=sys.executable, then=then))
        path.chmod(0o755)
        return path

    return make


def arguments(peer: Path, model: Path, *more: str) -> list[str]:
    return ["--peer", str(peer), "--peer-model", str(model), "-m", str(model), "-t", "1", *more]


def test_pairs_and_their_median(
    peer: Peer, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    speed = bench_peers.Bench.speed

    def noted(bench: bench_peers.Bench, prompt: int, gen: int, threads: int) -> float:
        ran.append(f"{bench.name} {prompt} {gen}")
        return speed(bench, prompt, gen, threads)

    monkeypatch.setattr(bench_peers.Bench, "speed", noted)
    program = peer(PRINT)
    assert bench_peers.main(arguments(program, model, "-p", "8", "-n", "4", "--rounds", "2", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert ran == [f"{name} {test}" for test in ("8 0", "0 4") for name in ("bitnet", "peer", "peer", "bitnet")]
    asked = [json.loads(line) for line in program.with_suffix(".log").read_text().splitlines()]
    assert [(a["-p"], a["-n"], a["-t"], a["-o"], a["-m"]) for a in asked] == [
        (*test, "1", "json", str(model)) for test in (("8", "0"), ("0", "4")) for _ in range(2)
    ]
    assert document["threads"] == 1
    for result, test, theirs in zip(document["results"], ("pp8", "tg4"), (50.0, 4.0), strict=True):
        assert result["test"] == test
        assert len(result["pairs"]) == 2
        for pair in result["pairs"]:
            assert pair["peer"] == theirs
            assert pair["bitnet"] > 0
            assert pair["ratio"] == pytest.approx(pair["bitnet"] / theirs)
        assert result["median_ratio"] == statistics.median(pair["ratio"] for pair in result["pairs"])


def test_text(peer: Peer, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_peers.main(arguments(peer(PRINT), model, "-p", "0", "-n", "4", "--rounds", "1")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["test", "bitnet", "peer", "ratio"]
    name, ours, theirs, ratio = lines[2]
    assert (name, float(theirs)) == ("tg4", 4.0)
    assert float(ratio) == pytest.approx(float(ours) / 4.0, abs=0.01)
    assert lines[3:] == [["tg4", "median", ratio]]


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("sys.exit('error: unknown model architecture')", "status 1: error: unknown model architecture"),
        ("sys.exit(3)", "status 3: load: 1 of 1"),
        ("pass", "printed no result that can be read"),
        ("print('| model | size |')", "| model | size |"),
        ("print(json.dumps({'error': 'none'}))", "printed no result that can be read"),
        ("print(json.dumps([]))", "0 tests of 8 prompt and 0 generated tokens"),
        ("del row['avg_ts']; print(json.dumps([row]))", "avg_ts"),
        ("row['n_prompt'] = 512; print(json.dumps([row]))", "0 tests of 8 prompt"),
        ("row['avg_ts'] = 0; print(json.dumps([row]))", "printed 0.0 tokens/s"),
        ("row['avg_ts'] = float('nan'); print(json.dumps([row]))", "printed nan tokens/s"),
        ("row['n_threads'] = 64; print(json.dumps([row]))", "ran with 64 threads, not 1"),
    ],
)
def test_a_peer_that_does_something_else(peer: Peer, then: str, message: str) -> None:
    with pytest.raises(BitNetError, match=r"^peer ") as error:
        bench_peers.Bench("peer", (str(peer(then)),)).speed(8, 0, threads=1)
    assert message in str(error.value)


def test_what_is_missing(peer: Peer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = peer(PRINT)
    for more, status, message in (
        (("--peer", str(tmp_path / "nothing")), 2, f"--peer {tmp_path / 'nothing'} is no file"),
        (("--peer-model", "nothing.gguf"), 2, "--peer-model nothing.gguf is no file"),
        (("-m", "nothing.gguf"), 2, "--model nothing.gguf is no file"),
        (("-p", "0", "-n", "0"), 2, "nothing to measure"),
        (("-t", "0"), 2, "-t is 0; it must be at least 1"),
        (("--rounds", "0"), 2, "--rounds is 0"),
        (("-m", str(program), "-p", "8"), 1, "bitnet ended with status 4: bitnet: error: "),
    ):
        assert bench_peers.main([*arguments(program, model), *more]) == status
        assert message in capsys.readouterr().err
    program.chmod(0o644)
    assert bench_peers.main(arguments(program, model, "-p", "8", "--rounds", "1")) == 1
    assert f"{program} cannot be run: Permission denied." in capsys.readouterr().err
