"""The child's side of :mod:`bitnet.core.devices.isolated`: serves calls to one device and its executables."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO, NoReturn

from bitnet.core.devices import child, messages, registry
from bitnet.core.errors import BitNetError, DeviceError
from bitnet.core.hal import (
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
from bitnet.core.support import foreign_output


def main(request: Mapping[str, Any]) -> NoReturn:
    """Answer calls until the parent closes the pipe or ends."""
    requests, answers = child.settle(request)
    served = _Served(requests, answers)
    while True:
        try:
            target, call, arguments = messages.receive(requests)
        except (EOFError, OSError):
            break
        try:
            answer = "value", served.call(target, call, arguments)
        except BitNetError as error:
            answer = "error", error
        except BaseException as error:
            name = served.device.info.name if served.device is not None else "the device"
            answer = "error", DeviceError(f"its process failed: {error!r}", device=name)
        try:
            messages.send(answers, answer)
        except OSError:
            break
    served.close()
    os._exit(0)  # skip drivers' exit handlers, whose failures nobody would see


class _Served:
    """The device, and its executables by number."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests, self._answers = requests, answers
        self._loading = threading.Lock()
        self.device: Device | None = None
        self._executables: list[Executable] = []
        self._told: list[int] = []
        """Number of kernels of each executable already reported to the parent."""

    def call(self, target: int | None, call: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the device or an executable; return its result, and the executable's kernels if there are
        new ones."""
        if target is None:
            return getattr(self, call)(*arguments)
        executable = self._executables[target]
        value = getattr(executable, call)(*arguments)
        kernels = executable.kernels if call != "close" else ()
        news, self._told[target] = len(kernels) > self._told[target], max(len(kernels), self._told[target])
        return value, kernels if news else None

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
            weights = {name: self._weight(name, *told) for name, told in described.items()}
        with registry.computing(self.device.info)():
            executable = self.device.compile(replace(program, weights=weights), keep=keep)
        self._executables.append(executable)
        self._told.append(0)
        return len(self._executables) - 1

    def _weight(self, name: str, kind: str, shape: tuple[int, ...], more: Any) -> Weight:
        """A weight that is requested from the parent when loaded."""

        def load() -> Any:
            with self._loading:
                messages.send(self._answers, ("weight", name))
                found = messages.receive(self._requests)
            if isinstance(found, BitNetError):
                raise found
            return found

        if kind == "ternary":
            return TernaryWeight((shape[0], shape[1]), load, group=more)
        return DenseWeight(shape, more, load)

    def close(self) -> None:
        foreign_output.flush_c()
        if self.device is not None:
            self.device.close()
