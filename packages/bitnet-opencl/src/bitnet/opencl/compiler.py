"""Kernel sources to programs: built for one device, kept in the kernel cache as its binary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyopencl as cl

from bitnet.core.cache import KernelCache
from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.clc import sources
from bitnet.core.gpu.compiling import Way, compiled
from bitnet.core.log import logger
from bitnet.opencl.features import PLAIN, flags

SOURCES = sources("bitnet.opencl", "opencl")
Unit: TypeAlias = tuple[str, tuple[str, ...]]
"""A source's file and the constants it is compiled with: what kernels share a program by."""


def unit(spec: KernelSpec) -> Unit:
    """Of a kernel."""
    return spec.file, tuple(f"-D{name}={value}" for name, value in spec.defines)


class Compiler:
    """Compiles for one device; the programs of one source and one set of options are shared by its kernels.

    A driver may name a feature and not compile what makes use of it: the plain way is taken then, for this source.
    """

    def __init__(self, context: cl.Context, device: cl.Device, name: str, cache_: KernelCache) -> None:
        self._context, self._device, self._name, self._cache = context, device, name, cache_
        self._flags = flags(device)
        self._programs: dict[Unit, cl.Program] = {}

    def prepare(self, specs: Sequence[KernelSpec]) -> None:
        """Compile what is not compiled yet of the kernels' programs, several at a time.

        Raises:
            KernelCompileError: A source does not build; the log is the compiler's.
        """
        missing = {unit(spec) for spec in specs} - self._programs.keys()
        self._programs |= compiled(self._cache, {one: self._ways(one) for one in missing})

    def builds(self, spec: KernelSpec) -> bool:
        """Whether the driver builds a kernel with the device's features."""
        one = unit(spec)
        with_features, *_ = self._ways(one)
        try:
            compiled(self._cache, {one: [with_features]})
        except KernelCompileError as error:
            logger.warning(
                "%s: %s.cl does not build, so what it tries is not used. %s", self._name, spec.file, error.log
            )
            return False
        return True

    def kernel(self, spec: KernelSpec) -> cl.Kernel:
        """A new kernel object of a prepared program, with arguments of its own."""
        return cl.Kernel(self._programs[unit(spec)], spec.entry)

    def _ways(self, one: Unit) -> list[Way[cl.Program]]:
        """With the device's features; and plainly, where it has any."""
        file, defines = one
        names = {
            self._flags: "with the device's features",
            PLAIN: "plainly",
        }  # one, where it has none
        return [self._way(file, (*flags, *defines), name) for flags, name in names.items()]

    def _way(self, file: str, options: tuple[str, ...], name: str) -> Way[cl.Program]:
        def build() -> tuple[cl.Program, bytes]:
            program = self._build(file, options)
            return program, program.binaries[0]

        return Way(file, self._key(file, options), build, lambda binary: self._load(file, options, binary), name)

    def _load(self, file: str, options: tuple[str, ...], binary: bytes) -> cl.Program | None:
        try:
            program = cl._cl._Program(self._context, [self._device], [binary])
            program._build(options=" ".join(options).encode())
            return cl.Program(program)
        except cl.Error as error:  # a driver may refuse its own binary, say after an update that kept its version
            logger.debug("%s: the kept binary of %s.cl is not used: %s", self._name, file, error)
            return None

    def _build(self, file: str, options: tuple[str, ...]) -> cl.Program:
        # Not cl.Program(context, source).build(): that goes through pyopencl's own cache, which knows nothing of ours,
        # and warns whenever a driver's log is not empty, as that of NVIDIA's always is.
        program = cl._cl._Program(self._context, SOURCES.text(file))
        error = None
        try:
            program._build(options=" ".join(options).encode())
        except cl.Error as caught:
            error = caught
        log = str(program.get_build_info(self._device, cl.program_build_info.LOG)).strip()
        if error is not None:
            log = "\n".join(part for part in (str(error), log) if part)
            raise KernelCompileError(f"{file}.cl does not compile.", device=self._name, log=log)
        if log:
            logger.debug("%s: of %s.cl the compiler says: %s", self._name, file, log)
        return cl.Program(program)

    def _key(self, file: str, options: tuple[str, ...]) -> str:
        device = self._device
        return self._cache.key(
            source=SOURCES.text(file),
            device=f"{device.platform.name} {device.name}",
            driver=f"{device.platform.version} {device.driver_version}",
            options=" ".join(options),
            compiler=device.version,
        )
