"""An open Metal device: memory shared by CPU and GPU, and a command buffer for each step.

A recording's scalars are stored in a buffer, so that they are passed like other arguments.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import DeviceError
from bitnet.core.gpu import KernelSpec, Launch
from bitnet.core.gpu.drivers.failures import buffer_too_large, lost, out_of_memory
from bitnet.core.gpu.drivers.windows import Window, memory_of
from bitnet.core.hal import DeviceInfo
from bitnet.core.support.mapped import is_mapped
from bitnet.metal.archive import Archive
from bitnet.metal.compiler import Kernel, Pipelines
from bitnet.metal.objc import MTLSize, Objc
from bitnet.metal.recording import Command, IndirectCommands, KeptMessages, Recording
from bitnet.metal.residency import Resident

ALIGNMENT = 256
"""Alignment of a scalar in its buffer, in bytes, on every Mac."""
VECTOR = 16
"""Bytes that kernels read at a time: buffers begin and end at multiples of them."""
MIN_ADOPTED = 1 << 14
"""Bytes of the smallest array whose own memory is used: a buffer of whole pages saves nothing for less."""
COMPLETED = 4
"""MTLCommandBufferStatusCompleted."""
ERRORS = {
    1: "MTLCommandBufferErrorInternal",
    2: "MTLCommandBufferErrorTimeout",
    3: "MTLCommandBufferErrorPageFault",
    4: "MTLCommandBufferErrorAccessRevoked",
    7: "MTLCommandBufferErrorNotPermitted",
    8: "MTLCommandBufferErrorOutOfMemory",
    9: "MTLCommandBufferErrorInvalidResource",
    10: "MTLCommandBufferErrorMemoryless",
    11: "MTLCommandBufferErrorDeviceRemoved",
    12: "MTLCommandBufferErrorStackOverflow",
}
OUT_OF_MEMORY = 8
LOST = {1, 2, 3, 4, 11}
"""Errors after which the queue's results cannot be trusted: timeout, page fault, access revoked, device removed."""


@dataclass(frozen=True, slots=True, eq=False)
class MetalBuffer:
    """``nbytes`` of an MTLBuffer with shared storage, and where the CPU sees them; it ends at a multiple of 16 bytes.

    Attributes:
        offset: Bytes before them in the MTLBuffer.
        adopted: The array whose own memory it is, if it is one's.
    """

    handle: int
    address: int
    nbytes: int
    offset: int = 0
    adopted: npt.NDArray[Any] | None = None


