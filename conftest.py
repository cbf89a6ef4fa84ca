"""Shared by the tests of every package: required devices, and test tiers.

Each file belongs to one tier, given by the longest prefix of its path in ``TIERS``. Files of a tier excluded by ``-m``
are not even imported, so that ``-m unit`` opens no driver and compiles nothing. Tests marked ``nightly`` run only if
``-m`` names that mark. If nothing has changed that a long test file tests (``STANDS_ON``), most of its tests become
nightly: one in ``SHARE`` still runs, a different selection for each commit.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from changes import BUILDS, changed, head

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before numpy is imported, as test processes run in parallel
REQUIRED = "BITNET_REQUIRE_DEVICES"
ROOT = Path(__file__).parent

UNIT, DEVICE, SYSTEM = "unit", "device", "system"
CORE = "packages/bitnet-core/tests/"
TIERS = {
    "packages/": DEVICE,
    CORE: UNIT,
    CORE + "cpu/": DEVICE,
    CORE + "testing/test_mutants.py": DEVICE,
    CORE + "testing/test_suite.py": SYSTEM,
    CORE + "cli/": SYSTEM,
    CORE + "runtime/test_crashes.py": SYSTEM,
    CORE + "runtime/test_isolated.py": SYSTEM,
    CORE + "runtime/test_registry.py": SYSTEM,
    CORE + "evaluation/": SYSTEM,
    CORE + "model/test_bombs.py": SYSTEM,
    CORE + "text/test_bombs.py": SYSTEM,
    CORE + "text/test_sandbox.py": SYSTEM,
    "packages/bitnet-server/tests/": SYSTEM,
    "tests/": SYSTEM,
    "tests/conformance/": DEVICE,
    "tests/oracle/": DEVICE,
}
"""Maps path prefixes to tiers. ``unit``: this process with numpy or the native library; ``device``: kernels on every
available device, including emulated ones; ``system``: whole commands, installed packages, several packages together."""
ORDER = (SYSTEM, DEVICE, UNIT)
"""Slow tiers run first, so that workers finish at about the same time."""

SHARE = 32
"""One in this many tests is selected from a file of ``STANDS_ON`` whose paths have not changed."""
PACKAGE = "packages/bitnet-core/src/bitnet/core/"
DEVICES = (*(PACKAGE + wing for wing in ("hal", "gpu", "reference", "testing")), "tests/conformance")
OPENCL = ("packages/bitnet-opencl", "kernels/opencl", *DEVICES)
PROBING = (PACKAGE + "devices", PACKAGE + "support", CORE + "runtime")
MAPPING = (PACKAGE + "gguf", PACKAGE + "model", PACKAGE + "support")
STANDS_ON = {
    "packages/bitnet-cuda/": ("packages/bitnet-cuda", "kernels/cuda", *DEVICES),
    "packages/bitnet-opencl/": OPENCL,
    "packages/bitnet-rocm/": ("packages/bitnet-rocm", *OPENCL),
    "packages/bitnet-level-zero/": ("packages/bitnet-level-zero", *OPENCL),
    "packages/bitnet-metal/": ("packages/bitnet-metal", "kernels/metal", *DEVICES),
    "packages/bitnet-vulkan/": ("packages/bitnet-vulkan", "kernels/vulkan", *DEVICES),
    "packages/bitnet-webgpu/": ("packages/bitnet-webgpu", "kernels/webgpu", *DEVICES),
    "packages/bitnet-server/": ("packages/bitnet-server", PACKAGE + "engine", PACKAGE + "api.py"),
    "packages/bitnet-server/tests/test_deployment.py": ("docs/serve-deploy.md", "packages/bitnet-server"),
    "tests/conformance/": (PACKAGE + "cpu", "kernels/cpu", *DEVICES),
    "tests/conformance/test_isolated.py": (PACKAGE + "devices", *DEVICES),
    "tests/downstream/": (PACKAGE + "devices", PACKAGE + "support", *DEVICES, "tests/downstream"),
    "tests/demo_model/": ("tools/demo_model", "tests/demo_model", PACKAGE + "evaluation", PACKAGE + "gguf"),
    "tests/oracle/test_golden.py": (PACKAGE + "cpu", PACKAGE + "model", "kernels/cpu", "tests/oracle", *DEVICES),
    "tests/packaging/test_distributions.py": (*BUILDS, "kernels"),
    "tests/packaging/test_install.py": (*BUILDS, "kernels", PACKAGE, "packages/bitnet-vulkan"),
    "tests/tools/": ("tools", "tests/tools", *DEVICES),
    CORE + "cpu/": (PACKAGE + "cpu", "kernels/cpu", CORE + "cpu", *DEVICES),
    CORE + "testing/": (PACKAGE + "testing", PACKAGE + "reference", CORE + "testing"),
    CORE + "runtime/test_crashes.py": PROBING,
    CORE + "runtime/test_isolated.py": (*PROBING, PACKAGE + "hal", PACKAGE + "engine", PACKAGE + "api.py"),
    CORE + "runtime/test_registry.py": PROBING,
    CORE + "cli/test_cut_short.py": (*MAPPING, PACKAGE + "cpu", "kernels/cpu", CORE + "cli/test_cut_short.py"),
    CORE + "model/test_bombs.py": (PACKAGE + "model", PACKAGE + "gguf", PACKAGE + "text", "tools/bombs"),
}
"""Maps path prefixes of test files to the paths in which their tests can find faults."""


def longest(table: Iterable[str], path: Path) -> str:
    """The longest key of a table that is a prefix of a test file's path; empty if none is."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return max(filter(name.startswith, table), key=len, default="")


