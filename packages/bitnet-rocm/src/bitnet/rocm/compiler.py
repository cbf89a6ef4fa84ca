"""Compiles kernel sources to code objects with ``libamd_comgr``, for the device's exact architecture."""

from __future__ import annotations

from bitnet.core.gpu.clc import Abilities, sources
from bitnet.core.gpu.programs import Compiler, Identity, Programs, Source
from bitnet.rocm.comgr_process import ComgrProcess

SOURCES = sources("bitnet.rocm", "rocm", common="amd/prelude.clh", vendors=["amd"])
STANDARD = "2.0"
OPTIONS = (
    "-O3",
    "-cl-no-stdinc",
    "-cl-fp32-correctly-rounded-divide-sqrt",
    "-cl-uniform-work-group-size",
    "-nogpulib",
    "-Wno-pass-failed",  # a loop that stays one where it would need too many registers
    "-mcode-object-version=5",
    *("-mllvm", "-amdgpu-internalize-symbols"),  # or newer clangs keep a copy of each kernel as a function
)
"""Compiler options of every kernel, for any version of clang."""


def options(abilities: Abilities) -> tuple[str, ...]:
    """Compiler options of every kernel for a device."""
    return (*OPTIONS, *abilities.options(STANDARD))


def programs(name: str, comgr: ComgrProcess, architecture: str, abilities: Abilities, driver: str) -> Programs[bytes]:
    """The code objects of a device, each of a source and its constants.

    Args:
        driver: Version of the runtime.
    """

    def build(source: Source) -> tuple[bytes, bytes]:
        code = comgr.compile(source.text, f"{source.file}.cl", architecture, source.options, name)
        return code, code

    identity = Identity(architecture, driver, f"comgr {comgr.version} {comgr.stamp}")
    return Programs(name, SOURCES, [Compiler(build, lambda _, code: code, identity, options(abilities))])
