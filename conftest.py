"""Shared by the tests of every package: required devices, test tiers, and the choice of tests.

Each file belongs to one tier, given by the longest prefix of its path in ``TIERS``. Files of a tier excluded by ``-m``
are not even imported, so that ``-m unit`` opens no driver and compiles nothing. Tests marked ``nightly`` run only if
``-m`` names that mark.

A long test file (one with a prefix in ``LONG``) runs if anything that it stands on has changed since CI last passed
(:mod:`changes`): a source file that its tests import or start, or a path that they name (:mod:`closure`), or a path
declared in ``LONG``. It also runs if it tests a backend whose device is present. Otherwise most of its tests become
nightly: one in ``SHARE`` still runs, a different selection for each commit. Files that stand on a change have
``BUDGET`` seconds of work together; if they would take longer, the longest ones run a share of their tests
(:mod:`shares`), those that a changed path has called from the night among them. The end of a run says how many were
left out.

Long, because pytest finds its hooks here; which files are long, and their shares, are in the modules named above.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from changes import BUILDS, base, changed, differing, head
from closure import Closure, covers
from shares import record, seconds, shares

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
"""One in this many tests is selected from a file of ``LONG`` that stands on nothing that has changed."""
BUDGET = 1200.0
"""Seconds of work that the tests of long files take together, about, in all processes: 10 minutes of two."""
RECORD_SECONDS = "BITNET_RECORD_SECONDS"
"""Variable with which a run that passes records how long the tests of each file took."""
ALL = "nightly or not nightly"
"""What ``-m`` selects every test with."""
OPENCL = ("packages/bitnet-opencl", "kernels/opencl")
TOOLS = ("tools", "tests/tools", "kernels/opencl", "pyproject.toml", "tox.toml", ":(glob)packages/*")
LONG: Mapping[str, tuple[str, ...]] = {
    "packages/bitnet-cuda/": ("packages/bitnet-cuda", "kernels/cuda"),
    "packages/bitnet-opencl/": OPENCL,
    "packages/bitnet-rocm/": ("packages/bitnet-rocm", *OPENCL),
    "packages/bitnet-level-zero/": ("packages/bitnet-level-zero", *OPENCL),
    "packages/bitnet-metal/": ("packages/bitnet-metal", "kernels/metal"),
    "packages/bitnet-vulkan/": ("packages/bitnet-vulkan", "kernels/vulkan"),
    "packages/bitnet-webgpu/": ("packages/bitnet-webgpu", "kernels/webgpu"),
    "packages/bitnet-server/": ("packages/bitnet-server/src", "packages/bitnet-server/pyproject.toml"),
    "packages/bitnet-server/tests/test_deployment.py": ("docs/serve-deploy.md", "packages/bitnet-server"),
    "tests/conformance/": ("kernels/cpu",),
    "tests/downstream/": ("tests/downstream",),
    "tests/demo_model/": ("tools/demo_model",),
    "tests/oracle/test_golden.py": ("kernels/cpu", "tests/oracle"),
    "tests/packaging/test_distributions.py": (*BUILDS, "kernels"),
    "tests/packaging/test_install.py": (*BUILDS, "kernels", "packages/bitnet-vulkan"),
    "tests/packaging/test_old_wheels.py": BUILDS,
    "tests/tools/": TOOLS,
    "tests/tools/test_opencl_family.py": (*TOOLS, "packages/bitnet-opencl/src"),
    "tests/tools/test_layers.py": ("conftest.py", "kernels", "packages", "tests", "tools"),
    "tests/tools/test_mutants.py": ("tools", "tests", "packages"),
    CORE + "cpu/": ("kernels/cpu", CORE + "cpu"),
    CORE + "testing/": (),
    CORE + "runtime/test_crashes.py": (),
    CORE + "runtime/test_isolated.py": (),
    CORE + "runtime/test_registry.py": (),
    CORE + "cli/test_cut_short.py": ("kernels/cpu",),
    CORE + "model/test_bombs.py": ("tools/bombs",),
    CORE + "text/test_bombs.py": (),
}
"""Maps path prefixes of long test files to what they stand on and no source imports or names: kernels that a package
loads, the page, build files."""
PRESENT = """
import json
from bitnet.core import list_devices
from bitnet.core.hal import DeviceType
gpus = {DeviceType.DISCRETE, DeviceType.INTEGRATED}
print(json.dumps([r.name for r in list_devices() if any(device.type in gpus for device in r.probe.devices)]))
"""
EVERYWHERE = ("uv.lock", "packages/bitnet-core/src/bitnet/core/data/bitnet-demo.gguf")
"""What every long test file stands on."""


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


def affected() -> dict[str, bool] | None:
    """The long test files that stand on something that has changed. None where it is unknown what has changed.

    Each has whether it is near: its own file, one that it imports, or a path that is declared or that it names has
    changed.
    """
    names = differing()
    if names is None:
        return None
    closure = Closure(gone=[path for name in names if name.endswith(".py") and not (path := ROOT / name).exists()])
    sources = {ROOT / name for name in names if name.endswith(".py")}
    found: dict[str, bool] = {}
    for test in closure.tests():
        if key := longest(LONG, test):
            own = closure.own(test)
            near = changed(*LONG[key]) or not sources.isdisjoint(own.union(*map(closure.imported, own)))
            if not near and (reads := closure.reads(test)):
                near = any(covers(reads, name) for name in names)
            if near or changed(*EVERYWHERE) or not sources.isdisjoint(closure.stands_on(test)):
                found[test.relative_to(ROOT).as_posix()] = near
    return found


def present() -> list[str]:
    """The GPU backends that find hardware here, as a process that may crash sees it."""
    command = [sys.executable, "-c", PRESENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        return [str(name) for name in json.loads(done.stdout)]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []


def choice(config: pytest.Config) -> dict[str, Any]:
    """What decides which tests of long files run. The main process finds it out for all."""
    if hasattr(config, "workerinput"):
        return dict(config.workerinput["choice"])
    if not hasattr(config, "bitnet_choice"):
        all_at_once = within_a_test() or not head()
        files = None if all_at_once else affected()
        here = [] if files is None or not wanted(config, DEVICE) else present()
        config.bitnet_choice = {  # type: ignore[attr-defined]
            "affected": files,
            "present": [f"packages/bitnet-{name}/" for name in here],
            "ignored": config.bitnet_ignored,  # type: ignore[attr-defined]
        }
    return dict(config.bitnet_choice)  # type: ignore[attr-defined]


def within_a_test() -> bool:
    """Whether a test started this run: it wants all of its tests."""
    return "PYTEST_CURRENT_TEST" in os.environ


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["choice"] = choice(node.config)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, put slow tiers first, and deselect nightly tests."""
    chosen = choice(config)
    share = shares_of(items, chosen)
    for item in items:
        name = tier(item.path)
        if name is None:
            raise pytest.UsageError(f"{item.nodeid} has no tier: add its folder to TIERS in conftest.py")
        if by_hand := [mark for mark in ORDER if item.get_closest_marker(mark)]:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {by_hand[0]}; remove the mark, as conftest.py sets it by the file"
            )
        item.add_marker(name)
        if by_choice(item) and not drawn(item.nodeid, share[name_of(item)]):
            item.add_marker(pytest.mark.nightly(by_day=False), append=False)
    items.sort(key=lambda item: ORDER.index(str(tier(item.path))))
    if "nightly" not in config.option.markexpr:
        late = [item for item in items if runs_at_night(item)]
        items[:] = [item for item in items if not runs_at_night(item)]
        sampled = sum("by_day" in mark.kwargs for item in late if (mark := item.get_closest_marker("nightly")))
        left_out = {"sampled": sampled, "nightly": len(late) - sampled}
        config.bitnet_left_out = left_out  # type: ignore[attr-defined]
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = left_out
        if late:
            config.hook.pytest_deselected(items=late)