def tier(path: Path) -> str | None:
    """The tier of a test file; None if no prefix matches."""
    return TIERS.get(longest(TIERS, path))


def wanted(config: pytest.Config, name: str) -> bool:
    """Whether ``-m`` selects any test of a tier."""
    expression = config.option.markexpr
    if not expression:
        return True
    # A file's other marks are unknown before it is imported, so try both none and all of them.
    compiled = Expression.compile(expression)
    others = set(re.findall(r"\w+", expression)) - {*ORDER}

    def some(word: str, /, **_: object) -> bool:
        return word == name

    def every(word: str, /, **_: object) -> bool:
        return word == name or word in others

    return compiled.evaluate(some) or compiled.evaluate(every)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    name = tier(collection_path)
    return None if name is None or wanted(config, name) else True


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, put slow tiers first, and deselect nightly tests."""
    for item in items:
        name = tier(item.path)
        if name is None:
            raise pytest.UsageError(f"{item.nodeid} has no tier: add its folder to TIERS in conftest.py")
        if by_hand := [mark for mark in ORDER if item.get_closest_marker(mark)]:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {by_hand[0]}; remove the mark, as conftest.py sets it by the file"
            )
        item.add_marker(name)
        paths = STANDS_ON.get(longest(STANDS_ON, item.path))
        if paths and item.get_closest_marker("nightly") is None and not drawn(item.nodeid):
            item.add_marker(pytest.mark.nightly(unless_changed=(*paths, "uv.lock")))
    items.sort(key=lambda item: ORDER.index(str(tier(item.path))))
    if "nightly" not in config.option.markexpr:
        late = [item for item in items if runs_at_night(item)]
        items[:] = [item for item in items if not runs_at_night(item)]
        if late:
            config.hook.pytest_deselected(items=late)


def drawn(test: str) -> bool:
    """Whether a test is selected for this commit; in a run started by a test, all are."""
    commit = head()
    return not commit or "PYTEST_CURRENT_TEST" in os.environ or zlib.crc32(f"{commit} {test}".encode()) % SHARE == 0


def runs_at_night(item: pytest.Item) -> bool:
    """Whether a test is marked ``nightly``, unless by ``nightly(unless_changed=paths)`` with a changed path."""
    mark = item.get_closest_marker("nightly")
    return mark is not None and not changed(*mark.kwargs.get("unless_changed", ()))


class Clock:
    """Sums up, over all workers, how long the tests of each tier and file take, and why tests are skipped."""

    LONG = 20.0  # seconds from which the summary lists a file

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self.files: dict[str, float] = {}
        self.spans: dict[str, tuple[float, float]] = {}
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        file = report.nodeid.partition("::")[0]
        self.files[file] = self.files.get(file, 0) + report.duration
        name = tier(ROOT / file)
        if name is None:
            return
        begin, end = self.spans.get(name, (report.start, report.stop))
        self.spans[name] = min(begin, report.start), max(end, report.stop)
        self.seconds[name] = self.seconds.get(name, 0) + report.duration
        self.tests.setdefault(name, set()).add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, count in self.skipped.most_common():
            terminalreporter.write_line(f"skipped {count}: {reason}")
        for name in filter(self.tests.__contains__, ORDER):
            begin, end = self.spans[name]
            terminalreporter.write_line(
                f"tier {name}: {len(self.tests[name])} tests, {self.seconds[name]:.0f} s of work, "
                f"{end - begin:.0f} s from the first to the last"
            )
        for file, spent in sorted(self.files.items(), key=lambda item: -item[1]):
            if spent > self.LONG:
                terminalreporter.write_line(f"{spent:5.0f} s {file}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers send their reports to the main process
        config.pluginmanager.register(Clock())


@pytest.fixture(scope="session")
def require_device() -> Callable[[str, str | None], None]:
    """``require_device(name, absent)`` skips the test if ``absent`` says why a device or tool is missing.

    ``name`` is its name in ``BITNET_REQUIRE_DEVICES`` (comma-separated: ``cpu:avx2,qemu-aarch64``). If that lists it, a
    missing device fails the test, so that CI never skips by accident. ``absent`` is None for a device that is present.
    """
    required = {part.strip() for part in os.environ.get(REQUIRED, "").split(",")}

    def require(name: str, absent: str | None) -> None:
        if absent is None:
            return
        if name in required:
            pytest.fail(f"{REQUIRED} names {name}, but {absent}")
        pytest.skip(absent)

    return require
