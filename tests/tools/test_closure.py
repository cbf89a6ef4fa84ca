"""What test files stand on, computed from the source, against what Python executes when tests run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from closure import ROOT, Closure

OBSERVER = """
import os, sys

seen = set()

def note(event, arguments):
    if event == "exec":
        name = getattr(arguments[0], "co_filename", "")
        if name.startswith(os.environ["OBSERVED"]) and name not in seen:
            seen.add(name)
            with open(os.environ["OBSERVED_IN"], "a", encoding="utf-8") as file:
                file.write(name + "\\n")

sys.addaudithook(note)
"""
"""A ``sitecustomize`` that notes which files of ours Python executes, in child processes, too."""
FEW = """
import random

def pytest_collection_modifyitems(items):
    items[:] = random.sample(items, min(len(items), 3))
"""
ALWAYS = {ROOT / name for name in ("conftest.py", "tools/changes.py", "tools/closure.py", "tools/shares.py")}
"""What pytest imports to choose tests."""
SLOW = ("tests/tools/", "tests/packaging/", "tests/oracle/", "packages/bitnet-core/tests/cpu/", "test_tiles", "bombs")


def observed(test: Path, folder: Path) -> set[Path]:
    """The files that Python executes when it runs three tests of a file."""
    (folder / "sitecustomize.py").write_text(OBSERVER)
    (folder / "few_tests.py").write_text(FEW)
    log = folder / "observed.txt"
    log.touch()
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    watched = {"OBSERVED": f"{ROOT}{os.sep}", "OBSERVED_IN": str(log), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "few_tests", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **watched}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr  # a test that fails has run, too
    files = {Path(line).resolve() for line in log.read_text(encoding="utf-8").splitlines()}
    return {file for file in files if file.suffix == ".py" and ".venv" not in file.parts}


@pytest.fixture(scope="module")
def closure() -> Closure:
    return Closure()


def drawn(count: int) -> list[Path]:
    """Quick test files, others in each run; one of them starts `bitnet`."""
    tests = [test for test in Closure().tests() if not any(part in test.as_posix() for part in SLOW)]
    return [ROOT / "packages/bitnet-core/tests/cli/test_plugins.py", *random.sample(tests, count)]


def test_nothing_that_runs_is_missing(closure: Closure, tmp_path: Path) -> None:
    for i, test in enumerate(drawn(2)):
        folder = tmp_path / str(i)
        folder.mkdir()
        seen = observed(test, folder)
        assert test in seen
        assert sorted(seen - closure.stands_on(test) - ALWAYS) == [], test


@pytest.mark.nightly
def test_nothing_that_runs_is_missing_from_any(closure: Closure, tmp_path: Path) -> None:
    missing: dict[str, list[Path]] = {}
    for i, test in enumerate(closure.tests()):
        folder = tmp_path / str(i)
        folder.mkdir()
        if lacking := sorted(observed(test, folder) - closure.stands_on(test) - ALWAYS):
            missing[test.relative_to(ROOT).as_posix()] = lacking
    assert missing == {}


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


def test_a_module_that_is_gone_is_still_stood_on(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    test, gone = tmp_path / "tests/test_it.py", tmp_path / "tools/gone.py"
    test.write_text("import gone")
    assert gone not in Closure(tmp_path).stands_on(test)
    assert gone in Closure(tmp_path, [gone]).stands_on(test)
