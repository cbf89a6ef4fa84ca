"""``bitnet bench`` measures what it claims to measure; this machine's speed does not matter."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bitnet.core import Model, load_model
from bitnet.core.cli.bench_plot import draw
from bitnet.core.cpu.device import CpuExecutable
from bitnet.core.devices.select import select_device
from bitnet.core.errors import ContextFullError
from bitnet.core.evaluation.bench import Limits, Measurement, Workload, device_limits, measure
from bitnet.core.hal import ExecutableStats

Bitnet = Callable[..., Any]


def test_the_command(bitnet: Bitnet, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = itertools.cycle([Limits(2, 1e9, 1e12), Limits(2, 2e9, 4e12), Limits(2, 3e9, 1e12)])
    monkeypatch.setattr("bitnet.core.evaluation.bench.device_limits", lambda device: next(limits))
    options = ("-p", "8,16", "-n", "4", "-d", "0,32", "-np", "1,2", "-r", "2", "-b", "8", "--device", "cpu")
    document = json.loads(bitnet("bench", "-m", model, *options, "--json").out)
    results = document["results"]
    names = ["pp8", "pp16", "pp8 @ d32", "pp16 @ d32", "tg4", "tg4 x2", "tg4 @ d32", "tg4 x2 @ d32"]
    assert [r["test"] for r in results] == names
    for r in results:
        assert len(r["samples"]) == 2
        assert min(r["samples"]) > 0
        assert r["tokens_per_second"] == pytest.approx(sum(r["samples"]) / 2)
        assert r["threads"] == 2
        prefill = r["kind"] == "prefill"
        assert r["bound"] == ("int8" if prefill else "read")
        around = {1.5e9: r["samples"][0], 2.5e9: r["samples"][1]}  # what was found before and after each
        speed = around[r["read_bandwidth"]]
        assert r["int8_peak"] == 2.5e12
        of = r["int8_products_per_second"] / 2.5e12 if prefill else r["read_bytes_per_second"] / r["read_bandwidth"]
        assert r["fraction"] == pytest.approx(of)
        if not prefill:
            assert r["read_bytes_per_second"] == pytest.approx(r["bytes_per_step"] * speed / r["parallel"])
            assert all(
                r["fraction"] <= r["bytes_per_step"] * s / r["parallel"] / b * 1.000001 for b, s in around.items()
            )
    text = bitnet("bench", "-m", model, *options).out
    assert all(name in text for name in names)


def test_bytes_and_products_are_counted_from_the_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the rows of the head that are read in full beside its compact form: they differ from token to token.
    monkeypatch.setattr(CpuExecutable, "stats", lambda executable: ExecutableStats(executable._lowered.weight_bytes))
    with load_model(model, device="cpu") as loaded:
        one, deep, two = (
            measure(loaded, Workload("decode", 8, depth=depth, parallel=parallel), repeats=1).bytes_per_step
            for depth, parallel in ((0, 1), (40, 1), (40, 2))
        )
        prefill = measure(loaded, Workload("prefill", 8), repeats=1)
        c = loaded.config
    assert one is not None
    assert deep is not None
    assert two is not None
    shapes = [(128, 128), (64, 128), (64, 128), (128, 128), (256, 128), (256, 128), (128, 256)]
    assert (c.layers, c.hidden_size, c.ffn_size, c.vocab_size) == (2, 128, 256, 512)
    weights = 2 * sum(n * k for n, k in shapes)
    assert prefill.products_per_token == weights
    assert prefill.bytes_per_step is None
    position = 2 * 2 * 64 * 2  # k and v, layers, KV width, f16
    assert deep - one == 40 * position
    assert two - deep == 44 * position
    # A device packs as it likes: ternary weights in 1.6 to 2 bits, the head in 4 to 16; and pads.
    head, norms = 512 * 128, 4 * (2 * (128 + 128 + 128 + 256) + 128)
    assert weights / 5 + head / 2 + norms <= one - 4 * position <= 1.1 * (weights / 4 + head * 2 + norms)


def test_rows_of_the_head_that_are_read_in_full_count(model: Path, require_device: Any) -> None:
    with load_model(model, device="cpu") as loaded:
        absent = "the numpy device has no compact head" if loaded.device.index == "numpy" else None
        require_device("cpu:scalar", absent)
        loaded.generate([1, 2], max_tokens=4, ignore_eos=True, logprobs=1)  # somebody reads all logits
        whole = loaded.stats().weight_bytes
        loaded.generate([1, 2], max_tokens=4, ignore_eos=True)
        compact = loaded.stats().weight_bytes
        lowered = loaded._replicas[0].executable._lowered  # type: ignore[attr-defined]
        least, head = lowered.weight_bytes, lowered.head_bytes
    assert whole == least - head + 2 * 512 * 128
    assert least + 2 * 128 <= compact < whole


def test_speed_is_tokens_over_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose steps all take 20 ms longer cannot be measured as any faster than that."""
    collect = CpuExecutable.collect

    def slow(executable: CpuExecutable) -> Any:
        time.sleep(0.02)
        return collect(executable)

    monkeypatch.setattr(CpuExecutable, "collect", slow)
    monkeypatch.setattr("bitnet.core.engine.pacing.MAX_BURST", 1)
    with load_model(model, device="cpu:scalar", step_tokens=16, prompt_lookup=False) as loaded:
        for test, most in (
            (Workload("decode", 4), 1 / 0.02),
            (Workload("decode", 4, parallel=3), 3 / 0.02),
            (Workload("prefill", 32), 16 / 0.02),
        ):
            speed = measure(loaded, test, repeats=1).mean
            assert most / 5 < speed < most, test


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_context_that_is_too_short_for_a_workload(model: Path, parallel: int) -> None:
    """Fewer tokens than a measurement's name says are not measured instead."""
    test = Workload("decode", 40, depth=8, parallel=parallel)
    for context in (24, test.context - 1):
        with (
            load_model(model, device="cpu", context=context, prompt_lookup=False) as loaded,
            pytest.raises(ContextFullError, match=f"needs a context of {test.context}.*holds {context}"),
        ):
            measure(loaded, test, repeats=1)
    with load_model(model, device="cpu", context=test.context, prompt_lookup=False) as loaded:
        assert measure(loaded, test, repeats=1).mean > 0


