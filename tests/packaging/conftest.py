"""Everything is built once per run: the sdist and wheel of every package, into a folder outside the workspace."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeAlias

import pytest
from filelock import FileLock

import release

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


class Run(Protocol):
    def __call__(self, *words: str | Path, cwd: Path = ..., env: Mapping[str, str] = ...) -> str: ...


Shared: TypeAlias = Callable[[str, Callable[[Path], None]], Path]


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
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """``shared(name, make)`` is a folder that ``make`` has filled, once for all processes of this run."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # a worker's is in the run's

    def shared(name: str, make: Callable[[Path], None]) -> Path:
        folder = base / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                made = Path(tempfile.mkdtemp(dir=base)) / name
                made.mkdir()
                make(made)
                made.rename(folder)
        return folder

    return shared


@pytest.fixture(scope="session")
def dist(shared: Shared) -> Path:
    """A folder with the sdist and, built straight from the tree, the wheel of every package."""
    return shared("dist", lambda folder: release.build(folder, "--all-packages", "--sdist", "--wheel"))


@pytest.fixture(scope="session")
def rebuilt(dist: Path, shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels that the sdists make: with an empty compiler cache, in other folders."""
    cache = {"BITNET_BUILD_CACHE": str(tmp_path_factory.mktemp("zig"))}
    return shared("rebuilt", lambda folder: release.rebuild(dist, folder, PACKAGES, cache))


@pytest.fixture(scope="session")
def target_wheel(shared: Shared) -> Callable[[str], Path]:
    """The wheel of bitnet-core for a target of its build hook."""

    def build(target: str) -> Path:
        (path,) = shared(target, lambda folder: release.wheel("bitnet-core", target, folder)).glob("*.whl")
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
