"""An open HIP device: memory, and launches on one stream, captured in graphs if those replay correctly."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from bitnet.core.gpu import KernelSpec, Launch
from bitnet.core.gpu.clc import values
from bitnet.core.gpu.drivers.graphs import CapturingDriver, Graph
from bitnet.core.gpu.drivers.staging import Staging, StagingPool
from bitnet.core.gpu.programs import Programs
from bitnet.rocm.hip import NON_BLOCKING_STREAM, THREAD_LOCAL_CAPTURE, UNTIMED_EVENT, Hip


@dataclass(frozen=True, slots=True, eq=False)
class RocmBuffer:
    """Device memory at an address."""

    address: int
    nbytes: int


class Command:
    """A launch with its arguments in HIP's form."""

    __slots__ = ("_values", "function", "parameters", "sizes")

    def __init__(self, launch: Launch, function: int) -> None:
        self._values = values(launch, _address)  # kept, as `parameters` has only their addresses
        places = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in self._values]
        self.parameters = (ctypes.c_void_p * len(places))(*places)
        self.function, self.sizes = function, (*launch.grid, *launch.block, launch.shared)


class RocmDriver(CapturingDriver):
    """Implements :class:`bitnet.core.gpu.Driver` with HIP.

    Attributes:
        graphs: Whether new recordings are captured in graphs; if false, their launches start one by one.
    """

    def __init__(self, hip: Hip, ordinal: int, name: str, programs: Programs[bytes]) -> None:
        super().__init__()
        self._hip, self._ordinal, self._name, self._programs = hip, ordinal, name, programs
        self._modules: dict[bytes, int] = {}
        self._functions: dict[KernelSpec, int] = {}
        self._stagings = StagingPool(self._staging, lambda staged: self._call("hipEventSynchronize", staged.event))
        self.graphs = False
        self._call("hipInit", 0)
        self._call("hipSetDevice", ordinal)
        self._stream = self._handle("hipStreamCreateWithFlags", NON_BLOCKING_STREAM)

    def alloc(self, nbytes: int) -> RocmBuffer:
        with self._entered():
            return RocmBuffer(self._handle("hipMalloc", nbytes), nbytes)

    def free(self, buffer: RocmBuffer) -> None:
        with self._ended() as alive:
            if alive:
                self._call("hipFree", buffer.address)

    def upload(self, buffer: RocmBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._entered():  # HIP promises no copy of pageable memory that is over when the call returns
            self._call("hipMemcpyHtoDAsync", buffer.address + offset, array.ctypes.data, array.nbytes, self._stream)
            self._call("hipStreamSynchronize", self._stream)

    def download(self, buffer: RocmBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._entered():
            self._call("hipMemcpyDtoHAsync", array.ctypes.data, buffer.address + offset, array.nbytes, self._stream)
            self._call("hipStreamSynchronize", self._stream)

    def fetch(self, buffer: RocmBuffer, array: npt.NDArray[Any]) -> Callable[[], None]:
        """Implements :class:`bitnet.core.gpu.Fetching` with page-locked memory, because copies to other memory
        block."""

        def copy(staged: Staging) -> None:
            self._call("hipMemcpyDtoHAsync", staged.address, buffer.address, array.nbytes, self._stream)
            self._call("hipEventRecord", staged.event, self._stream)

        with self._entered():
            return self._stagings.fetch(array, copy)

    def record(self, launches: Sequence[Launch]) -> Graph | list[Command]:
        with self._entered():
            self._load([launch.kernel for launch in launches])  # before capturing
            commands = [Command(launch, self._functions[launch.kernel]) for launch in launches]
            return self._captured(commands) if self.graphs and commands else commands

    def submit(self, recording: Graph | list[Command]) -> None:
        with self._entered():
            if isinstance(recording, Graph):
                self._call("hipGraphLaunch", recording.handle, self._stream)
            else:
                self._launch(recording)

    def memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._entered():
            self._call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return total.value, free.value

    def close(self) -> None:
        with self._ended() as alive:
            if alive:
                for staged in self._stagings.empty():
                    self._call("hipEventDestroy", staged.event)
                    self._call("hipHostFree", staged.address)
                self._call("hipStreamDestroy", self._stream)
                for module in self._modules.values():
                    self._call("hipModuleUnload", module)

    def _staging(self, nbytes: int) -> Staging:
        address = self._handle("hipHostMalloc", nbytes, 0)
        return Staging(address, self._handle("hipEventCreateWithFlags", UNTIMED_EVENT))

    def _captured(self, commands: list[Command]) -> Graph:
        self._call("hipStreamBeginCapture", self._stream, THREAD_LOCAL_CAPTURE)
        try:
            self._launch(commands)
        except BaseException:
            graph = ctypes.c_void_p()  # otherwise the stream would accept nothing else
            if not self._hip.status("hipStreamEndCapture", self._stream, ctypes.byref(graph)):
                self._hip.status("hipGraphDestroy", graph)
            raise
        graph = ctypes.c_void_p()
        self._call("hipStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            return Graph(self._handle("hipGraphInstantiateWithFlags", graph, 0), self._dropped)
        finally:
            self._call("hipGraphDestroy", graph)

    def _launch(self, commands: list[Command]) -> None:
        for command in commands:
            given = (command.function, *command.sizes, self._stream, command.parameters, None)
            self._call("hipModuleLaunchKernel", *given)

    def _load(self, specs: Sequence[KernelSpec]) -> None:
        """Compile the kernels that are not compiled yet, and load them onto the device."""
        self._programs.prepare(specs)
        for spec in specs:
            if spec in self._functions:
                continue
            code = self._programs[spec]
            if code not in self._modules:
                self._modules[code] = self._handle("hipModuleLoadData", code)
            self._functions[spec] = self._handle("hipModuleGetFunction", self._modules[code], spec.entry.encode())

    def _enter(self) -> None:
        self._call("hipSetDevice", self._ordinal)

    def _wait(self) -> None:
        self._call("hipStreamSynchronize", self._stream)

    def _destroy(self, graph: Any) -> None:
        self._call("hipGraphExecDestroy", graph)

    def _call(self, call: str, *args: Any) -> None:
        self._hip.call(self._name, call, *args)

    def _handle(self, call: str, *args: Any) -> int:
        return self._hip.handle(self._name, call, *args)


def _address(buffer: RocmBuffer) -> int:
    return buffer.address