class MetalDriver:
    """Implements :class:`bitnet.core.gpu.Driver` with Metal.

    Args:
        device: The MTLDevice, which the driver owns from now on.
        info: The probe's description of it.

    Attributes:
        graphs: Whether new recordings use indirect command buffers; if false, launches are encoded again for each step.
    """

    def __init__(self, objc: Objc, device: int, info: DeviceInfo) -> None:
        self._objc, self._device, self._name = objc, device, info.name
        self._lock = threading.RLock()
        self._committed: list[int] = []
        self._recorded: set[tuple[int, int]] = set()
        self._dropped: list[tuple[int, int]] = []
        """What recordings own; what those owned that nobody has any more."""
        self.graphs = False
        self._largest = int(objc.send(device, "maxBufferLength"))
        self._queue = objc.send(device, "newCommandQueue")
        if not self._queue:
            objc.release(device)
            raise DeviceError("it gives no command queue.", device=info.name)
        self._resident = Resident(objc, device, self._queue, info.name)
        self._archive = Archive(objc, device, info.name, gpu=info.description, system=info.driver_version)
        self._pipelines = Pipelines(objc, device, info.name, self._archive)

    def alloc(self, nbytes: int) -> MetalBuffer:
        size = -(-nbytes // VECTOR) * VECTOR
        if size > self._largest:
            raise buffer_too_large(nbytes, self._largest, self._name)
        with self._lock, self._objc.pool():
            handle = self._objc.send(self._device, "newBufferWithLength:options:", size, 0)
            if not handle:
                raise out_of_memory(f"Metal gives no buffer of {nbytes:,} bytes.", self._name)
            self._resident.add(handle)
            return MetalBuffer(handle, self._objc.send(handle, "contents"), nbytes)

    def free(self, buffer: MetalBuffer) -> None:
        with self._lock:
            try:
                self._wait()
            finally:
                self._release_buffer(buffer.handle)

    def adopt(self, array: npt.NDArray[Any]) -> MetalBuffer | None:
        """The array's own memory, in a buffer of the pages that it lies in: of arrays that are mapped from a file."""
        address, page = array.ctypes.data, mmap.PAGESIZE
        if array.nbytes < MIN_ADOPTED or address % VECTOR or not is_mapped(array):
            return None
        first = address // page * page
        size = -(-(address + array.nbytes) // page) * page - first
        if size > self._largest:
            return None
        make = "newBufferWithBytesNoCopy:length:options:deallocator:"
        with self._lock, self._objc.pool():
            handle = self._objc.send(self._device, make, first, size, 0, None)
            if not handle:
                return None
            self._resident.add(handle)
        return MetalBuffer(handle, address, array.nbytes, address - first, array)

    def upload(self, buffer: MetalBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._wait()  # submitted work may still read the old contents
            ctypes.memmove(buffer.address + offset, array.ctypes.data, array.nbytes)

    def download(self, buffer: MetalBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._wait()
            ctypes.memmove(array.ctypes.data, buffer.address + offset, array.nbytes)

    def prepare(self, kernel: KernelSpec, threads: int) -> None:
        """Compile a kernel, for threadgroups of a number of threads, ahead of its first launch.

        Raises:
            KernelCompileError: It cannot be.
        """
        with self._lock:
            self._pipelines.prepare([Kernel(kernel, threads, self.graphs)])

    def record(self, launches: Sequence[Launch]) -> Recording:
        with self._lock:
            self._give_back()
            self._pipelines.prepare([self._kernel(launch) for launch in launches])
            words = sum(isinstance(arg, np.generic) for launch in launches for arg in launch.args)
            numbers = np.zeros((max(words, 1), ALIGNMENT // 4), np.uint32)
            scalars = self.alloc(numbers.nbytes)
            try:
                commands = self._commands(launches, scalars, numbers)
                self.upload(scalars, numbers)
                kept: KeptMessages | IndirectCommands
                if self.graphs and commands:
                    kept = IndirectCommands(self._objc, self._device, self._name, commands)
                else:
                    kept = KeptMessages(self._objc, commands)
            except BaseException:
                self.free(scalars)
                raise
            recording = Recording(kept, scalars.handle)
            self._recorded.add(recording.owned)
            weakref.finalize(recording, self._dropped.append, recording.owned)
            return recording

    def submit(self, recording: Recording) -> None:
        objc = self._objc
        with self._lock, objc.pool():
            self._resident.settle()
            work = objc.send(objc.send(self._queue, "commandBuffer"), "retain")
            self._committed.append(work)
            encoder = objc.send(work, "computeCommandEncoder")
            recording.encode(encoder)
            objc.send(encoder, "endEncoding")
            objc.send(work, "commit")

    def memory(self) -> tuple[int, int]:
        with self._lock:
            total = int(self._objc.send(self._device, "recommendedMaxWorkingSetSize"))
            return total, max(total - int(self._objc.send(self._device, "currentAllocatedSize")), 0)

    def close(self) -> None:
        with self._lock:
            try:
                self._wait()
            finally:
                for handle in chain.from_iterable(self._recorded):  # a traceback may still have a recording
                    self._objc.release(handle)
                self._recorded.clear()
                self._pipelines.close()
                self._archive.close()
                self._objc.release(self._queue)
                self._resident.close()
                self._objc.release(self._device)

    def _kernel(self, launch: Launch) -> Kernel:
        return Kernel(launch.kernel, math.prod(launch.block), self.graphs)

    def _commands(
        self, launches: Sequence[Launch], scalars: MetalBuffer, numbers: npt.NDArray[np.uint32]
    ) -> list[Command]:
        """The launches, and in ``numbers`` their scalars, each in a row of its own."""
        rows = iter(range(len(numbers)))
        commands = []
        for launch in launches:
            buffers, offsets = [], []
            for arg in launch.args:
                if isinstance(arg, np.generic):
                    row = next(rows)
                    numbers[row, 0] = np.frombuffer(arg.tobytes(), np.uint32)[0]
                    buffers.append(scalars.handle)
                    offsets.append(row * ALIGNMENT)
                else:
                    memory: Any = memory_of(arg)
                    buffers.append(memory.handle)
                    offsets.append(memory.offset + (arg.offset if isinstance(arg, Window) else 0))
            pipeline = self._pipelines[self._kernel(launch)]
            commands.append(Command(pipeline, buffers, offsets, MTLSize(*launch.grid), MTLSize(*launch.block)))
        return commands

    def _give_back(self) -> None:
        """Release the objects of recordings that nobody refers to any more."""
        while self._dropped:
            self._wait()
            owned = self._dropped.pop()
            if owned in self._recorded:
                self._recorded.remove(owned)
                launches, scalars = owned
                self._objc.release(launches)
                self._release_buffer(scalars)

    def _release_buffer(self, handle: int) -> None:
        self._resident.remove(handle)
        self._objc.release(handle)

    def _wait(self) -> None:
        """Wait for all submitted work.

        Raises:
            OutOfMemoryError, DeviceLostError, DeviceError: Some of it failed.
        """
        if not self._committed:
            return
        objc, failed = self._objc, None
        with objc.pool():
            objc.send(self._committed[-1], "waitUntilCompleted")  # a queue's work ends in order
            for work in self._committed:
                if failed is None and objc.send(work, "status") != COMPLETED:
                    failed = self._failure(objc.send(work, "error"))
                objc.release(work)
            self._committed.clear()
        if failed is not None:
            raise failed

    def _failure(self, error: int | None) -> DeviceError:
        code = int(self._objc.send(error, "code")) if error else 0
        said = self._objc.text(self._objc.send(error, "localizedDescription")) if error else ""
        what = f"a step failed with {ERRORS.get(code, f'error {code}')}: {said or 'no reason given'}"
        if code == OUT_OF_MEMORY:
            return out_of_memory(what, self._name)
        if code in LOST:
            return lost(what, self._name, "Restart the program; see Console's log.")
        return DeviceError(what, device=self._name)
