"""Faults that are planted in modules at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import mutants
from closure import ROOT, Closure

CORE = ROOT / "packages/bitnet-core/src/bitnet/core"


def test_a_function_of_any_module_raises(tmp_path: Path) -> None:
    rng, copy = random.Random(), tmp_path / "module.py"
    for path in rng.sample(sorted(CORE.rglob("*.py")), 40):
        copy.write_bytes(path.read_bytes())
        name = mutants.mutate(copy, rng)
        text = copy.read_text(encoding="utf-8")
        assert text.count(mutants.FAULT) == 1
        assert f"def {name}(" in text or name == "module", path
        compile(text, str(path), "exec")


@pytest.mark.parametrize("source", ["def f():\n    '''Doc.'''\n    return 1\n", "def f(): return 1\n", "X = 1\n"])
def test_it_raises_when_it_runs(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    mutants.mutate(path, random.Random())
    with pytest.raises(AssertionError, match="a mutant"):  # noqa: PT012 - a module without functions raises at once
        names: dict[str, object] = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        names["f"]()  # type: ignore[operator]


def test_files_that_name_the_function_come_first() -> None:
    found = mutants.nearest(Closure(), CORE / "support/garbage.py", "set_aside")
    named = ["set_aside" in test.read_text(encoding="utf-8") for _, test in found]
    assert named == sorted(named, reverse=True)
    assert ROOT / "packages/bitnet-server/tests/test_serve_command.py" in [test for _, test in found]
