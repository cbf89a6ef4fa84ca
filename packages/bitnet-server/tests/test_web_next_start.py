"""What a site's next start is made of, on CPython. ``tests/browser`` has the start itself."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from bitnet.server.web.next_start import compile_others, load, loaded

LOADED = """
import sys
from bitnet.server.web.next_start import loaded
import bitnet.webgpu.source
print(sorted(set(sys.modules) - set(loaded())))
"""


def test_modules_with_javascript_objects_are_not_among_those_loaded() -> None:
    pytest.importorskip("bitnet.webgpu.source")
    words = [sys.executable, "-c", LOADED]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "['bitnet.webgpu', 'bitnet.webgpu.source']"
    assert "bitnet.server.http.app" in loaded()


def test_modules_are_imported_as_far_as_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = (f"made_{secrets.token_hex(4)}" for _ in range(2))
    for name in (first, last):
        (tmp_path / f"{name}.py").write_text("import sys\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    load([first, f"missing_{secrets.token_hex(4)}", last])
    assert {first, last} <= {*sys.modules}


def test_compiled_code_is_used_without_a_look_at_the_source(tmp_path: Path) -> None:
    """It says something else by then."""
    word = secrets.token_hex(8)
    source = tmp_path / "bitnet" / "webgpu" / "inside" / "made.py"
    source.parent.mkdir(parents=True)
    source.write_text(f"word = {word!r}\n", encoding="utf-8")
    compile_others(str(tmp_path))
    source.write_text("word = 'the source'\n", encoding="utf-8")
    script = "import made; print(made.word)"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=source.parent, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.strip() == word
