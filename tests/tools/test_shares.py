"""The time of a run is divided so that short files run whole and near ones run more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shares import FEW, FEW_SECONDS, NEAR, UNKNOWN, least, record, seconds, shares


def work(found: dict[str, float], tests: dict[str, int], means: dict[str, float]) -> float:
    return sum(found[file] * tests[file] * means[file] for file in tests)


def test_all_run_where_there_is_time() -> None:
    assert shares({"a": 10, "b": 1000}, {"a": 1.0, "b": 0.1}, set(), 200.0) == {"a": 1.0, "b": 1.0}


def test_the_longest_give_way_and_near_ones_less() -> None:
    tests = {"short": 10, "near": 1000, "far": 1000}
    found = shares(tests, dict.fromkeys(tests, 1.0), {"near"}, 190.0)
    assert found["short"] == 1.0
    assert found["near"] == pytest.approx(NEAR * found["far"])
    assert found["near"] + found["far"] == pytest.approx(0.18)


def test_the_budget_is_kept_but_for_the_few_that_each_file_runs() -> None:
    rng = random.Random()
    for _ in range(100):
        tests = {str(n): rng.randrange(1, 2000) for n in range(rng.randrange(1, 60))}
        means = {file: rng.choice((0.001, 0.01, 0.3, 5.0)) + rng.random() / 50 for file in tests}
        near = {file for file in tests if rng.random() < 0.3}
        budget = rng.choice((1.0, 100.0, 5000.0))
        found = shares(tests, means, near, budget)
        assert all(0 < share <= 1 for share in found.values())
        few = sum(least(count, count * means[file]) * count * means[file] for file, count in tests.items())
        everything = sum(tests[file] * means[file] for file in tests)
        assert min(budget, everything) * 0.99 <= work(found, tests, means) + 0.1 <= min(budget, everything) + few + 0.3


def test_a_file_runs_a_few_tests_or_one_that_takes_long() -> None:
    tests = dict.fromkeys(("quick", "slow", "slowest"), 100)
    found = shares(tests, {"quick": 0.1, "slow": 2.0, "slowest": 90.0}, set(), 0.0)
    assert found == {"quick": FEW / 100, "slow": pytest.approx(FEW_SECONDS / 200), "slowest": 0.01}
    assert shares({"one": 1}, {"one": 300.0}, set(), 0.0) == {"one": 1.0}


def test_unknown_files_cost_something() -> None:
    assert shares({"new": 1000}, {}, set(), 50.0) == {"new": pytest.approx(50 / (1000 * UNKNOWN))}


def test_what_is_recorded_stays_until_the_file_goes(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    assert seconds(tmp_path) == {}
    for name in ("a", "b", "gone"):
        (tmp_path / name).touch()
    record(tmp_path, {"a": 1.0, "gone": 3.0})
    (tmp_path / "gone").unlink()
    record(tmp_path, {"b": 2.00049})
    assert seconds(tmp_path) == {"a": 1.0, "b": 2.0}
