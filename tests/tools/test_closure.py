"""What test files stand on, computed from the source, against what Python executes when tests run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from changes import git
from closure import ROOT, Closure, covers

OBSERVER = """
import os, sys

root, log, seen = os.environ["OBSERVED"], os.environ["OBSERVED_IN"], set()

def ours(frame):  # whether code of ours opens or lists something, directly or through the standard library
    while frame:
        name = frame.f_code.co_filename
        if "importlib" in name or "site-packages" in name:
            return False
        if name.startswith(root):
            return ".venv" not in name
        frame = frame.f_back
    return False

def note(event, arguments):
    if event == "exec":
        name = getattr(arguments[0], "co_filename", "")
    elif event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        event, name = "read", os.path.abspath(os.fsdecode(arguments[0]))
    else:
        return
    if name.startswith(root) and (event, name) not in seen and (event == "exec" or ours(sys._getframe(1))):
        seen.add((event, name))
        with open(log, "a", encoding="utf-8") as file:
            file.write(event + " " + name + "\\n")

sys.addaudithook(note)
"""
"""A ``sitecustomize`` that notes which files of ours Python executes, and which our code opens or lists, in child
processes, too."""
FEW = """
import os, random
import pytest

ran = []

def pytest_collection_modifyitems(items):
    random.shuffle(items)

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if len(ran) >= 3:
        pytest.skip("three tests have run")

def pytest_runtest_logreport(report):
    if report.when == "call" and not report.skipped:
        ran.append(report.nodeid)
        with open(os.environ["OBSERVED_IN"], "a", encoding="utf-8") as file:
            file.write(f"ran {report.nodeid}\\n")
"""
"""A plugin that runs three tests at random, among those that the tree selects and that find what they need here."""
CHOICE = ("conftest.py", "tools/changes.py", "tools/closure.py", "tools/shares.py", ".ci/passed", ".ci/seconds.json")
ALWAYS = {ROOT / name for name in CHOICE}
"""What pytest imports and reads to choose tests."""
SLOW = ("tests/tools/", "tests/packaging/", "tests/oracle/", "packages/bitnet-core/tests/cpu/", "test_tiles", "bombs")


class Observed(NamedTuple):
    """What a run of three tests of a file did: the tests, the files that Python executed, what our code read or
    listed."""

    tests: list[str]
    executed: set[Path]
    read: set[Path]


def observed(test: Path, folder: Path) -> Observed:
    """Run three tests of a file and watch them; fewer where the tree selects fewer, or they are skipped here."""
    (folder / "sitecustomize.py").write_text(OBSERVER)
    (folder / "few_tests.py").write_text(FEW)
    log = folder / "observed.txt"
    log.touch()
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    watched = {"OBSERVED": f"{ROOT}{os.sep}", "OBSERVED_IN": str(log), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "few_tests", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **watched}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr  # a test that fails has run, too
    lines = [line.partition(" ") for line in log.read_text(encoding="utf-8").splitlines()]
    executed, read = ({Path(path).resolve() for kind, _, path in lines if kind == each} for each in ("exec", "read"))
    ours = {file for file in executed if file.suffix == ".py" and ".venv" not in file.parts}
    return Observed([name for kind, _, name in lines if kind == "ran"], ours, read)


def unknown(read: Iterable[Path], test: Path, closure: Closure, declared: Iterable[str]) -> list[str]:
    """What a test reads or lists of the repository's files without standing on it."""
    named = (path.removeprefix(":(glob)") for path in declared)  # of git's pathspecs
    paths = {*closure.reads(test), *named, test.parent.relative_to(ROOT).as_posix()}
    tracked = set(git("ls-files").splitlines())
    tracked |= {parent.as_posix() for name in tracked for parent in PurePosixPath(name).parents}
    others = {*read} - closure.stands_on(test) - ALWAYS
    names = {path.relative_to(ROOT).as_posix() for path in others if path.is_relative_to(ROOT)} & tracked - {"."}
    return sorted(name for name in names if not covers(paths, f"{name}/any" if (ROOT / name).is_dir() else name))


Declared = Callable[[Path], "tuple[str, ...] | None"]


