"""Sizes of a run of the suite, and the shapes tested at each size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

Size: TypeAlias = Literal["small", "quick", "full"]
"""``small`` for emulated devices, ``quick`` for every run, ``full`` for a release."""

COST: dict[str, float] = {"small": 2e5, "quick": 3e7, "full": 2e9}
"""Multiplications, or elements touched, a case may take."""

RANDOM = {"small": 3, "quick": 10, "full": 60}
"""Cases drawn besides the fixed ones."""

Case = TypeVar("Case", bound=NamedTuple)
Test = TypeVar("Test", bound=Callable[..., None])


def size(default: Size) -> Size:
    """The size named by ``BITNET_CONFORMANCE``, else ``default``."""
    name = os.environ.get("BITNET_CONFORMANCE", default)
    for known in ("small", "quick", "full"):
        if name == known:
            return known
    raise ValueError(f"BITNET_CONFORMANCE is {name!r}; it must be small, quick or full.")


def over(make: Callable[[Size], Sequence[Any]]) -> Callable[[Test], Test]:
    """Run a test for each ``case`` that ``make`` returns for the size."""

    def mark(test: Test) -> Test:
        test.conformance_cases = make  # type: ignore[attr-defined]
        return test

    return mark


def needs(*features: str) -> Callable[[Test], Test]:
    """Run a test only on devices whose probe lists these features; on others it is skipped, with the reason."""

    def mark(test: Test) -> Test:
        test.conformance_needs = features  # type: ignore[attr-defined]
        return test

    return mark


def pick(
    size: Size, fixed: Sequence[Case], draw: Callable[[np.random.Generator], Case], cost: Callable[[Case], float]
) -> list[Case]:
    """The fixed cases that are cheap enough for the size, plus random ones, which are the same in every run."""
    cases = dict.fromkeys(case for case in fixed if cost(case) <= COST[size])
    rng = np.random.default_rng(len(fixed))
    wanted = len(cases) + RANDOM[size]
    for _ in range(100 * wanted):
        case = draw(rng)
        if len(cases) < wanted and cost(case) <= COST[size]:
            cases[case] = None
    return list(cases)


def log_uniform(rng: np.random.Generator, least: int, most: int, multiple: int = 1) -> int:
    """A multiple of ``multiple`` between two bounds, small ones as likely as large ones."""
    return max(least, round(math.exp(rng.uniform(math.log(least), math.log(most))) / multiple) * multiple)


def case_id(case: Any) -> str:
    """``m3-n7-k128`` of a named tuple, the texts of its elements for another, or the text of anything else."""
    if hasattr(case, "_asdict"):
        return "-".join(f"{name}{value}" for name, value in case._asdict().items())
    return "_".join(str(c) for c in case) if isinstance(case, tuple) else str(case)
