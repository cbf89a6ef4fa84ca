"""The programs of a device: each source compiled for a set of constants, by the first compiler that accepts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu.drivers.compiling import Way, compiled
from bitnet.core.gpu.drivers.interface import KernelSpec
from bitnet.core.gpu.sources import KernelSources
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.log import logger

Made = TypeVar("Made")
Unit: TypeAlias = tuple[str, tuple[tuple[str, int | str], ...]]
"""A source's file and constants. Kernels with the same unit share a program."""


@dataclass(frozen=True, slots=True)
class Source:
    """The input of a compiler.

    Attributes:
        file: As in :class:`~bitnet.core.gpu.KernelSpec`.
        text: The source, with includes expanded.
        options: The compiler's options, and the source's constants as ``-DNAME=value``.
    """

    file: str
    text: str
    options: tuple[str, ...]


class Identity(NamedTuple):
    """What a cached program depends on besides its source: names and versions of device, driver and compiler."""

    device: str
    driver: str
    compiler: str


@dataclass(frozen=True, slots=True)
class Compiler(Generic[Made]):
    """A compiler of programs for one device.

    Attributes:
        build: Compiles a source; returns the program and the bytes to cache. Raises KernelCompileError.
        load: Makes the program from cached bytes; returns None if the driver refuses them.
        identity: Identity of device, driver and compiler; None if programs are not cached because they are prebuilt.
        options: Compiler options of every source, before its constants.
        name: Name of the compiler in errors, if a device has several.
    """

    build: Callable[[Source], tuple[Made, bytes]]
    load: Callable[[Source, bytes], Made | None]
    identity: Identity | None
    options: tuple[str, ...] = ()
    name: str = ""


class Programs(Generic[Made]):
    """The programs of one device.

    Args:
        device: The device's name, for warnings.
        sources: The kernel sources.
        compilers: The compilers, the best first.
        plain: A fallback for sources that none of them accepts, without device-specific features.

    Raises:
        InvalidInputError: As :class:`~bitnet.core.support.cache.KernelCache`.
    """

    def __init__(
        self,
        device: str,
        sources: KernelSources,
        compilers: Sequence[Compiler[Made]],
        *,
        plain: Compiler[Made] | None = None,
    ) -> None:
        self._device, self._sources, self._compilers = device, sources, list(compilers)
        self._all = [*compilers, plain] if plain else self._compilers
        self._cache = KernelCache()
        self._made: dict[Unit, Made] = {}

    def prepare(self, specs: Sequence[KernelSpec]) -> None:
        """Compile the kernels' programs that are not compiled yet, in parallel.

        Raises:
            KernelCompileError: A source does not compile; the error holds the compiler's log.
        """
        missing = {_unit(spec) for spec in specs} - self._made.keys()
        self._made |= compiled(self._cache, {unit: self._ways(unit, self._all) for unit in missing})

    def builds(self, spec: KernelSpec) -> bool:
        """Whether a kernel compiles with all device-specific features."""
        unit = _unit(spec)
        try:
            compiled(self._cache, {unit: self._ways(unit, self._compilers)})
        except KernelCompileError as error:
            text = "%s: %s does not build, so the feature it tests is not used. %s"
            logger.warning(text, self._device, spec.file, error.log)
            return False
        return True

    def __getitem__(self, spec: KernelSpec) -> Made:
        """The prepared program that holds a kernel."""
        return self._made[_unit(spec)]

    def _ways(self, unit: Unit, compilers: Sequence[Compiler[Made]]) -> list[Way[Made]]:
        return [self._way(unit, compiler, compiler.name if len(compilers) > 1 else "") for compiler in compilers]

    def _way(self, unit: Unit, compiler: Compiler[Made], name: str) -> Way[Made]:
        file, constants = unit
        defines = (f"-D{constant}={value}" for constant, value in constants)
        source = Source(file, self._sources.text(file), (*compiler.options, *defines))
        key = None
        if compiler.identity:
            kept_by = compiler.identity._asdict()
            key = self._cache.key(source=source.text, options=" ".join(source.options), **kept_by)
        return Way(file, key, lambda: compiler.build(source), lambda kept: compiler.load(source, kept), name)


def _unit(spec: KernelSpec) -> Unit:
    return spec.file, spec.defines