def name_of(item: pytest.Item) -> str:
    """A test's file, relative to the root and with slashes."""
    return item.path.relative_to(ROOT).as_posix()


def by_choice(item: pytest.Item) -> bool:
    """Whether a test is one of a long file that would run by day."""
    return bool(longest(LONG, item.path)) and not runs_at_night(item)


def shares_of(items: Iterable[pytest.Item], chosen: Mapping[str, Any]) -> dict[str, float]:
    """The share of each long file's tests that is selected."""
    tests = Counter(name_of(item) for item in items if by_choice(item))
    found = dict.fromkeys(tests, 1.0)
    if chosen["affected"] is not None:
        here, near = tuple(chosen["present"]), chosen["affected"]
        others = {file: count for file, count in tests.items() if not file.startswith(here)}
        found |= dict.fromkeys(others, 1 / SHARE)
        within = {file: count for file, count in others.items() if file in near}
        found |= shares(within, seconds(ROOT), {file for file in within if near[file]}, BUDGET)
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process that runs tests has collected all of them and left out the same."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.bitnet_left_out = left_out


def drawn(test: str, share: float) -> bool:
    """Whether a test of a long file is in the share that is selected for this commit."""
    commit = head()
    return not commit or within_a_test() or fraction(f"{commit} {test}") < share


