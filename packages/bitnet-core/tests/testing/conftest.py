"""Runs the conformance suite inside a test, on a device the test provides."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SUITE = """
from bitnet.core.hal import HAL_API, ProbeResult, ProbeStatus
from bitnet.core.reference import KERNELS, NUMPY_INFO, ReferenceDevice
from bitnet.core.testing import ConformanceSuite

class Numpy:
    name, hal_api = "cpu", HAL_API
    def probe(self):
        return ProbeResult(ProbeStatus.OK, [NUMPY_INFO])
    def open(self, info, options):
        return ReferenceDevice(info)
    def kernels(self):
        return KERNELS

class TestNumpy(ConformanceSuite):
    backend, size = Numpy(), "small"
"""


@dataclass(eq=False)  # a plugin: pytest before 9 keeps plugins in a set
class Outcome:
    """Names of the tests that ended each way, and what the failures and skips said."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    text: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            getattr(self, report.outcome).append(report.nodeid.split("::")[-1])
            self.text += f"{report.longrepr}\n" + "".join(content for _, content in report.sections)


@pytest.fixture
def suite_source() -> str:
    """A test file that runs the whole suite on the numpy device; lines appended to it are in the class."""
    return SUITE


_NUMBERS = itertools.count()
RunSuite = Callable[..., Outcome]


@pytest.fixture
def run_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSuite:
    """``run_suite(only, source=…)`` runs the tests whose names contain one of ``only`` (all: none given), ``at_most``
    until so many have failed."""
    for name in ("BITNET_CONFORMANCE", "BITNET_CONFORMANCE_SEED", "BITNET_REQUIRE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def run(*only: str, source: str = SUITE, at_most: int = 0) -> Outcome:
        # A name of its own: a module that was imported before would be run again as it was.
        path, outcome = tmp_path / f"test_{next(_NUMBERS)}.py", Outcome()
        path.write_text(source, encoding="utf-8")
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            f"--maxfail={at_most}",
            "-c",
            os.devnull,
            "--rootdir",
            str(tmp_path),
            "--import-mode=importlib",
        ]
        pytest.main([*options, *(["-k", " or ".join(only)] if only else []), str(path)], plugins=[outcome])
        return outcome

    return run
