"""The wheels, installed outside the workspace, by someone who has nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]


class Environment:
    """A fresh virtual environment and a working directory far from the tree."""

    def __init__(self, folder: Path, uv: Run, run: Run) -> None:
        self.folder, self._uv, self._run = folder, uv, run
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        uv("venv", "--python", sys.executable, folder / "venv", cwd=folder)

    def install(self, *what: str | Path) -> None:
        self._uv("pip", "install", "--python", self.folder / "venv", *what, cwd=self.folder)

    def __call__(self, program: str, *args: str, **env: str) -> str:
        env = {"BITNET_CACHE_DIR": str(self.folder / "cache"), **env}
        return self._run(self.bin / program, *args, cwd=self.folder, env=env)


@pytest.fixture(scope="module")
def core(
    uv: Run, run: Run, wheel: Callable[[str], Path], locked: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("core"), uv, run)
    environment.install("--constraint", locked, wheel("bitnet-core"))
    return environment


def installed(environment: Environment, uv: Run) -> set[str]:
    rows = json.loads(uv("pip", "list", "--python", environment.folder / "venv", "--format", "json"))
    return {row["name"] for row in rows}


def test_core_pulls_in_no_gpu_package(core: Environment, uv: Run, root: Path, packages: list[str]) -> None:
    names = installed(core, uv)
    drivers = ("cuda-", "nvidia-", "pyopencl", "vulkan", "wgpu", "hip-", "pyobjc")
    assert "bitnet-core" in names
    assert [name for name in names if name.startswith(drivers) or name in set(packages) - {"bitnet-core"}] == []


def test_core_imports_from_the_wheel_alone(core: Environment) -> None:
    paths = json.loads(
        core("python", "-c", "import json, bitnet, bitnet.core; print(json.dumps(list(bitnet.__path__)))")
    )
    assert len(paths) == 1
    assert Path(paths[0]).is_relative_to(core.folder.resolve())


def test_core_answers(core: Environment) -> None:
    assert "42" in core("bitnet", "run", "What is 17 + 25?")


def test_core_lists_its_devices(core: Environment) -> None:
    assert "cpu" in core("bitnet", "devices")


@pytest.mark.skipif(sys.platform != "linux", reason="how libraries are found is Linux's")
def test_vulkan_without_a_compiler(
    uv: Run,
    run: Run,
    wheel: Callable[[str], Path],
    locked: Path,
    require_device: Callable[[str, str | None], None],
    tmp_path: Path,
) -> None:
    """A machine with a driver, no SDK, no program on its path, and a broken libshaderc: SPIR-V from the wheel."""
    environment = Environment(tmp_path, uv, run)
    environment.install("--constraint", locked, wheel("bitnet-core"), wheel("bitnet-vulkan"))
    broken = tmp_path / "lib"
    broken.mkdir()
    for name in ("libshaderc_shared.so.1", "libshaderc_shared.so", "libshaderc.so.1"):
        (broken / name).write_bytes(b"no library")
    bare = {"PATH": os.devnull, "LD_LIBRARY_PATH": str(broken), "VULKAN_SDK": ""}
    listed = environment("bitnet", "devices", **bare)
    require_device("vulkan:0", None if "vulkan:0" in listed else "there is no Vulkan device")
    assert "shaders: built with the wheel (libshaderc cannot be opened: " in listed
    assert "42" in environment("bitnet", "run", "--device", "vulkan:0", "What is 17 + 25?", **bare)
    # And nothing but the driver's own pipelines was compiled: the kernel cache holds no SPIR-V.
    kept = [path.read_bytes() for path in (tmp_path / "cache").rglob("*.kernel")]
    assert not [data for data in kept if b"\x03\x02\x23\x07" in data[:200]]
