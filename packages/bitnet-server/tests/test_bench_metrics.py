"""The numbers of ``bitnet bench-serve``, against numpy on random timings; its arrivals and lengths, by their laws."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.server.bench.metrics import Answered, summary
from bitnet.server.bench.prompts import Prompt, Random, arrivals, read_prompts


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def interpolated(values: Any, percent: float) -> float:
    """A percentile between its two neighbours in order, by hand."""
    ordered = sorted(map(float, values))
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def test_numbers_are_those_of_the_timings(rng: np.random.Generator) -> None:
    """Each latency is drawn first, and the clock's times are made of them."""
    count = int(rng.integers(20, 60))
    ttft, gaps, answers = rng.uniform(0.01, 2, count), [], []
    outputs = rng.integers(1, 40, count)
    outputs[0] = 1  # which has no TPOT
    prompts = rng.integers(1, 500, count)
    for i in range(count):
        events = 1 if outputs[i] == 1 else int(rng.integers(2, outputs[i] + 1))  # some hold several tokens
        gaps.append(rng.uniform(0.001, 0.2, events - 1))
        sent = rng.uniform(0, 1000)
        times = sent + ttft[i] + np.concatenate(([0.0], np.cumsum(gaps[-1])))
        answers.append(Answered(sent, times.tolist(), int(prompts[i]), int(outputs[i])))
    spans = np.array([g.sum() for g in gaps])
    several = outputs > 1
    tpot = spans[several] / (outputs[several] - 1)
    expected = {"ttft": ttft, "tpot": tpot, "itl": np.concatenate(gaps), "e2el": ttft + spans}
    found = summary(answers, 3, 7.5, {})
    for name, seconds in expected.items():
        for label, value in {
            "mean": np.mean(seconds),
            "median": interpolated(seconds, 50),
            "std": math.sqrt(np.mean((seconds - np.mean(seconds)) ** 2)),
            **{f"p{p}": interpolated(seconds, p) for p in (50, 90, 99)},
        }.items():
            assert found[f"{label}_{name}_ms"] == pytest.approx(float(value) * 1e3, rel=1e-6), (label, name)
    assert (found["completed"], found["failed"], found["duration"]) == (count, 3, 7.5)
    assert found["request_throughput"] == pytest.approx(count / 7.5)
    assert found["output_throughput"] == pytest.approx(outputs.sum() / 7.5)
    assert found["total_token_throughput"] == pytest.approx((outputs.sum() + prompts.sum()) / 7.5)
    assert "request_goodput" not in found


def test_goodput_counts_what_meets_every_objective(rng: np.random.Generator) -> None:
    answers = []
    good = 0
    for _ in range(200):
        ttft, tpot, outputs = rng.uniform(0.1, 0.9), rng.uniform(0.01, 0.09), int(rng.integers(1, 20))
        answers.append(Answered(5.0, [5.0 + ttft, 5.0 + ttft + tpot * (outputs - 1)][: min(2, outputs)], 1, outputs))
        good += ttft <= 0.5 and (tpot <= 0.05 or outputs == 1)  # one token: its TPOT is 0
    found = summary(answers, 0, 10.0, {"ttft": 500.0, "tpot": 50.0})
    assert 0 < good < 200
    assert found["request_goodput"] == pytest.approx(good / 10)


def test_nothing_answered_has_no_latency() -> None:
    found = summary([], 4, 1.0, {"ttft": 1.0})
    assert (found["completed"], found["failed"], found["output_throughput"], found["request_goodput"]) == (0, 4, 0, 0)
    assert found["mean_ttft_ms"] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_that_were_asked_for(rng: np.random.Generator, burstiness: float) -> None:
    times = np.array(arrivals(20_000, 50.0, burstiness, rng))
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(20_000 / 50)
    # A gamma distribution's deviation is mean / sqrt(shape); six deviations of that estimate are allowed.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=6 * (0.5 + 1.5 / burstiness) ** 0.5 / 141)
    assert arrivals(5, math.inf, burstiness, rng) == [0.0] * 5


def test_random_prompts_have_their_lengths_and_prefix(rng: np.random.Generator) -> None:
    drawn = Random(input=40, output=10, spread=0.5, prefix=7).draw(500, 300, rng)
    prefix = drawn[0][0][:7]
    assert all(ids[:7] == prefix for ids, _ in drawn)
    assert {len(ids) - 7 for ids, _ in drawn} == set(range(20, 61))
    assert {out for _, out in drawn} == set(range(5, 16))
    tokens = {token for ids, _ in drawn for token in ids[7:]}
    assert tokens == set(range(300))
    assert len({tuple(ids) for ids, _ in drawn}) == 500


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "How many?"}\n\n{"prompt": "Why?", "output_tokens": 3, "more": 1}\n')
    assert read_prompts(path, 9) == [Prompt("How many?", 9), Prompt("Why?", 3)]


BAD: list[tuple[str, str]] = [
    ("Why?", "line 1 of"),
    ('{"prompt": "a"}\n{"text": "b"}', "line 2 of"),
    ('{"prompt": ""}', "line 1 of"),
    ('{"prompt": ["a"]}', "line 1 of"),
    ('{"prompt": "a", "output_tokens": 0}', "line 1 of"),
    ('["prompt"]', "line 1 of"),
    ("\n", "contains no prompts"),
]


@pytest.mark.parametrize(("text", "why"), BAD)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=why):
        read_prompts(path, 9)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_prompts(tmp_path / "missing", 9)
