"""The child's side of :mod:`bitnet.core.devices.isolated`: serves calls to one device and its executables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from bitnet.core.devices import registry
from bitnet.core.errors import BitNetError, DeviceError
from bitnet.core.hal import (
    BlockWeight,
    DenseWeight,
    Device,
    DeviceInfo,
    Executable,
    MemoryInfo,
    OpenOptions,
    Program,
    TernaryWeight,
    Weight,
)
from bitnet.core.support import foreign_output, log
from bitnet.core.support.helper.loop import Data
from bitnet.core.support.helper.values import dumped, loaded

Ask: TypeAlias = Callable[[Data], bytearray]


_served: _Served


def prepare(setup: bytearray, ask: Ask) -> None:
    """Log as the parent does."""
    global _served  # noqa: PLW0603
    log.adopt(setup)
    _served = _Served(ask)


def answer(request: bytearray) -> Data:
    """The result of a call, or the error that it raises."""
    try:
        return dumped(_served.call(*loaded(request)))
    except BitNetError as error:
        return dumped(error)
    except BaseException as error:
        name = _served.device.info.name if _served.device is not None else "the device"
        return dumped(DeviceError(f"its process failed: {error!r}", device=name))


def finish() -> None:
    """Close the device."""
    foreign_output.flush_c()
    if _served.device is not None:
        _served.device.close()


class _Served:
    """The device, and its executables by number."""

    def __init__(self, ask: Ask) -> None:
        self._parent = ask
        self.device: Device | None = None
        self._executables: list[Executable] = []
        self._reported: list[int] = []
        """Number of kernels of each executable already reported to the parent."""

    def call(self, target: int | None, call: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the device or an executable; return its result, and the executable's kernels if there are
        new ones."""
        if target is None:
            return getattr(self, call)(*arguments)
        executable = self._executables[target]
        value = getattr(executable, call)(*arguments)
        kernels = executable.kernels if call != "close" else ()
        if len(kernels) <= self._reported[target]:
            return value, None
        self._reported[target] = len(kernels)
        return value, kernels

    def open(self, info: DeviceInfo, options: OpenOptions) -> None:
        self.device = registry.open_device(info, options)

    def memory(self) -> MemoryInfo:
        assert self.device is not None
        return self.device.memory()

    def compile(self, program: Program, described: Mapping[str, tuple[Any, ...]] | None, keep: bool) -> int:
        """Compile a program; return the executable's number."""
        assert self.device is not None
        weights: Mapping[str, Weight]
        if described is None:
            assert program.again is not None
            weights = program.again()
        else:
            weights = {name: self._weight(name, *more) for name, more in described.items()}
        with registry.computing(self.device.info)():
            executable = self.device.compile(replace(program, weights=weights), keep=keep)
        self._executables.append(executable)
        self._reported.append(0)
        return len(self._executables) - 1

    def _weight(self, name: str, kind: str, shape: tuple[int, ...], more: Any) -> Weight:
        """A weight that is requested from the parent when loaded."""

        def load() -> Any:
            found = loaded(self._parent(name.encode()))
            if isinstance(found, BitNetError):
                raise found
            return found

        if kind == "ternary":
            return TernaryWeight((shape[0], shape[1]), load, group=more[0], binary=more[1])
        if kind == "blocks":
            return BlockWeight((shape[0], shape[1]), more, load)
        return DenseWeight(shape, more, load)
