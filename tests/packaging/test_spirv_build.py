"""The SPIR-V of an editable install: made once, and again where something changed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

COMPILER = """#!{python}
import sys
open({log!r}, "a").write("x")
open(sys.argv[sys.argv.index("-o") + 1], "w").write("module")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for a compiler is a script")
def test_an_editable_install_compiles_what_is_missing(
    spirv_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(log)))
    compiler.chmod(0o755)
    monkeypatch.setattr(spirv_build, "ROOT", tmp_path)

    def compiled() -> int:
        log.write_text("")
        spirv_build.install(str(compiler))
        return len(log.read_text())

    every = compiled()
    place = tmp_path / "src" / spirv_build.BUILT
    made = sorted(place.iterdir())
    assert every == len(made) > 1
    created = place.stat().st_ino
    assert compiled() == 0

    made[0].unlink()
    stale, cut_off = place / ("0" * 64 + ".spv"), place / f"{made[1].name}.1"
    stale.write_text("of another source")
    cut_off.write_text("of a build that was killed")
    (place / ".gitignore").write_text("*")
    assert compiled() == 1
    assert sorted(place.iterdir()) == [place / ".gitignore", *made]
    assert place.stat().st_ino == created
