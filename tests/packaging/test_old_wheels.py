"""Wheels made for another bitnet-core than the installed one, as after ``pip install --no-deps``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import release
from bitnet.core.hal import HAL_API

BACKEND, MODULE = "bitnet-rocm", "rocm"
"""A backend that needs nothing but the core."""
RANGE = "bitnet-core>=0.1,<0.2"

CASES = [
    pytest.param(
        ("0.0.9", "bitnet-core>=0.0.9,<0.1", HAL_API),
        f"needs bitnet-core <0.1,>=0.0.9, but {release.version()} is installed.",
        f"bitnet-core {BACKEND}",
        id="requirement",
    ),
    pytest.param(
        ("0.1.7", RANGE, 1),
        f"implements version 1 of the hardware contract (HAL), this bitnet-core version {HAL_API}.",
        BACKEND,
        id="contract",
    ),
]
"""A wheel's version, requirement and contract; why it is refused; and what to upgrade."""


def build(root: Path, folder: Path, version: str, requirement: str, contract: int) -> Path:
    """The wheel that the backend's source makes once it is given another version, requirement and contract."""
    shutil.copytree(root / "packages" / BACKEND, folder / "packages" / BACKEND)  # follows the links to the kernels
    (folder / "VERSION").write_text(f"{version}\n")
    project = folder / "packages" / BACKEND / "pyproject.toml"
    module = project.parent / "src/bitnet" / MODULE / "backend.py"
    for file, old, new in (project, RANGE, requirement), (module, f"hal_api = {HAL_API}", f"hal_api = {contract}"):
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1
        file.write_text(text.replace(old, new), encoding="utf-8")
    release.build(folder / "dist", "--wheel", project.parent)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(
    uv: Callable[..., str], wheel: Callable[[str], Path], locked: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A fresh virtual environment that has this tree's bitnet-core."""
    folder = tmp_path_factory.mktemp("old-wheels") / "venv"
    uv("venv", folder)
    uv("pip", "install", "--python", folder, "--constraint", locked, wheel("bitnet-core"))
    return folder


@pytest.mark.parametrize(("made", "reason", "upgrade"), CASES)
def test_a_wheel_for_another_core_is_refused_with_both_versions(
    root: Path,
    environment: Path,
    uv: Callable[..., str],
    run: Callable[..., str],
    tmp_path: Path,
    made: tuple[str, str, int],
    reason: str,
    upgrade: str,
) -> None:
    uv("pip", "install", "--python", environment, "--no-deps", "--reinstall", build(root, tmp_path, *made))
    python = environment / ("Scripts/python" if (environment / "Scripts").exists() else "bin/python")
    env = {"BITNET_CACHE_DIR": str(tmp_path / "cache")}
    listed: dict[str, Any] = json.loads(run(python, "-m", "bitnet.core", "devices", "--json", cwd=tmp_path, env=env))
    (found,) = [backend for backend in listed["backends"] if backend["name"] == MODULE]
    assert (found["distribution"], found["version"], found["status"]) == (BACKEND, made[0], "unsupported")
    assert found["reason"] == f"{BACKEND} {made[0]} {reason}"
    assert found["hint"] == f"pip install --upgrade {upgrade}"
    assert "42" in run(python, "-m", "bitnet.core", "run", "What is 17 + 25?", cwd=tmp_path, env=env)