def test_sequences_that_never_decode_together(bitnet: Bitnet, model: Path) -> None:
    """Eight prompts of 32 tokens, at most 8 of them in a step: the first sequence has ended by the end of the last."""
    ran = bitnet("bench", "-m", model, "-p", "0", "-n", "1", "-d", "32", "-np", "8", "-b", "8", "--device", "cpu")
    assert ran.status == 2
    assert "tg1 x8 @ d32 cannot be measured" in ran.err


def test_drafts_do_not_count_as_speed(bitnet: Bitnet, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting: list[object] = []

    def looked(loaded: Model, *args: Any, **kwargs: Any) -> Measurement:
        receipt = loaded.receipt(loaded.generate([1], max_tokens=1))
        drafting.append(receipt["setup"]["prompt_lookup"])
        return measure(loaded, *args, **kwargs)

    monkeypatch.setattr("bitnet.core.evaluation.bench.measure", looked)
    assert bitnet("bench", "-m", model, "-p", "0", "-n", "4", "-r", "1", "--device", "cpu").status == 0
    assert drafting == [False]


def test_decode_counts_only_what_runs_together() -> None:
    limits = Limits(threads=1, read=100.0, int8=1000.0)
    result = Measurement(Workload("decode", 8, parallel=4), (14.0, 10.0, 12.0), 20, 7, (limits,) * 3)
    assert (result.mean, result.deviation) == (12, 2)
    assert result.read == 20 * 12 / 4
    assert result.fraction == 0.6
    assert Measurement(Workload("prefill", 8), (10.0,), None, 7, (limits,)).fraction == 0.07
    unlimited = Measurement(Workload("prefill", 8), (3.0, 9.0, 10.0, 11.0), None, 7)
    assert (unlimited.fraction, unlimited.limits, unlimited.typical) == (None, None, 9.0)
    # Many sequences share what is read, and then arithmetic is the limit.
    many = Measurement(Workload("decode", 8, parallel=64), (100.0,), 20, 7, (limits,))
    assert (many.bound, many.fraction) == ("int8", 0.7)


def test_the_repetition_in_the_middle_is_held_against_its_own_limits() -> None:
    """A machine whose memory is now slow, now fast: speeds of one moment say nothing beside limits of another."""
    slow, fast = Limits(1, 50.0, 1000.0), Limits(1, 100.0, 500.0)
    result = Measurement(Workload("decode", 8), (4.5, 2.0, 1.0, 4.0, 4.4), 20, 7, (fast, slow, slow, fast, fast))
    assert (result.typical, result.limits, result.fraction) == (4.0, fast, 0.8)
    result = Measurement(Workload("prefill", 8), (9.0, 8.0, 7.0), None, 7, (slow, fast, slow))
    assert (result.typical, result.limits, result.fraction) == (9.0, slow, 0.063)


def test_probes_of_the_cpu(require_device: Any) -> None:
    device = select_device("cpu").open()
    try:
        limits = device_limits(device)
    finally:
        device.close()
    assert device_limits(select_device("cpu:numpy").open()) is None
    alone = select_device("cpu").info.name == "cpu:numpy"
    require_device("cpu:scalar", "there is no native library to probe" if alone else None)
    assert limits is not None
    assert limits.threads >= 1
    assert 1e8 < limits.read < 1e13
    assert 1e8 < limits.int8 < 1e15


def test_a_device_without_probes(bitnet: Bitnet, model: Path) -> None:
    options = ("-p", "8", "-n", "4", "-r", "1", "--device", "cpu:numpy")
    results = json.loads(bitnet("bench", "-m", model, *options, "--json").out)["results"]
    assert [r["tokens_per_second"] > 0 for r in results] == [True, True]
    assert {r[name] for r in results for name in ("threads", "fraction", "read_bandwidth", "int8_peak")} == {None}
    assert {r["dispatches_per_step"] for r in results} == {None}  # numpy launches nothing


def test_what_a_gpu_launches(bitnet: Bitnet, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executable counts; with --verbose the command says so."""
    monkeypatch.setattr("bitnet.core.api.Model.stats", lambda self: ExecutableStats(1000, 153))
    options = ("-p", "8", "-n", "4", "-r", "1", "--device", "cpu")
    ran = bitnet("bench", "-m", model, *options, "--json", "--verbose")
    assert {r["dispatches_per_step"] for r in json.loads(ran.out)["results"]} == {153}
    assert "tg4: 153 dispatches a step" in ran.err
    assert "dispatches" not in bitnet("bench", "-m", model, *options).err


def test_plot(bitnet: Bitnet, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is in the figure, with the numbers that were printed."""
    monkeypatch.setattr("bitnet.core.evaluation.bench.device_limits", lambda device: Limits(2, 1e12, 9e14))
    options = ("-p", "8", "-n", "4", "-np", "1,2", "-r", "2", "--device", "cpu", "--json")
    for name in ("speed.svg", "speed.PNG"):
        done = bitnet("bench", "-m", model, *options, "--plot", name)
        assert done.status == 0, done.err
        results = json.loads(done.out)["results"]
        if name == "speed.svg":
            svg = (tmp_path / name).read_text(encoding="utf-8")
            texts = re.findall("<!-- (.*) -->", svg)
            for r in results:
                limit = "int8 peak, 900 TMAC/s" if r["kind"] == "prefill" else "read bandwidth, 1 TB/s"
                numbers = f"{r['tokens_per_second']:,.1f} ± {r['deviation']:,.1f} tokens/s, {r['fraction']:.1%}"
                assert f"{numbers} of the {limit}" in texts
                assert r["test"] in texts
            assert {"Prefill", "Decode", "tokens/s"} <= set(texts)
            assert any(text.startswith("random-2x128 (") for text in texts)
    assert (tmp_path / "speed.PNG").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["speed.PNG", "speed.svg"]


def test_the_marks_of_a_plot_stand_at_the_limit() -> None:
    limits = Limits(threads=1, read=100.0, int8=1000.0)
    rows = [
        Measurement(Workload("decode", 8), (4.0,), 20, 7, (limits,)),
        Measurement(Workload("decode", 8, parallel=3), (6.0,), 25, 7, (limits,)),
        Measurement(Workload("decode", 9), (6.0,), 20, 7, (limits,)),  # 120 bytes a second: from the caches
        Measurement(Workload("decode", 10), (3.0,), None, 7, (limits,)),
    ]
    axes: Any = Figure().subplots()
    draw(axes, rows)
    assert [bar.get_width() for bar in axes.patches] == [4, 6, 6, 3]
    (marks,) = (c for c in axes.collections if c.get_label().startswith("at the read"))
    np.testing.assert_allclose([segment[:, 0] for segment in marks.get_segments()], [[5, 5], [12, 12]])
    assert axes.get_xlim()[1] > 12


def test_plot_without_matplotlib(bitnet: Bitnet, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = bitnet("bench", "-m", model, "--plot", "speed.png")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("bitnet: error: --plot needs matplotlib")
    assert 'pip install "bitnet-core[plot]"' in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_plot_that_cannot_be_written_loses_no_numbers(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    (tmp_path / "speed.png").mkdir()
    done = bitnet("bench", "-m", model, "-p", "0", "-n", "2", "-r", "1", "--json", "--plot", "speed.png")
    assert done.status == 1
    assert json.loads(done.out)["results"]
    assert "speed.png cannot be written" in done.err
