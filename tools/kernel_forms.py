"""Which kernels a program runs, and in which forms; and few programs that together run all.

A plugin of pytest: ``-p kernel_forms`` writes a line of JSON for each test to the file that ``KERNEL_FORMS`` names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bitnet.core.gpu import GpuDevice, KernelSpec, Launch

FILE = "KERNEL_FORMS"
DISTINCT = {"GROUP", "DIM"}
"""Constants each of whose values is a form of its own: columns of a scale, elements of a head."""


class Ran(NamedTuple):
    """What a program ran: each kernel's forms, and in how many seconds."""

    program: str
    seconds: float
    forms: list[str]


def form(spec: KernelSpec) -> str:
    """A kernel, with the constants that choose between its parts; sizes are only none, one, two, three or more."""
    chosen = (f"{n}={v if n in DISTINCT or not isinstance(v, int) else min(v, 4)}" for n, v in sorted(spec.defines))
    return " ".join((spec.entry, *chosen))


class Seen:
    """The forms of all kernels that GPUs have recorded since the last :meth:`take`, from :meth:`install` on."""

    def __init__(self) -> None:
        self.forms: set[str] = set()

    def install(self) -> None:
        make: Callable[..., None] = GpuDevice.__init__

        def opened(device: GpuDevice, info: Any, driver: Any, lowering: Any) -> None:
            record = driver.record

            def recording(launches: Sequence[Launch]) -> object:
                self.forms.update(form(launch.kernel) for launch in launches)
                return record(launches)

            driver.record = recording
            make(device, info, driver, lowering)

        GpuDevice.__init__ = opened  # type: ignore[method-assign,assignment]

    def take(self, program: str, began: float) -> None:
        """Add a program that began at a monotonic time to the file."""
        line = json.dumps(Ran(program, time.monotonic() - began, sorted(self.forms)))
        self.forms.clear()
        with Path(os.environ[FILE]).open("a") as file:  # a line at a time: several processes write
            file.write(f"{line}\n")


SEEN = Seen()


def pytest_configure() -> None:
    SEEN.install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = time.monotonic()
    result = yield
    SEEN.take(item.nodeid, began)
    return result


def cover(programs: Iterable[Ran]) -> list[str]:
    """Programs that together run every form, each next one that which adds most forms in its time."""
    left, chosen = list(programs), []
    wanted = {form for ran in left for form in ran.forms}
    while wanted:
        best = max(left, key=lambda ran: len(wanted.intersection(ran.forms)) / (ran.seconds + 1))
        wanted.difference_update(best.forms)
        chosen.append(best.program)
        left.remove(best)
    return chosen


def alone(programs: Iterable[Ran]) -> dict[str, str]:
    """For each kernel the program that runs it with the fewest others, and then in the least time; the kernels with the
    largest programs come first."""
    found: dict[str, Ran] = {}
    for ran in sorted(programs, key=lambda ran: (len(ran.forms), ran.seconds)):
        for form in ran.forms:
            found.setdefault(form.split()[0], ran)
    return {kernel: ran.program for kernel, ran in reversed(found.items())}