def fraction(text: str) -> float:
    """A number from 0 to 1 that looks random and depends on the text alone. CRC-32 puts similar texts side by side."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def runs_at_night(item: pytest.Item) -> bool:
    """Whether a test is marked ``nightly``, unless by ``nightly(unless_changed=paths)`` with a changed path."""
    mark = item.get_closest_marker("nightly")
    return mark is not None and not mark.kwargs.get("by_day", changed(*mark.kwargs.get("unless_changed", ())))


def ignored_signals() -> list[int]:
    """The signals that whoever started this process had it ignore, as ``nohup`` does, apart from Python's own."""
    own = {getattr(signal, name, None) for name in ("SIGPIPE", "SIGXFSZ")}
    return [int(number) for number in signal.valid_signals() - own if signal.getsignal(number) is signal.SIG_IGN]


def handle(numbers: Iterable[int]) -> None:
    """Do nothing at these signals. A program inherits that a signal is ignored, but not that a handler does nothing."""
    for number in numbers:
        signal.signal(number, lambda *_: None)


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
        for line in what_was_left_out(getattr(terminalreporter.config, "bitnet_left_out", {})):
            terminalreporter.write_line(line)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if os.environ.get(RECORD_SECONDS) and exitstatus == 0 and not within_a_test():
            count = Counter(test.partition("::")[0] for tests in self.tests.values() for test in tests)
            record(ROOT, {file: self.files[file] / count[file] for file in count})


def what_was_left_out(left_out: Mapping[str, int]) -> list[str]:
    """What was left out of a run, and how to run it."""
    if not sum(left_out.values()):
        return []
    since = f"changed since {base()[:12]}, when CI last passed" if base() else "changed"
    return [
        f"left out {sum(left_out.values())}: {left_out['sampled']} of long files by what has {since} "
        f"(others for each commit), {left_out['nightly']} nightly; `-m '{ALL}'` runs all"
    ]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        handle(choice(config)["ignored"])
    else:  # pytest-xdist's workers send their reports to the main process
        config.bitnet_ignored = ignored_signals()  # type: ignore[attr-defined]
        handle(config.bitnet_ignored)  # type: ignore[attr-defined]
        config.pluginmanager.register(Clock())


NO_NETWORK = re.compile(r"dns error|tcp connect error|EAI_AGAIN|ENOTFOUND|ECONNREFUSED|ENETUNREACH|ETIMEDOUT")
"""What uv and npm say where there is no network."""


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


@pytest.fixture(scope="session")
def installed(
    require_device: Callable[[str, str | None], None],
) -> Callable[[str, subprocess.CompletedProcess[str]], None]:
    """``installed(tool, done)``: a command that failed for lack of a network skips the test; another fails it."""

    def check(tool: str, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode and (said := NO_NETWORK.search(done.stderr)):
            require_device(tool, f"there is no network for {tool}: {said[0]}")
        assert done.returncode == 0, done.stderr

    return check
