"""An open device: memory, and launches enqueued on one in-order queue."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from bitnet.core.gpu import Launch
from bitnet.core.gpu.clc import values, work_items
from bitnet.core.hal import DeviceInfo
from bitnet.spirv_cpu import api
from bitnet.spirv_cpu.compiler import programs


@dataclass(slots=True, eq=False)
class Memory:
    """A ``cl_mem``."""

    handle: api.Handle
    nbytes: int


class SpirvCpuDriver:
    """Implements :class:`bitnet.core.gpu.Driver`."""

    def __init__(self, info: DeviceInfo) -> None:
        self._name, self._total = info.name, info.memory
        device = api.devices()[int(info.index)]
        self._context = self._make("clCreateContext", None, 1, ctypes.byref(device), None, None)
        self._queue = self._make("clCreateCommandQueueWithProperties", self._context, device, None)
        self._programs = programs(info, self._context, device)

    def alloc(self, nbytes: int) -> Memory:
        return Memory(self._make("clCreateBuffer", self._context, ctypes.c_uint64(0), api.Size(nbytes), None), nbytes)

    def free(self, buffer: Memory) -> None:
        self._call("clReleaseMemObject", buffer.handle)

    def upload(self, buffer: Memory, array: npt.NDArray[Any], offset: int = 0) -> None:
        self._copy("clEnqueueWriteBuffer", buffer, array, offset)

    def download(self, buffer: Memory, array: npt.NDArray[Any], offset: int = 0) -> None:
        self._copy("clEnqueueReadBuffer", buffer, array, offset)

    def record(self, launches: Sequence[Launch]) -> list[tuple[Any, ...]]:
        self._programs.prepare([launch.kernel for launch in launches])
        return [self._command(launch) for launch in launches]

    def submit(self, recording: list[tuple[Any, ...]]) -> None:
        for command in recording:
            self._call("clEnqueueNDRangeKernel", *command)
        self._call("clFlush", self._queue)

    def memory(self) -> tuple[int, int]:
        return self._total, 0

    def close(self) -> None:
        self._call("clReleaseCommandQueue", self._queue)
        self._call("clReleaseContext", self._context)

    def _command(self, launch: Launch) -> tuple[Any, ...]:
        """The arguments of clEnqueueNDRangeKernel."""
        kernel = self._make("clCreateKernel", self._programs[launch.kernel], launch.kernel.entry.encode())
        for index, value in enumerate(values(launch, lambda buffer: buffer.handle.value)):
            size = api.Size(ctypes.sizeof(value))
            self._call("clSetKernelArg", kernel, index, size, ctypes.byref(value))
        sizes = ((api.Size * 3)(*size) for size in (work_items(launch), launch.block))
        return self._queue, kernel, 3, None, *sizes, 0, None, None

    def _copy(self, routine: str, buffer: Memory, array: npt.NDArray[Any], offset: int) -> None:
        place, nbytes = api.Handle(array.ctypes.data), api.Size(array.nbytes)
        self._call(routine, self._queue, buffer.handle, 1, api.Size(offset), nbytes, place, 0, None, None)

    def _call(self, routine: str, *args: object) -> None:
        api.call(routine, *args, device=self._name)

    def _make(self, routine: str, *args: object) -> api.Handle:
        return api.make(routine, *args, device=self._name)
