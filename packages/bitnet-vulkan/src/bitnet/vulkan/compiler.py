"""Compiles GLSL to SPIR-V with the first available compiler, else uses the SPIR-V that the wheel's build made.

In order: ``libshaderc_shared``, ``glslc``, ``glslangValidator`` (of the Vulkan SDK, where ``VULKAN_SDK`` names it, or
of the system), and the SPIR-V in the package. If a compiler refuses a source, the next way is tried, as older compilers
do not know every extension.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu.drivers.compiling import Way, compiled
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.dynlib import file_of, open_library, stamp
from bitnet.vulkan.modules import TARGET, Module

KERNELS = Path(str(files("bitnet.vulkan") / "kernels"))
BUILT = Path(str(files("bitnet.vulkan") / "_spirv"))
SHADERC = {
    "linux": ["libshaderc_shared.so.1", "libshaderc_shared.so", "libshaderc.so.1"],
    "darwin": ["libshaderc_shared.1.dylib", "libshaderc_shared.dylib"],
    "win32": ["shaderc_shared.dll"],
}
MAGIC = b"\x03\x02\x23\x07"
HINT = "Install glslc (Debian: apt install glslc; Vulkan SDK: set VULKAN_SDK), or reinstall bitnet-vulkan."
OPTIONS = {
    "glslc": ("-fshader-stage=compute", f"--target-env={TARGET}", "-O"),
    "glslangValidator": ("-S", "comp", "--target-env", TARGET),
}
"""Command-line options of each program."""
SECONDS = 120.0
"""Maximum seconds for a compiler to compile one kernel."""


class Refused(Exception):
    """A way failed to make a module; the message is the compiler's log."""


@dataclass(frozen=True, slots=True)
class SpirvCompiler:
    """A way from GLSL to SPIR-V.

    Attributes:
        identity: Identifies the compiler and its version; empty if nothing is compiled.
        spirv: Makes a module's SPIR-V; raises :class:`Refused`, or OSError if the compiler cannot be run.
    """

    name: str
    identity: str
    spirv: Callable[[Module], bytes]


def shaderc(lib: ctypes.CDLL, name: str) -> SpirvCompiler:
    """``libshaderc_shared``, through its C interface; raises AttributeError where ``lib`` is another library."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for call in ("compiler_initialize", "compile_options_initialize", "compile_into_spv"):
        getattr(lib, f"shaderc_{call}").restype = pointer
    lib.shaderc_result_get_bytes.restype = pointer
    lib.shaderc_result_get_length.restype = size
    lib.shaderc_result_get_error_message.restype = ctypes.c_char_p

    def spirv(module: Module) -> bytes:
        text, file, result = module.text.encode(), f"{module.file}.comp".encode(), pointer()
        compiler = pointer(lib.shaderc_compiler_initialize())
        options = pointer(lib.shaderc_compile_options_initialize())
        try:
            lib.shaderc_compile_options_set_target_env(options, 0, ctypes.c_uint32(1 << 22 | 1 << 12))  # Vulkan 1.1
            lib.shaderc_compile_options_set_optimization_level(options, 2)
            for macro, number in module.macros:
                name, value = macro.encode(), str(number).encode()
                lengths = size(len(name)), size(len(value))
                lib.shaderc_compile_options_add_macro_definition(options, name, lengths[0], value, lengths[1])
            result = pointer(lib.shaderc_compile_into_spv(compiler, text, size(len(text)), 2, file, b"main", options))
            if lib.shaderc_result_get_compilation_status(result):
                raise Refused(lib.shaderc_result_get_error_message(result).decode(errors="replace"))
            return ctypes.string_at(lib.shaderc_result_get_bytes(result), lib.shaderc_result_get_length(result))
        finally:
            lib.shaderc_result_release(result)
            lib.shaderc_compile_options_release(options)
            lib.shaderc_compiler_release(compiler)

    return SpirvCompiler(name, f"{name} {stamp(file_of(lib, 'shaderc_compiler_initialize'))}", spirv)


def program(name: str, path: str) -> SpirvCompiler:
    """``glslc`` or ``glslangValidator``."""

    def spirv(module: Module) -> bytes:
        macros = [f"-D{macro}={value}" for macro, value in module.macros]
        with tempfile.TemporaryDirectory(prefix="bitnet-vulkan-") as folder:
            source, target = Path(folder) / f"{module.file}.comp", Path(folder) / "out.spv"
            source.write_text(module.text, encoding="utf-8")
            call = [path, *OPTIONS[name], *macros, str(source), "-o", str(target)]
            try:
                done = subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
            except subprocess.TimeoutExpired as error:
                raise Refused(str(error)) from None
            if done.returncode or not target.exists():
                said = (done.stdout + done.stderr).decode(errors="replace").strip()
                raise Refused(said or f"{name} ended with {done.returncode}.")
            return target.read_bytes()

    return SpirvCompiler(name, stamp(path), spirv)


def built(module: Module) -> bytes:
    """The SPIR-V made by the wheel's build, found by the digest of the module's source; raises :class:`Refused`."""
    try:
        return (BUILT / f"{module.digest}.spv").read_bytes()
    except FileNotFoundError:
        raise Refused(f"{BUILT} does not have {module.label} as it is now.") from None


class Ways(NamedTuple):
    """The available ways, best first, and their description in ``bitnet devices``."""

    found: Sequence[SpirvCompiler]
    text: str = ""


@cache
def ways() -> Ways:
    """The ways of this machine."""
    found: list[SpirvCompiler] = []
    missing = ""
    library = open_library(SHADERC)
    if library.handle is not None:
        try:
            found.append(shaderc(library.handle, library.name))
        except AttributeError as error:
            missing = f" ({library.name} cannot be used: {error})"
    elif library.failure != "missing":
        why = "; ".join(text for text in library.tried.values() if "No such file" not in text)
        missing = f" (libshaderc cannot be opened: {why})"
    sdk, path = os.environ.get("VULKAN_SDK"), os.environ.get("PATH", "")
    places = {name: shutil.which(name, path=f"{sdk}/bin{os.pathsep}{path}" if sdk else path) for name in OPTIONS}
    found += [program(name, place) for name, place in places.items() if place]
    if BUILT.is_dir():
        found.append(SpirvCompiler("built with the wheel", "", built))
    return Ways(found, f"shaders: {found[0].name if found else 'none'}{missing}")


def spirv(module: Module, device: str, kernels: KernelCache) -> bytes:
    """SPIR-V of a module, from the kernel cache or the first way that makes it.

    Args:
        device: Name of the device, for errors.

    Raises:
        KernelCompileError: No way makes it; ``log`` has the output of each.
    """

    def build(way: SpirvCompiler) -> tuple[bytes, bytes]:
        try:
            code = way.spirv(module)
            if code[:4] != MAGIC or len(code) % 4:
                raise Refused("its output is not SPIR-V.")
        except (Refused, OSError) as refused:
            raise KernelCompileError("", device=device, log=str(refused), hint=HINT) from refused
        return code, code

    def key(compiler: str) -> str:
        return kernels.key(source=module.text, device="SPIR-V", driver="", options=module.digest, compiler=compiler)

    made = [
        Way(module.label, key(way.identity) if way.identity else None, partial(build, way), bytes, way.name)
        for way in ways().found
    ]
    if not made:
        log = "There is no compiler, and the package has no SPIR-V."
        raise KernelCompileError(f"{module.label} does not compile.", device=device, log=log, hint=HINT)
    return compiled(kernels, {module: made})[module]
