"""Builds kernels for one device: specialises the wheel's modules, has the driver build them, caches its binaries."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_char_p, c_size_t, c_void_p, create_string_buffer
from typing import TypeAlias

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.drivers.compiling import Way, compiled
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.log import logger
from bitnet.level_zero.hardware import Hardware
from bitnet.level_zero.loader import BUILD_FAILED, LevelZero
from bitnet.level_zero.specialise import module
from bitnet.level_zero.structures import KernelDesc, KernelProperties, ModuleDesc

SPIRV, NATIVE = 0, 1
"""Formats of a module."""
Unit: TypeAlias = tuple[str, tuple[tuple[str, int | str], ...]]
"""A source and its constants. Kernels with the same ones share a module."""


class Compiler:
    """Builds modules for one device; kernels with the same source and constants share a module.

    Args:
        name: The device's name, for errors.
    """

    def __init__(
        self, level_zero: LevelZero, context: c_void_p, hardware: Hardware, name: str, kernels: KernelCache
    ) -> None:
        self._level_zero, self._context, self._hardware = level_zero, context, hardware
        self._name, self._cache = name, kernels
        self._dot = False
        self._modules: dict[Unit, c_void_p] = {}
        self._kernels: dict[tuple[Unit, str], c_void_p] = {}

    def use_dot_products(self) -> None:
        """From now on, use the modules with the integer dot product, if the driver's compiler accepts one of them.

        The device's flag is unreliable: the driver of 2022 does not set it for processors that have the instruction.
        """
        self._dot = True
        self._dot = self.builds(KernelSpec("row_sums", "row_sums", (("WG", 64), ("COLS", 64))))

    def builds(self, trial: KernelSpec) -> bool:
        """Whether the driver builds a kernel's module."""
        try:
            self.prepare([trial])
        except KernelCompileError as error:
            logger.debug("%s: it does not build %s: %s", self._name, trial.file, error.log)
            return False
        return True

    def prepare(self, specs: Sequence[KernelSpec]) -> None:
        """Build the kernels' modules that are not built yet, in parallel.

        Raises:
            KernelCompileError: The driver refuses a module; the error holds its compiler's log.
        """
        missing = {(spec.file, spec.defines): spec for spec in specs if (spec.file, spec.defines) not in self._modules}
        self._modules |= compiled(self._cache, {unit: [self._way(spec)] for unit, spec in missing.items()})

    def kernel(self, spec: KernelSpec) -> c_void_p:
        """A kernel of a prepared module; lives as long as the compiler."""
        unit = (spec.file, spec.defines)
        key = (unit, spec.entry)
        if key not in self._kernels:
            desc = KernelDesc(name=spec.entry.encode())
            made = self._level_zero.make("zeKernelCreate", self._modules[unit], byref(desc))
            self._kernels[key] = made
            properties = self._level_zero.filled("zeKernelGetProperties", made, KernelProperties)
            if properties.spill_bytes:
                logger.debug("%s: %s spills %d bytes of registers", self._name, spec.entry, properties.spill_bytes)
        return self._kernels[key]

    def close(self) -> None:
        """Free every kernel and module."""
        for kernel in self._kernels.values():
            self._level_zero.status("zeKernelDestroy", kernel)
        for made in self._modules.values():
            self._level_zero.status("zeModuleDestroy", made)
        self._kernels.clear()
        self._modules.clear()

    def _way(self, spec: KernelSpec) -> Way[c_void_p]:
        words = module(spec, dot=self._dot, device=self._name)
        key = self._cache.key(
            source=words.hex(),
            device=f"{self._hardware.name} {bytes(self._hardware.properties.uuid).hex()}",
            driver=f"level-zero {self._hardware.driver_version:#x}",
            options="",
            compiler=".".join(map(str, self._hardware.api)),
        )

        def build() -> tuple[c_void_p, bytes]:
            made = self._create(spec.file, SPIRV, words)
            return made, self._native(made)

        return Way(spec.file, key, build, lambda binary: self._load(spec.file, binary))

    def _load(self, file: str, binary: bytes) -> c_void_p | None:
        try:
            return self._create(file, NATIVE, binary)
        except KernelCompileError as error:  # a driver may refuse its own binary, say after an update
            logger.debug("%s: the kept binary of %s is not used: %s", self._name, file, error)
            return None

    def _create(self, file: str, form: int, data: bytes) -> c_void_p:
        desc = ModuleDesc(format=form, size=len(data), data=c_char_p(data), flags=b"")
        made, log = c_void_p(), c_void_p()
        arguments = (self._context, self._hardware.device, byref(desc), byref(made), byref(log))
        result = self._level_zero.status("zeModuleCreate", *arguments)
        said = self._log(log) if log else ""
        if result in BUILD_FAILED:
            what = f"the driver does not build {file} ({BUILD_FAILED[result]})."
            raise KernelCompileError(what, device=self._name, log=said)
        if result:
            self._level_zero.fail("zeModuleCreate", result)
        if said:
            logger.debug("%s: of %s the compiler says: %s", self._name, file, said)
        return made

    def _log(self, log: c_void_p) -> str:
        """What the compiler said; frees it."""
        size = c_size_t()
        text = ""
        if self._level_zero.status("zeModuleBuildLogGetString", log, byref(size), None) == 0 and size.value:
            buffer = create_string_buffer(size.value)
            if self._level_zero.status("zeModuleBuildLogGetString", log, byref(size), buffer) == 0:
                text = buffer.value.decode(errors="replace").strip()
        self._level_zero.status("zeModuleBuildLogDestroy", log)
        return text

    def _native(self, made: c_void_p) -> bytes:
        size = c_size_t()
        self._level_zero.call("zeModuleGetNativeBinary", made, byref(size), None)
        buffer = create_string_buffer(size.value)
        self._level_zero.call("zeModuleGetNativeBinary", made, byref(size), buffer)
        return buffer.raw
