"""From GLSL to SPIR-V: every way there may be, what happens without one, and what is said of those that are broken."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bitnet.core.errors import KernelCompileError
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.dynlib import open_library
from bitnet.vulkan import compiler
from bitnet.vulkan.compiler import KERNELS, MAGIC, Refused, SpirvCompiler, Ways, built, program, shaderc, spirv
from bitnet.vulkan.modules import TARGET, Module, all_modules, module

Patch = pytest.MonkeyPatch
Require = Callable[[str, "str | None"], None]
MODULES = list(all_modules(KERNELS))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: Patch, tmp_path: Path) -> Iterator[None]:
    """An empty kernel cache, and ways that are looked for anew."""
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    ways = compiler.ways
    ways.cache_clear()
    yield
    ways.cache_clear()


def embed() -> Module:
    return module(KERNELS, "embed", "embed", {})


def made_by(monkeypatch: Patch, *ways: SpirvCompiler, made: Module | None = None) -> bytes:
    """The SPIR-V of a module, of ``embed`` unless given, where there are these ways to make it."""
    monkeypatch.setattr(compiler, "ways", lambda: Ways(ways))
    return spirv(made or embed(), "vulkan:7", KernelCache())


def way(make: Callable[[Module], bytes]) -> SpirvCompiler:
    return SpirvCompiler(make.__name__, make.__name__, make)


def fails(module: Module) -> bytes:
    raise Refused(f"{module.file}.comp:7: no such teapot")


def makes(module: Module) -> bytes:
    return MAGIC + bytes(16)


@pytest.mark.parametrize("made", MODULES, ids=lambda made: made.label)
def test_every_module_is_valid(made: Module, require_device: Require, tmp_path: Path) -> None:
    """By the compiler that is there, and by spirv-val where it is installed, which judges what drivers only assume."""
    found = compiler.ways().found
    require_device("vulkan:0", None if found else "there is no way to compile GLSL")
    code = spirv(made, "vulkan:7", KernelCache())
    assert code[:4] == MAGIC
    judge = shutil.which("spirv-val")
    if judge is not None and not {"COOPMAT", "MATRICES"} & {
        name for name, on in made.macros if on
    }:  # an old one knows none
        (tmp_path / "a.spv").write_bytes(code)
        command = [judge, "--target-env", TARGET, str(tmp_path / "a.spv")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["glslc", "glslangValidator"])
def test_a_program_that_is_installed(name: str, require_device: Callable[[str, str | None], None]) -> None:
    path = shutil.which(name)
    require_device(name, None if path else f"{name} is not installed")
    assert path is not None
    found = program(name, path)
    assert found.spirv(embed())[:4] == MAGIC
    with pytest.raises(Refused, match="teapot"):
        found.spirv(replace(embed(), text=embed().text.replace("result[to + i]", "teapot")))


def test_the_next_way_is_taken(monkeypatch: Patch) -> None:
    assert made_by(monkeypatch, way(fails), way(makes)) == MAGIC + bytes(16)


def test_a_kernel_that_no_way_makes(monkeypatch: Patch) -> None:
    """The log has what each of the ways says."""
    with pytest.raises(KernelCompileError) as raised:
        made_by(monkeypatch, way(fails), way(fails))
    assert raised.value.device == "vulkan:7"
    assert raised.value.log.count("embed.comp:7: no such teapot") == 2
    with pytest.raises(KernelCompileError, match="There is no compiler"):
        made_by(monkeypatch)


def test_what_is_compiled_is_kept(monkeypatch: Patch) -> None:
    calls = []

    def counts(module: Module) -> bytes:
        calls.append(module)
        return makes(module)

    for _ in range(2):
        assert made_by(monkeypatch, way(counts)) == MAGIC + bytes(16)
    assert len(calls) == 1
    made_by(monkeypatch, way(counts), made=replace(embed(), text=embed().text + "\n"))
    assert len(calls) == 2


def test_what_is_no_spirv_is_refused(monkeypatch: Patch) -> None:
    with pytest.raises(KernelCompileError, match="not SPIR-V"):
        made_by(monkeypatch, way(lambda module: b"not it"))


@pytest.mark.skipif(sys.platform == "win32", reason="a script is no program there")
def test_a_compiler_that_hangs(monkeypatch: Patch, tmp_path: Path) -> None:
    script = tmp_path / "glslc"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(compiler, "SECONDS", 0.2)
    with pytest.raises(Refused, match="timed out"):
        program("glslc", str(script)).spirv(embed())


@pytest.mark.skipif(sys.platform == "win32", reason="a script is no program there")
@pytest.mark.parametrize("what", ["says no text", "is gone", "has nowhere to work"])
def test_a_program_that_cannot_work(monkeypatch: Patch, tmp_path: Path, what: str) -> None:
    """Whatever keeps it from its work, the next way is taken; without one, the error says what it was."""
    script = tmp_path / "glslc"
    script.write_text("#!/bin/sh\nprintf 'caf\\351' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    broken = program("glslc", str(script))
    if what == "is gone":
        script.unlink()
    if what == "has nowhere to work":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert made_by(monkeypatch, broken, way(makes)) == MAGIC + bytes(16)
    with pytest.raises(KernelCompileError, match="glslc: ") as raised:
        made_by(monkeypatch, broken)
    assert ("caf\N{REPLACEMENT CHARACTER}" if what == "says no text" else "No such file") in raised.value.log


def test_what_the_build_made(monkeypatch: Patch, tmp_path: Path) -> None:
    """It is found by the source: one that has changed since is not taken for it."""
    monkeypatch.setattr(compiler, "BUILT", tmp_path)
    (tmp_path / f"{embed().digest}.spv").write_bytes(MAGIC + bytes(8))
    assert built(embed()) == MAGIC + bytes(8)
    with pytest.raises(Refused, match="embed as it is now"):
        built(replace(embed(), text=embed().text + "\n"))


def test_a_library_that_cannot_be_opened(monkeypatch: Patch, tmp_path: Path) -> None:
    """A libshaderc that is there but broken: the next way is taken, and `bitnet devices` is told so."""
    broken = tmp_path / "libshaderc_shared.so.1"
    broken.write_bytes(b"\x7fELF and nothing behind it")
    monkeypatch.setattr(compiler, "SHADERC", [str(broken)])
    found = compiler.ways()
    assert not any("shaderc" in way.name for way in found.found)
    assert str(broken) in found.text
    assert "cannot be opened" in found.text
    assert found.found
    assert found.text.startswith(f"shaders: {found.found[0].name}")


def test_a_library_without_the_calls(monkeypatch: Patch) -> None:
    """It opens, and is another library."""
    name = {"linux": "libc.so.6", "darwin": "libSystem.dylib"}.get(sys.platform, "msvcrt.dll")
    monkeypatch.setattr(compiler, "SHADERC", [name])
    found = compiler.ways()
    assert not any("shaderc" in way.name for way in found.found)
    assert f"{name} cannot be used" in found.text


def test_shaderc() -> None:
    """The library's C interface, where one can be opened."""
    library = open_library(compiler.SHADERC)
    if library.handle is None:
        pytest.skip(f"no libshaderc can be opened: {'; '.join(library.tried.values())}")
    found = shaderc(library.handle, library.name)
    assert found.spirv(embed())[:4] == MAGIC
    with pytest.raises(Refused, match="teapot"):
        found.spirv(replace(embed(), text=embed().text.replace("result[to + i]", "teapot")))


def test_the_sdk_comes_first(monkeypatch: Patch, tmp_path: Path) -> None:
    ending = ".exe" if sys.platform == "win32" else ""
    glslc = tmp_path / "bin" / f"glslc{ending}"
    glslc.parent.mkdir()
    glslc.write_text("")
    glslc.chmod(0o755)
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path))
    monkeypatch.setattr(compiler, "SHADERC", [])
    first = compiler.ways().found[0]
    assert first.name == "glslc"
    assert first.identity.startswith(f"{glslc} ")


def test_no_compiler_at_all(monkeypatch: Patch, require_device: Callable[[str, str | None], None]) -> None:
    """What a machine with a driver and nothing else has: the SPIR-V of the build."""
    monkeypatch.setattr(compiler, "SHADERC", [])
    monkeypatch.setenv("PATH", os.devnull)
    found = compiler.ways().found
    built = compiler.BUILT.is_dir()
    require_device("glslangValidator", None if built else "this install was built without glslangValidator")
    assert [way.name for way in found] == ["built with the wheel"]
    assert all(spirv(made, "vulkan:7", KernelCache())[:4] == MAGIC for made in MODULES)
