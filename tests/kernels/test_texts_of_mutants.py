"""Texts of kernels that mutants replace.

Mutants run nightly, so a line that has changed would leave one without its text until then.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
USE = "from bitnet.core.testing.mutant import Mutant"
FILES = sorted(file for file in PACKAGES.glob("*/tests/**/test_*.py") if USE in file.read_text(encoding="utf-8"))


def mutants(value: object) -> Iterator[Mutant]:
    """The mutants in a value of a module: itself, a collection of them, or a function's parameters."""
    if isinstance(value, Mutant):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from mutants(each)
    else:
        for mark in getattr(value, "pytestmark", []):
            yield from mutants(mark.args)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_kernel_has_each_text(file: Path) -> None:
    folder = next((PACKAGES / file.relative_to(PACKAGES).parts[0]).glob("src/bitnet/*/kernels")).resolve()
    kernels = [kernel.read_text(encoding="utf-8") for kernel in folder.rglob("*.*") if kernel.suffix != ".md"]
    found = {mutant.defect: mutant.old for mutant in mutants(list(runpy.run_path(str(file)).values()))}
    assert found or file.stem == "test_test_driver"  # it makes its mutants when it runs
    missing = {defect: old for defect, old in found.items() if not any(old in kernel for kernel in kernels)}
    assert not missing