@pytest.fixture
def declared(pytestconfig: pytest.Config) -> Declared:
    """What ``conftest.py`` declares of a long test file; None for a file that always runs."""
    (module,) = [m for m in pytestconfig.pluginmanager.get_plugins() if hasattr(m, "TIERS")]

    def find(test: Path) -> tuple[str, ...] | None:
        key = module.longest(module.LONG, test)
        return (*module.LONG[key], *module.EVERYWHERE) if key else None

    return find


@pytest.fixture(scope="module")
def closure() -> Closure:
    return Closure()


def drawn() -> Iterator[Path]:
    """Quick test files, in another order in each run; the first starts `bitnet`."""
    tests = [test for test in Closure().tests() if not any(part in test.as_posix() for part in SLOW)]
    return iter([ROOT / "packages/bitnet-core/tests/cli/test_plugins.py", *random.sample(tests, len(tests))])


def test_nothing_that_runs_or_is_read_is_missing(closure: Closure, declared: Declared, tmp_path: Path) -> None:
    """What is read counts in one file, and each night in all. A file of which nothing runs here is not counted."""
    charts = ROOT / "tests/tools/test_draw_charts.py"
    counted = 0
    for i, test in enumerate(chain([charts], drawn())):
        folder = tmp_path / str(i)
        folder.mkdir()
        ran, seen, read = observed(test, folder)
        assert test in seen
        assert sorted(seen - closure.stands_on(test) - ALWAYS) == [], ran or test
        if test == charts:
            paths = declared(test)
            assert paths is not None
            assert unknown(read, test, closure, paths) == []
            assert ROOT / "docs/measurements/peers.json" in read
        counted += bool(ran)
        if counted == 4:
            return
    pytest.fail(f"only {counted} test files have a test that runs here")


@pytest.mark.nightly
def test_nothing_that_runs_or_is_read_is_missing_from_any(closure: Closure, declared: Declared, tmp_path: Path) -> None:
    missing: dict[str, list[Path]] = {}
    not_named: dict[str, list[str]] = {}
    for i, test in enumerate(closure.tests()):
        folder = tmp_path / str(i)
        folder.mkdir()
        _, seen, read = observed(test, folder)
        name = test.relative_to(ROOT).as_posix()
        if lacking := sorted(seen - closure.stands_on(test) - ALWAYS):
            missing[name] = lacking
        if (paths := declared(test)) is not None and (lost := unknown(read, test, closure, paths)):
            not_named[name] = lost
    assert (missing, not_named) == ({}, {})


PROJECT = """
[project.entry-points."bitnet.backends"]
x = "bitnet.x.backend:BACKEND"

[project.entry-points."bitnet.commands"]
serve = "bitnet.x.serving:serve"
"""
SOURCES = {
    "__init__": "def __getattr__(name):\n    from bitnet.x.lazily import name",
    "backend": "",
    "serving": "import bitnet.x.served",
    "served": "",
    "lazily": "",
    "near": "def f():\n    import bitnet.x.far",
    "far": "'''bitnet.x.documented'''\nif TYPE_CHECKING:\n    import bitnet.x.typed\nfrom . import related",
    "documented": "",
    "typed": "",
    "related": "",
    "registry": "GROUP = 'bitnet.backends'",
}


