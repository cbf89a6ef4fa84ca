"""An open OpenCL device: memory, and launches that are enqueued for each step on one in-order queue.

If the device has command buffers, a recording is one of them; otherwise its launches are enqueued one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from bitnet.core.errors import DeviceError
from bitnet.core.gpu import Launch
from bitnet.core.gpu.clc import tried, work_items
from bitnet.core.gpu.drivers import failures
from bitnet.core.support.log import logger
from bitnet.opencl.command_buffer import CommandBuffer, functions
from bitnet.opencl.compiler import programs
from bitnet.opencl.features import abilities
from bitnet.opencl.launches import Command, Launches

P = ParamSpec("P")
T = TypeVar("T")

Status = cl.status_code
OUT_OF_MEMORY = {Status.MEM_OBJECT_ALLOCATION_FAILURE, Status.OUT_OF_RESOURCES, Status.OUT_OF_HOST_MEMORY}
ILLEGAL_ACCESS = -9999
"""NVIDIA's error code after a kernel's invalid memory access, for which OpenCL has no name."""
LOST = {Status.DEVICE_NOT_AVAILABLE, Status.INVALID_COMMAND_QUEUE, Status.INVALID_CONTEXT, ILLEGAL_ACCESS}


@dataclass(slots=True, eq=False)
class OpenCLBuffer:
    """A ``cl_mem``."""

    memory: cl.Buffer
    nbytes: int


class OpenCLDriver:
    """Implements :class:`bitnet.core.gpu.Driver` with pyopencl.

    Attributes:
        abilities: The device's abilities: those that it reports and that its compiler accepts.
    """

    def __init__(self, device: cl.Device, name: str) -> None:
        self._device, self._name = device, name
        self._context = cl.Context([device])
        self._queue = cl.CommandQueue(self._context, device)
        self._programs = programs(self._context, device, name)
        self._functions = functions(device)
        self._largest = int(device.max_mem_alloc_size)
        self.abilities = tried(abilities(device), self._programs.builds)

    def alloc(self, nbytes: int) -> OpenCLBuffer:
        if nbytes > self._largest:
            raise failures.buffer_too_large(nbytes, self._largest, self._name)
        memory = self._call(cl.Buffer, self._context, cl.mem_flags.READ_WRITE, nbytes)
        # OpenCL may defer allocation to the first use, inside a launch: touch the memory now, so that it fails here.
        self._call(cl.enqueue_fill_buffer, self._queue, memory, np.zeros(1, np.uint8), 0, min(nbytes, 4))
        return OpenCLBuffer(memory, nbytes)

    def free(self, buffer: OpenCLBuffer) -> None:
        buffer.memory.release()

    def upload(self, buffer: OpenCLBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        self._call(cl.enqueue_copy, self._queue, buffer.memory, array, dst_offset=offset, is_blocking=True)

    def download(self, buffer: OpenCLBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        self._call(cl.enqueue_copy, self._queue, array, buffer.memory, src_offset=offset, is_blocking=True)

    def fetch(self, buffer: OpenCLBuffer, array: npt.NDArray[Any]) -> Callable[[], None]:
        copy = self._call(cl.enqueue_copy, self._queue, array, buffer.memory, is_blocking=False)
        return lambda: self._call(copy.wait)

    def record(self, launches: Sequence[Launch]) -> CommandBuffer | Launches:
        self._programs.prepare([launch.kernel for launch in launches])
        commands = [self._prepare(launch) for launch in launches]
        if self._functions is not None and commands:
            try:
                return CommandBuffer(self._functions, self._queue, commands)
            except cl.Error as error:
                logger.warning("%s: its command buffers are not used: %s", self._name, error)
                self._functions = None
        return Launches(self._queue, commands)

    def submit(self, recording: CommandBuffer | Launches) -> None:
        self._call(recording.enqueue)

    def memory(self) -> tuple[int, int]:
        return int(self._device.global_mem_size), 0

    def close(self) -> None:
        with contextlib.suppress(cl.Error):  # a lost device, which was reported to whoever waited for its work
            self._queue.finish()

    def _prepare(self, launch: Launch) -> Command:
        kernel = cl.Kernel(self._programs[launch.kernel], launch.kernel.entry)
        arguments: list[Any] = [a.memory if isinstance(a, OpenCLBuffer) else a for a in launch.args]
        self._call(kernel.set_args, *arguments)
        return Command(kernel, work_items(launch), launch.block)

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call OpenCL; its errors become ours, named as the specification names them."""
        try:
            return function(*args, **kwargs)
        except cl.Error as error:
            name = Status.to_string(error.code, "error %d")  # type: ignore[operator]  # pyopencl adds it at run time
            what = f"{error.routine} failed with {name}."
            if isinstance(error, cl.MemoryError) or error.code in OUT_OF_MEMORY:
                raise failures.out_of_memory(what, self._name) from error
            if error.code in LOST:
                raise failures.lost(what, self._name) from error
            raise DeviceError(what, device=self._name) from error
