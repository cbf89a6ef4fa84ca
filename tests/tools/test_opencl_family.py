"""A backend on the OpenCL C kernels is a day's work: one over plain ctypes and SPIR-V, in few lines, passes the suite.

`spirv_cpu/` is what its author wrote into the frame that the tool makes. Its driver is Intel's OpenCL for CPUs, which
gets SPIR-V that clang has made of the kernels, as a driver of Level Zero would.
"""

from __future__ import annotations

import difflib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = Path(__file__).with_name("spirv_cpu")
NAME = "spirv-cpu"
PACKAGE = f"packages/bitnet-{NAME}"
SOURCE = f"{PACKAGE}/src/bitnet/spirv_cpu"
INTEL = Path(sys.prefix) / "lib" / "libintelocl.so"
"""Where the wheel intel-opencl-rt puts it."""
MAX_LINES = 300
COPIED = 4
"""Lines in a row that two files have in common by copying, not by chance."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, copy_workspace: Callable[[Path], Any]) -> Any:
    """A workspace with the frame of the backend."""
    made = copy_workspace(tmp_path_factory.mktemp("workspace"))
    made.run(sys.executable, "tools/new_backend.py", NAME, "--family", "opencl")
    return made


@pytest.fixture(scope="module")
def filled(workspace: Any) -> Any:
    """The same, filled in and installed, with the frame's files kept aside."""
    source = workspace.root / SOURCE
    shutil.copytree(source, workspace.root / "frame", symlinks=True)
    for file in files():
        shutil.copy(file, source)
    workspace.install(f"bitnet-{NAME}")
    return workspace


def files() -> list[Path]:
    return sorted(path for path in WRITTEN.iterdir() if path.suffix in (".py", ".cl"))


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def added(frame: list[str], written: list[str]) -> list[str]:
    """The lines that an author added to a frame, or changed."""
    return [line[2:] for line in difflib.ndiff(frame, written) if line.startswith("+ ")]


def copies(one: list[str], other: list[str]) -> Iterator[list[str]]:
    """What stands in both, in a row. An import, and a call's first line that the contract states, is nobody's."""

    def own(found: list[str]) -> list[str]:
        bare = (line.strip() for line in found)
        return [line for line in bare if len(line) > 1 and not re.match(r"(from|import|def) ", line)]

    one, other = own(one), own(other)
    for block in difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        if block.size >= COPIED:
            yield one[block.a : block.a + block.size]


def test_it_takes_few_lines(filled: Any) -> None:
    frame = filled.root / "frame"
    own = {file.name: len(added(lines(frame / file.name), lines(file))) for file in files()}
    assert sum(own.values()) <= MAX_LINES, own
    assert set(own) >= {"backend.py", "compiler.py", "device.py", "ops.py"}


def test_nothing_of_it_is_copied() -> None:
    theirs = sorted(ROOT.glob("packages/bitnet-opencl/src/**/*.py"))
    assert len(theirs) > 3
    for file in files():
        text = file.read_text(encoding="utf-8")
        assert "pyopencl" not in text, file.name
        assert "bitnet.opencl" not in text, file.name
        for their in theirs:
            assert list(copies(lines(file), lines(their))) == [], f"{file.name} and {their.name}"


def test_a_copy_would_be_found() -> None:
    text = [f"line = {number}" for number in range(50)]
    assert list(copies(["import x", "y = 1", *text[10:40], "z = 2"], text)) == [text[10:40]]
    assert list(copies(["y = 1", *text[10 : 10 + COPIED - 1], "z = 2"], text)) == []
    assert len(added(["a", "b", "c"], ["a", "x", "c", "d"])) == 2


def test_style_and_types_are_clean(filled: Any) -> None:
    filled.run(sys.executable, "-m", "ruff", "check", "--no-cache", PACKAGE)
    filled.run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", PACKAGE)
    filled.run(sys.executable, "-m", "mypy", "--cache-dir=.mypy_cache", PACKAGE)


@pytest.mark.parametrize(("size", "least"), [("small", 200), pytest.param("quick", 400, marks=pytest.mark.nightly)])
def test_the_suite_passes(
    size: str, least: int, filled: Any, require_device: Callable[[str, str | None], None]
) -> None:
    """The suite for devices and the backend's other tests; only what it lacks is skipped."""
    require_device("opencl-intel", None if INTEL.exists() else f"{INTEL} is not there (pip install intel-opencl-rt).")
    tests = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", PACKAGE]
    required = {"BITNET_REQUIRE_DEVICES": f"{NAME}:0", "BITNET_CONFORMANCE": size}
    said = filled.run(*tests, BITNET_CACHE_DIR=str(filled.root / "cache"), **required).stdout
    passed = re.search(r"(\d+) passed, (\d+) skipped in [^\n]*$", said.strip())
    assert passed, said
    skipped = re.findall(
        r"^SKIPPED \[(\d+)\] .*has no (look-ahead|states|experts|windows|embedders|rotated-norms)"
        r"(?:, (?:logprobs|windows|rotated-norms))?$",
        said,
        re.MULTILINE,
    )
    assert sum(int(count) for count, _ in skipped) == int(passed[2]), said
    assert sum(int(count) for count, what in skipped if what == "look-ahead") <= 3, said
    assert int(passed[1]) > least
