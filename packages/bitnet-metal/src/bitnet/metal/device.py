"""An open Metal device: memory that CPU and GPU share, and launches that are encoded again for each step.

A launch is three messages: its pipeline, all its arguments at once, its size. Scalars stand in one buffer of the
recording, so that they are arguments like the others.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import DeviceError
from bitnet.core.gpu import Launch
from bitnet.core.gpu.failures import buffer_too_large, lost, out_of_memory
from bitnet.core.gpu.windows import memory_of
from bitnet.metal.compiler import Pipelines
from bitnet.metal.objc import MTLSize, NSRange, Objc

ALIGNMENT = 256
"""Bytes that a scalar's place in its buffer is a multiple of, on every Mac."""
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
"""Errors after which the work of the queue is not to be trusted: hung, at fault, shut out, or gone."""


@dataclass(frozen=True, slots=True, eq=False)
class MetalBuffer:
    """An MTLBuffer with shared storage, and where the CPU sees it; it ends at a multiple of 16 bytes."""

    handle: int
    address: int
    nbytes: int


class Recording:
    """Launches as messages take them; the buffer of their numbers goes to ``dropped`` once nobody has this any more.

    Attributes:
        commands: Of each launch its pipeline, its buffers and their offsets with their range, its groups and threads.
    """

    def __init__(self, driver: MetalDriver, launches: Sequence[Launch], pipelines: Pipelines) -> None:
        words = sum(isinstance(arg, np.generic) for launch in launches for arg in launch.args)
        scalars = driver.alloc(max(words, 1) * ALIGNMENT)
        driver.scalars[scalars.handle] = scalars
        weakref.finalize(self, driver.dropped.append, scalars.handle)
        numbers = np.zeros((max(words, 1), ALIGNMENT // 4), np.uint32)
        at = 0
        self.commands: list[tuple[Any, ...]] = []
        for launch in launches:
            handles, offsets = [], []
            for arg in launch.args:
                if isinstance(arg, np.generic):
                    numbers[at, 0] = np.frombuffer(arg.tobytes(), np.uint32)[0]
                    handles.append(scalars.handle)
                    offsets.append(at * ALIGNMENT)
                    at += 1
                else:
                    memory: Any = memory_of(arg)
                    handles.append(memory.handle)
                    offsets.append(getattr(arg, "offset", 0))
            count = len(handles)
            x, y, z = launch.block
            self.commands.append(
                (
                    ctypes.c_void_p(pipelines[launch.kernel, x * y * z]),
                    (ctypes.c_void_p * count)(*handles),
                    (ctypes.c_ulong * count)(*offsets),
                    NSRange(0, count),
                    MTLSize(*launch.grid),
                    MTLSize(x, y, z),
                )
            )
        driver.upload(scalars, numbers)


class MetalDriver:
    """Implements :class:`bitnet.core.gpu.Driver` with Metal.

    Args:
        device: The MTLDevice, which is the driver's from now on.
        name: What it is called in errors.

    Attributes:
        scalars: The recordings' buffers of scalars, by their handles.
        dropped: Those of recordings that nobody has any more.
    """

    def __init__(self, objc: Objc, device: int, name: str) -> None:
        self._objc, self._device, self._name = objc, device, name
        self._lock = threading.RLock()
        self._committed: list[int] = []
        self.scalars: dict[int, MetalBuffer] = {}
        self.dropped: list[int] = []
        self._largest = int(objc.send(device, "maxBufferLength"))
        self._pipelines = Pipelines(objc, device, name)
        self._queue = objc.send(device, "newCommandQueue")
        if not self._queue:
            objc.release(device)
            raise DeviceError("it gives no command queue.", device=name)
        self._message = {
            selector: objc.message(selector)
            for selector in (
                "setComputePipelineState:",
                "setBuffers:offsets:withRange:",
                "dispatchThreadgroups:threadsPerThreadgroup:",
            )
        }

    def alloc(self, nbytes: int) -> MetalBuffer:
        size = -(-nbytes // 16) * 16
        if size > self._largest:
            raise buffer_too_large(nbytes, self._largest, self._name)
        with self._lock, self._objc.pool():
            handle = self._objc.send(self._device, "newBufferWithLength:options:", size, 0)
            if not handle:
                raise out_of_memory(f"Metal gives no buffer of {nbytes:,} bytes.", self._name)
            return MetalBuffer(handle, self._objc.send(handle, "contents"), nbytes)

    def free(self, buffer: MetalBuffer) -> None:
        with self._lock:
            try:
                self._wait()
            finally:
                self._objc.release(buffer.handle)

    def upload(self, buffer: MetalBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._wait()  # what was submitted may still read what was there
            ctypes.memmove(buffer.address + offset, array.ctypes.data, array.nbytes)

    def download(self, buffer: MetalBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._wait()
            ctypes.memmove(array.ctypes.data, buffer.address + offset, array.nbytes)

    def record(self, launches: Sequence[Launch]) -> Recording:
        with self._lock:
            self._give_back()
            sizes = ((launch, launch.block[0] * launch.block[1] * launch.block[2]) for launch in launches)
            self._pipelines.prepare([(launch.kernel, threads) for launch, threads in sizes])
            return Recording(self, launches, self._pipelines)

    def submit(self, recording: Recording) -> None:
        (set_pipeline, pipeline), (set_buffers, buffers), (dispatch, threadgroups) = self._message.values()
        objc = self._objc
        with self._lock, objc.pool():
            work = objc.send(objc.send(self._queue, "commandBuffer"), "retain")
            self._committed.append(work)
            encoder = objc.send(work, "computeCommandEncoder")
            for state, handles, offsets, span, grid, block in recording.commands:
                set_pipeline(encoder, pipeline, state)
                set_buffers(encoder, buffers, handles, offsets, span)
                dispatch(encoder, threadgroups, grid, block)
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
                for scalars in self.scalars.values():  # a traceback may still have a recording
                    self._objc.release(scalars.handle)
                self.scalars.clear()
                self._pipelines.close()
                self._objc.release(self._queue)
                self._objc.release(self._device)

    def _give_back(self) -> None:
        """Free what belonged to recordings that nobody has any more."""
        while self.dropped:
            self.free(self.scalars.pop(self.dropped.pop()))

    def _wait(self) -> None:
        """Wait for all that was submitted.

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
        return lost(what, self._name, "Console's log") if code in LOST else DeviceError(what, device=self._name)
