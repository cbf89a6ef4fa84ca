"""A backend: what the entry point names. A real one would open a driver in ``probe``; this one computes with numpy."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import numpy.typing as npt

from bitnet.core.errors import DeviceError
from bitnet.core.hal import (
    Backend,
    Begun,
    CheckedExecutable,
    Device,
    DeviceInfo,
    DeviceType,
    Executable,
    ExecutableStats,
    MemoryInfo,
    OpenOptions,
    Passes,
    ProbeResult,
    ProbeStatus,
    Program,
    Step,
)
from bitnet.core.reference import KERNELS, ReferenceDevice
from bitnet.core.support.cache import KernelCache

_BOARD = DeviceInfo(
    backend="sample",
    index="0",
    id="sample-board-0001",
    description="Sample board",
    vendor="Sample",
    type=DeviceType.DISCRETE,
    memory=8 * 2**30,
    driver_version="3.1",
)
_NAMES = {name: name.replace("_numpy", "_sample") for name in KERNELS}


class SampleBackend:
    name = "sample"
    hal_api = 3

    def probe(self) -> ProbeResult:
        return ProbeResult(ProbeStatus.OK, devices=[_BOARD], versions={"driver": "3.1"})

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        if info.id != _BOARD.id:
            raise DeviceError("there is no such board.", device=info.name)
        return SampleDevice(info)

    def kernels(self) -> Collection[str]:
        return _NAMES.values()


class SampleDevice:
    """A device made of another, whose kernels have to be "compiled" before the first one is launched."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._numpy = ReferenceDevice(info)

    def compile(self, program: Program, *, keep: bool = False) -> Executable:
        return SampleExecutable(self.info, program, self._numpy.compile(program, keep=keep), _compiled(self.info))

    def memory(self) -> MemoryInfo:
        return self._numpy.memory()

    def close(self) -> None:
        self._numpy.close()


class SampleExecutable(CheckedExecutable):
    """Starts each step on the other device, and collects there. Its device lists no features, so it needs no more."""

    def __init__(self, info: DeviceInfo, program: Program, numpy: Executable, binary: bytes) -> None:
        super().__init__(info, program)
        self._numpy = numpy
        self._names = dict(line.split("=") for line in binary.decode().splitlines())

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(self._names[name] for name in self._numpy.kernels)

    def on_stats(self) -> ExecutableStats:
        return self._numpy.stats()

    def on_begin(self, step: Step, count: int, done: int) -> Begun:
        self._numpy.start(step, count)
        return lambda: Passes(self._numpy.collect(), None)

    def on_write(self, name: str, array: npt.NDArray[Any]) -> None:
        self._numpy.write(name, array)

    def on_read(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return self._numpy.read(name, shape[0])

    def on_close(self) -> None:
        self._numpy.close()


def _compiled(info: DeviceInfo) -> bytes:
    """What a compiler would make, kept in bitnet's cache: here a table of the kernels' names."""
    source = "\n".join(f"{numpy}={ours}" for numpy, ours in _NAMES.items())
    cache = KernelCache()
    key = cache.key(source=source, device=info.id, driver=info.driver_version, options="", compiler="sample 1")
    binary = cache.get(key)
    if binary is None:
        begin = time.perf_counter()
        binary = source.encode()
        cache.put(key, binary, label="the sample's kernels", seconds=time.perf_counter() - begin)
    return binary


BACKEND: Backend = SampleBackend()