@pytest.mark.parametrize(
    ("source", "stands_on"),
    [
        ("import pytest", set()),
        ("import bitnet.x", {"__init__"}),
        ("from bitnet.x import name", {"__init__", "lazily"}),
        ("import bitnet.x\nbitnet.x.name", {"__init__", "lazily"}),
        ("def f():\n    from bitnet.x.near import f", {"__init__", "near", "far", "related"}),
        ("from bitnet.x import near", {"__init__", "near", "far", "related"}),
        ("CODE = 'import os; from bitnet.x import name, documented'", {"__init__", "lazily", "documented"}),
        ("import_module('bitnet.x.typed')", {"__init__", "typed"}),
        ("'''bitnet.x.typed'''", set()),
        ("if TYPE_CHECKING:\n    import bitnet.x.typed", set()),
        ("import bitnet.x.registry", {"__init__", "registry", "backend"}),
        ("run([sys.executable, '-m', 'bitnet.core', 'run'])", {"main"}),
        ("SCRIPT = Path(folder) / 'bitnet'\nrun(SCRIPT, 'serve')", {"main", "__init__", "serving", "served"}),
        ("run(['bitnet', '--help'])", {"main", "__init__", "serving", "served"}),
        ("logging.getLogger('bitnet')", set()),
        ("run([sys.executable, ROOT / 'tools/tool.py'])", {"tool", "helper"}),
        ("load('tool')", {"tool", "helper"}),
    ],
)
def test_what_is_planted_is_found(tmp_path: Path, source: str, stands_on: set[str]) -> None:
    package = tmp_path / "packages/bitnet-x"
    core, tools = tmp_path / "packages/bitnet-core/src/bitnet/core", tmp_path / "tools"
    for folder in (package / "src/bitnet/x", package / "tests", core, tools):
        folder.mkdir(parents=True)
    for name, text in SOURCES.items():
        (package / f"src/bitnet/x/{name}.py").write_text(text)
    (package / "pyproject.toml").write_text(PROJECT)
    (core / "__main__.py").write_text("")
    (tools / "tool.py").write_text("import helper")
    (tools / "helper.py").write_text("")
    test = package / "tests/test_it.py"
    test.write_text(source)
    (package / "tests/conftest.py").write_text("")
    found = Closure(tmp_path).stands_on(test) - {test, package / "tests/conftest.py"}
    assert {"main" if path.name == "__main__.py" else path.stem for path in found} == stands_on


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("ROOT / 'kernels' / 'opencl'", {"kernels/opencl"}),
        ("ROOT / 'kernels/opencl/a.cl'", {"kernels/opencl/a.cl"}),
        ("K = Path(__file__).parents[3] / 'kernels'\nK / 'opencl' / name", {"kernels", "kernels/opencl"}),
        ("K = Path(__file__).resolve().parents[3] / 'kernels' / 'opencl'", {"kernels/opencl"}),
        ("Path(__file__).parent / 'data.txt'", {"packages/bitnet-x/tests/data.txt"}),
        ("ROOT / 'kernels' / name", {"kernels"}),
        ("ROOT / 'packages' / name / 'README.md'", {"packages/*/README.md"}),
        ("ROOT / f'{x}' / 'opencl'", {"*/opencl"}),
        ("ROOT.glob('kernels/*/*.cl')", {"kernels/*/*.cl"}),
        ("run('kernels/opencl')", {"kernels/opencl"}),
        ("ROOT / 'kernels' / 'cuda'", set()),
        ("tmp_path / 'kernels' / 'opencl'", set()),
        ("sys.path.insert(0, ROOT / 'tools')", set()),
    ],
)
def test_a_path_that_is_named_is_read(tmp_path: Path, source: str, reads: set[str]) -> None:
    tests, kernels = tmp_path / "packages/bitnet-x/tests", tmp_path / "kernels/opencl"
    for folder in (tests, kernels, tmp_path / "tools"):
        folder.mkdir(parents=True)
    for file in (kernels / "a.cl", tests / "data.txt", tests.parent / "README.md"):
        file.write_text("")
    (tests / "test_it.py").write_text(source)
    assert Closure(tmp_path).reads(tests / "test_it.py") == reads


@pytest.mark.parametrize(
    ("path", "name", "inside"),
    [
        ("kernels", "kernels/opencl/a.cl", True),
        ("kernels", "kernels_of/a.cl", False),
        ("kernels/*/*.cl", "kernels/opencl/a.cl", True),
        ("kernels/*/*.cl", "kernels/opencl/amd/a.cl", False),
        ("kernels/**/*.cl", "kernels/opencl/amd/a.cl", True),
        ("kernels/**/*.cl", "kernels/a.cl", True),
        ("packages/*/src", "packages/bitnet-x/src/a/b.py", True),
        ("packages/*", "packages/bitnet-x/src/a/b.py", False),
    ],
)
def test_what_a_path_covers(path: str, name: str, inside: bool) -> None:
    assert covers([path], name) == inside


def test_a_module_that_is_gone_is_still_stood_on(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    test, gone = tmp_path / "tests/test_it.py", tmp_path / "tools/gone.py"
    test.write_text("import gone")
    assert gone not in Closure(tmp_path).stands_on(test)
    assert gone in Closure(tmp_path, [gone]).stands_on(test)
