"""Compiled modules for a site's next start, on CPython. ``tests/browser`` has the start itself."""

from __future__ import annotations

import io
import secrets
import subprocess
import sys
import zipfile
from pathlib import Path

import bitnet.server.web.bytecode
from bitnet.server.web.bytecode import compiled, loaded


def test_the_archive_has_what_python_imports(tmp_path: Path) -> None:
    """Code is taken from it, and the source is not looked at: it says something else by then."""
    word, module = secrets.token_hex(8), f"made_{secrets.token_hex(4)}"
    source = tmp_path / f"{module}.py"
    source.write_text(f"word = {word!r}\n", encoding="utf-8")
    with zipfile.ZipFile(io.BytesIO(compiled([str(source)]))) as packed:
        (name,) = packed.namelist()
        data = packed.read(name)
    assert Path("/", name).parent == tmp_path / "__pycache__"
    Path("/", name).parent.mkdir(exist_ok=True)
    Path("/", name).write_bytes(data)
    source.write_text("word = 'the source'\n", encoding="utf-8")
    script = f"import {module}; print({module}.word)"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.strip() == word


def test_sources_are_files_that_are_there() -> None:
    files, _ = loaded()
    assert bitnet.server.web.bytecode.__file__ in files
    assert all(Path(file).is_file() and file.endswith(".py") for file in files)
