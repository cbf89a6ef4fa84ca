"""Divides a run's time among the test files that stand on something that has changed.

All of them together can take hours, and a push should know within minutes. So the run has a budget, in seconds of work,
and a file that would take more than its part runs only a share of its tests. Short files run whole; the longest ones
give way first. A file that tests what has changed directly gets ``NEAR`` times the part of one that meets it far away.

How long a test of each file takes is recorded in ``.ci/seconds.json`` by runs of ``.ci/run`` that pass.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

RECORD = ".ci/seconds.json"
UNKNOWN = 0.5
"""Seconds that a test of a file takes which no run has recorded."""
NEAR = 8
"""How many times the part of a far file a near one gets."""
FEW, FEW_SECONDS = 4, 5.0
"""A file runs at least so many tests, if they take no more than so many seconds, and at least one: what its tests
share is met by any few of them."""


def seconds(root: Path) -> dict[str, float]:
    """Mean time of a test by file, in seconds; empty where none is recorded."""
    try:
        return dict(json.loads((root / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def record(root: Path, measured: Mapping[str, float]) -> None:
    """Replace what is recorded of the files in ``measured``, and drop files that are no longer there."""
    known = {**seconds(root), **{file: round(mean, 3) for file, mean in measured.items()}}
    kept = {file: known[file] for file in sorted(known) if (root / file).is_file()}
    (root / RECORD).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")


def shares(
    tests: Mapping[str, int], means: Mapping[str, float], near: Collection[str], budget: float
) -> dict[str, float]:
    """The share of each file's tests that runs, so that all of them take about ``budget`` seconds of work.

    Args:
        tests: Number of tests of each file.
        means: Mean seconds of a test of each file; others take ``UNKNOWN``.
        near: The files that test what has changed directly.
    """
    costs = {file: count * max(means.get(file, UNKNOWN), 1e-3) for file, count in tests.items()}
    weights = {file: NEAR if file in near else 1 for file in tests}
    left, parts = budget, dict[str, float]()
    # The files that need the least of their part come first: what they leave of it goes to the others.
    waiting = sorted(tests, key=lambda file: costs[file] / weights[file])
    total = sum(weights.values())
    for file in waiting:
        parts[file] = min(costs[file], left * weights[file] / total)
        left -= parts[file]
        total -= weights[file]
    return {file: min(1.0, max(parts[file] / costs[file], least(count, costs[file]))) for file, count in tests.items()}


def least(count: int, cost: float) -> float:
    """The share of a file's tests that runs whatever the budget.

    Args:
        cost: Seconds that all of them take.
    """
    return max(min(FEW / count, FEW_SECONDS / cost), 1 / count)
