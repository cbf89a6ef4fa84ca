"""The page "Add a backend in a day" leads to a backend: its toy, built from the page's text alone, passes the suite."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-a-backend.md"
PACKAGE = "packages/bitnet-toy"
SUITE = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", PACKAGE]


def blocks() -> list[tuple[str, str]]:
    """Path and text of each block that has a title."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def follow(root: Path) -> None:
    """Do what the page says of its blocks: they are whole files, or functions to be replaced in one that is there."""
    for path, text in blocks():
        file = root / path
        if text.startswith('"""') or not file.exists():
            file.write_text(text, encoding="utf-8")
            continue
        whole = file.read_text(encoding="utf-8")
        for function in text.rstrip("\n").split("\n\n\n"):
            name = function.partition("(")[0]
            old = rf"^{name}\(.*?(?=\n\n\n|\Z)"
            whole, count = re.subn(old, function.replace("\\", r"\\"), whole, flags=re.MULTILINE | re.DOTALL)
            assert count == 1, f"{path} has {count} times {name}"
        file.write_text(whole, encoding="utf-8")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, copy_workspace: Callable[[Path], Any]) -> Any:
    """A workspace with the toy, built and installed."""
    workspace = copy_workspace(tmp_path_factory.mktemp("workspace"))
    workspace.run(sys.executable, "tools/new_backend.py", "toy")
    follow(workspace.root)
    workspace.install("bitnet-toy")
    return workspace


def test_the_suite_passes(toy: Any) -> None:
    said = toy.run(*SUITE, BITNET_REQUIRE_DEVICES="toy:0", BITNET_CONFORMANCE="small").stdout
    # What the toy refuses is expected to fail; what takes features that it does not list is skipped.
    passed = re.search(r"^(\d+) passed, \d+ skipped(?:, \d+ xfailed)? in", said, re.MULTILINE)
    assert passed, said
    assert int(passed[1]) > 100


@pytest.mark.parametrize(
    "fault", [(" * BLOCK + at", " + at"), ("seq_begin + 1 :]", "seq_begin :]")], ids=["block", "begin"]
)
def test_the_faults_it_names_are_found(toy: Any, fault: tuple[str, str]) -> None:
    file = toy.root / "site" / "bitnet" / "toy" / "kernels" / "common.toyh"
    right = file.read_text(encoding="utf-8")
    assert right.count(fault[0]) == 1
    file.write_text(right.replace(*fault), encoding="utf-8")
    try:
        with pytest.raises(AssertionError, match="1 failed"):
            toy.run(*SUITE, "-x", "-k", "test_model", BITNET_CONFORMANCE="small")
    finally:
        file.write_text(right, encoding="utf-8")


def test_it_is_chosen_by_name_and_proved(toy: Any) -> None:
    said = toy.run(sys.executable, "-m", "bitnet.core", "devices", "--json").stdout
    (found,) = [backend for backend in json.loads(said)["backends"] if backend["name"] == "toy"]
    assert found["status"] == "ok"
    assert found["devices"][0]["proof"]["passed"] is True


def test_style_and_types_are_clean(toy: Any) -> None:
    toy.run(sys.executable, "-m", "ruff", "check", "--no-cache", PACKAGE)
    toy.run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", PACKAGE)
    toy.run(sys.executable, "-m", "mypy", "--cache-dir=.mypy_cache", PACKAGE)
