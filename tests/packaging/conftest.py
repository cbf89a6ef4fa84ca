"""Everything is built once per session: the sdist and wheel of every package, into a folder outside the workspace."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


class Uv(Protocol):
    def __call__(self, *args: str | Path, cwd: Path = ..., env: Mapping[str, str] = ...) -> str: ...


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", PACKAGES)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def packages() -> list[str]:
    """The names of all packages of the workspace."""
    return PACKAGES


@pytest.fixture(scope="session")
def run() -> Uv:
    """Run a command, free of the environment that the tests run in; returns its output, fails with all it said."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BITNET_", "VIRTUAL_ENV", "PYTHON"))}

    def run(*args: str | Path, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> str:
        done = subprocess.run(args, cwd=cwd, env={**kept, **env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def uv(run: Uv) -> Uv:
    program = os.environ.get("UV") or shutil.which("uv")
    assert program, "uv is not on the PATH"

    def uv(*args: str | Path, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> str:
        return run(program, *args, cwd=cwd, env=env)

    return uv


def hook(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def hatch_build(root: Path) -> ModuleType:
    """bitnet-core's build hook, as a module."""
    return hook(root / "packages/bitnet-core/hatch_build.py")


@pytest.fixture
def spirv_build(root: Path) -> ModuleType:
    """bitnet-vulkan's, a new one each time."""
    return hook(root / "packages/bitnet-vulkan/spirv_build.py")


@pytest.fixture(scope="session")
def dist(uv: Uv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and, built straight from the tree, the wheel of every package."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--all-packages", "--no-sources", "--sdist", "--wheel", "--out-dir", folder)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Callable[[str], Path]:
    """The wheel of a package."""

    def wheel(package: str) -> Path:
        (path,) = dist.glob(f"{package.replace('-', '_')}-*.whl")
        return path

    return wheel


@pytest.fixture(scope="session")
def wheel_files() -> Callable[[Path], dict[str, bytes]]:
    """The files of a wheel, by name."""

    def files(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as archive:
            return {info.filename: archive.read(info) for info in archive.infolist()}

    return files
