"""Everything is built once per session: the sdist and wheel of every package, into a folder outside the workspace."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

import release

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


class Run(Protocol):
    def __call__(self, *words: str | Path, cwd: Path = ..., env: Mapping[str, str] = ...) -> str: ...


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
def run() -> Run:
    """Run a command, free of the environment that the tests run in; returns its output, fails with all it said."""
    return release.run


@pytest.fixture(scope="session")
def uv() -> Run:
    return release.uv


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
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and, built straight from the tree, the wheel of every package."""
    folder = tmp_path_factory.mktemp("dist")
    release.build(folder, "--all-packages", "--sdist", "--wheel")
    return folder


@pytest.fixture(scope="session")
def rebuilt(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels that the sdists make: with an empty compiler cache, in other folders."""
    folder = tmp_path_factory.mktemp("rebuilt")
    release.rebuild(dist, folder, PACKAGES, {"BITNET_BUILD_CACHE": str(tmp_path_factory.mktemp("zig"))})
    return folder


@pytest.fixture(scope="session")
def target_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The wheel of bitnet-core for a target of its build hook."""

    @cache
    def build(target: str) -> Path:
        folder = tmp_path_factory.mktemp(target)
        release.wheel("bitnet-core", target, folder)
        (path,) = folder.glob("*.whl")
        return path

    return build


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lock's versions of everything that is not ours, as constraints: what uv has at hand already."""
    path = tmp_path_factory.mktemp("locked") / "constraints.txt"
    release.uv("export", "--frozen", "--no-hashes", "--no-emit-workspace", "--all-packages", "-o", path)
    return path


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
