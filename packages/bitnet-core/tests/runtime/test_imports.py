"""What the start of a command imports: every module costs each command its time, which no clock is needed to tell."""

from __future__ import annotations

import sys
from typing import Any

import pytest

OWN = {
    *("bitnet", "bitnet.core", "bitnet.core.cpu", "bitnet.core.cpu.guard", "bitnet.core.errors", "bitnet.core.hub"),
    *("bitnet.core.hub.address", "bitnet.core.hub.names", "bitnet.core.support", "bitnet.core.support.distributions"),
    *("bitnet.core.support.entry_points", "bitnet.core.support.env", "bitnet.core.support.files"),
    *("bitnet.core.support.foreign", "bitnet.core.support.foreign_output", "bitnet.core.support.guard"),
    *("bitnet.core.support.log", "bitnet.core.support.requirement", "bitnet.core.support.system"),
    *("bitnet.core.support.units", "bitnet.server", "bitnet.server.launch", "bitnet.server.launch.clients"),
}
"""Our modules that ``bitnet --help`` imports beside those of the commands."""
COMMANDS = ("bitnet.core.cli", "bitnet.server.commands")
SLOW = {
    *("asyncio", "concurrent", "csv", "email", "hashlib", "hmac", "http", "importlib.metadata", "importlib.resources"),
    *("multiprocessing", "random", "secrets", "socket", "ssl", "statistics", "subprocess", "tempfile", "uuid"),
    *("urllib.request", "xml", "zipfile"),
}
"""Modules of the standard library that take a millisecond or more."""
SAY = """
import sys
before = set(sys.modules)
{code}
print(*sorted(name for name in set(sys.modules) - before if sys.modules[name] is not None))
print(*sorted(sys.stdlib_module_names))
"""


def imported(python: Any, code: str) -> tuple[set[str], set[str]]:
    """Modules that the code imports: those of distributions, and those of the standard library."""
    said = python(SAY.format(code=code)).out.splitlines()
    names, standard = (set(line.split()) for line in said[-2:])
    return (
        {name for name in names if name.partition(".")[0] not in standard},
        {name for name in names if name.partition(".")[0] in standard},
    )


def test_the_import_of_the_package_imports_nothing_else(python: Any) -> None:
    other, standard = imported(python, "import bitnet.core")
    assert other == {"bitnet", "bitnet.core"}
    assert not standard & {*SLOW, "logging", "ctypes", "json", "inspect", "dataclasses", "pathlib"}


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_the_help_imports_click_and_modules_of_commands_alone(python: Any, arguments: list[str]) -> None:
    """The help lists the commands of bitnet-server, too, if it is installed, and so imports their modules."""
    other, standard = imported(python, f"from bitnet.core.cli import main; main({arguments!r})")
    ours = {name for name in other if name.partition(".")[0] == "bitnet" and not name.startswith(COMMANDS)}
    assert {name.partition(".")[0] for name in other} == {"bitnet", "click"}
    assert ours <= OWN, f"new: {ours - OWN}"
    slow = standard & SLOW
    assert not slow - python_imports(python, "import click"), slow


def python_imports(python: Any, code: str) -> set[str]:
    """What a library imports by itself is not ours to spare."""
    return imported(python, code)[1]


FIRST = """
import sys
from bitnet.core.cli import main, run
run.expect_template = lambda: sys.exit("late" if "numpy" in sys.modules else "early")
main(["run", "Hi"])
"""


def test_the_process_of_templates_starts_before_slow_imports(python: Any) -> None:
    assert python(FIRST, check=False).err.splitlines()[-1] == "early"


THREADS = """
import os
from bitnet.core import cli
{before}
cli.main(["--version", *{arguments!r}])
import numpy
print(len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system lists no threads of a process")
def test_numpy_starts_no_threads_in_a_command(python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    command = THREADS.format(before="", arguments=[])
    assert python(command).out.splitlines()[-1] == "1 1"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert python(command).out.splitlines()[-1].split()[1] == "3"


@pytest.mark.skipif(sys.platform != "linux", reason="the system lists no threads of a process")
@pytest.mark.parametrize(
    ("before", "arguments"),
    [
        ("", ["--device=CPU:numpy"]),
        ("os.environ['BITNET_DEVICE'] = 'cpu:numpy'", []),
        ("cli.NATIVE /= 'absent'", []),
    ],
)
def test_numpy_keeps_its_threads_where_it_is_the_device(
    python: Any, monkeypatch: pytest.MonkeyPatch, before: str, arguments: list[str]
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert python(THREADS.format(before=before, arguments=arguments)).out.splitlines()[-1].split()[1] == "None"
