"""Compiles kernel sources to cubins with NVRTC, for the device's exact architecture, through the kernel cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda.bindings import nvrtc
from cuda.pathfinder import load_nvidia_dynamic_lib

from bitnet.core.errors import DeviceError, KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.drivers.compiling import Way, compiled
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.dynlib import stamp
from bitnet.cuda.ops import SOURCES


def options(spec: KernelSpec, arch: str) -> list[str]:
    """Compiler options of a kernel for an architecture such as ``sm_90a``."""
    return [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in spec.defines)]


def compile_cubin(file: str, flags: Sequence[str], device: str) -> bytes:
    """Machine code of an operation's source. For errors see :func:`compile_source`."""
    return compile_source(SOURCES.text(file), f"{file}.cu", flags, device)


def compile_source(source: str, name: str, flags: Sequence[str], device: str) -> bytes:
    """Machine code of a source whose includes are expanded; needs no driver and no device.

    Raises:
        KernelCompileError: NVRTC refuses it; the error holds its log.
    """

    def call(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"NVRTC failed with {status.name} on {name}.", device=device)
        return values[0] if values else None

    program = call(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, None, None))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(call(nvrtc.nvrtcGetProgramLogSize(program)))
            call(nvrtc.nvrtcGetProgramLog(program, log))
            text = bytes(log).rstrip(b"\0").decode(errors="replace")
            raise KernelCompileError(f"{name} does not compile.", device=device, log=text)
        cubin = bytearray(call(nvrtc.nvrtcGetCUBINSize(program)))
        call(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Compiler:
    """Cubins for one device, from the cache or the compiler, which several threads may use at once."""

    def __init__(self, name: str, arch: str, device: str, driver: str, kernels: KernelCache) -> None:
        self._name, self._arch, self._device, self._driver = name, arch, device, driver
        self._cache = kernels
        _, major, minor = nvrtc.nvrtcVersion()
        library = load_nvidia_dynamic_lib("nvrtc").abs_path  # a fixed release may have the same version
        self._version = f"nvrtc {major}.{minor} {stamp(library or '')}"

    def cubins(self, specs: Sequence[KernelSpec]) -> dict[KernelSpec, bytes]:
        """Machine code for each of the kernels; kernels with the same source and constants share it.

        Raises:
            KernelCompileError: A source does not compile.
        """
        alike = {(spec.file, spec.defines): [self._way(spec)] for spec in specs}
        found = compiled(self._cache, alike)
        return {spec: found[spec.file, spec.defines] for spec in specs}

    def _way(self, spec: KernelSpec) -> Way[bytes]:
        def build() -> tuple[bytes, bytes]:
            cubin = compile_cubin(spec.file, options(spec, self._arch), self._name)
            return cubin, cubin

        return Way(spec.file, self._key(spec), build, lambda cubin: cubin)

    def _key(self, spec: KernelSpec) -> str:
        return self._cache.key(
            source=SOURCES.text(spec.file),
            device=self._device,
            driver=self._driver,
            options=" ".join(options(spec, self._arch)),
            compiler=self._version,
        )
