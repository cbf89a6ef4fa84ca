"""Kernel sources to programs: built for one device, kept in the kernel cache as its binary."""

from __future__ import annotations

import time

import pyopencl as cl

from bitnet.core.cache import KernelCache
from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.opencl.ops import SOURCES


def options(spec: KernelSpec) -> list[str]:
    """Compiler options of a kernel."""
    return ["-cl-std=CL1.2", *(f"-D{name}={value}" for name, value in spec.defines)]


class Compiler:
    """Compiles for one device; the programs of one source and one set of options are shared by its kernels."""

    def __init__(self, context: cl.Context, device: cl.Device, name: str, cache_: KernelCache) -> None:
        self._context, self._device, self._name, self._cache = context, device, name, cache_
        self._programs: dict[tuple[str, tuple[str, ...]], cl.Program] = {}

    def kernel(self, spec: KernelSpec) -> cl.Kernel:
        """A new kernel object, with arguments of its own.

        Raises:
            KernelCompileError: The source does not build; the log is the compiler's.
        """
        flags = options(spec)
        key = (spec.file, tuple(flags))
        if key not in self._programs:
            self._programs[key] = self._program(spec.file, flags)
        return cl.Kernel(self._programs[key], spec.entry)

    def _program(self, file: str, flags: list[str]) -> cl.Program:
        text = SOURCES.text(file)
        device = self._device
        key = self._cache.key(
            source=text,
            device=f"{device.platform.name} {device.name}",
            driver=f"{device.platform.version} {device.driver_version}",
            options=" ".join(flags),
            compiler=device.version,
        )
        binary = self._cache.get(key)
        if binary is not None:
            try:
                cached = cl.Program(self._context, [device], [binary])
                cached.build(flags)
                return cached
            except cl.Error:  # a driver may refuse its own binary, say after an update that kept its version
                pass
        start = time.perf_counter()
        program = cl.Program(self._context, text)
        try:
            program.build(flags)
        except cl.RuntimeError as error:
            raise KernelCompileError(f"{file}.cl does not compile.", device=self._name, log=str(error)) from None
        self._cache.put(key, program.binaries[0], label=file, seconds=time.perf_counter() - start)
        return program
