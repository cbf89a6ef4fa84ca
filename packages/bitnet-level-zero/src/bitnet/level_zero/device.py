"""An open Level Zero device: unified memory, and closed command lists that are resubmitted for each step.

A list has a barrier after each launch, because each reads what the previous one wrote. There are no events.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from bitnet.core.errors import DeviceError
from bitnet.core.gpu import Launch
from bitnet.core.gpu.clc import tried, values
from bitnet.core.gpu.drivers.failures import buffer_too_large
from bitnet.core.support.cache import KernelCache
from bitnet.level_zero.compiler import Compiler
from bitnet.level_zero.hardware import Hardware
from bitnet.level_zero.imports import host_imports
from bitnet.level_zero.loader import LevelZero
from bitnet.level_zero.structures import (
    ContextDesc,
    DeviceAllocDesc,
    GroupCount,
    HostAllocDesc,
    ListDesc,
    QueueDesc,
)

ALIGNMENT = 64
"""Alignment of memory in bytes: a cache line."""
READ_ALIGNMENT = 32
"""Minimum alignment in bytes of host memory that kernels read: one load has a row's codes of one step."""
SYNCHRONOUS, ASYNCHRONOUS = 1, 2
"""Modes of a queue."""
FOREVER = 2**64 - 1


@dataclass(slots=True, eq=False)
class Memory:
    """Device memory; on an integrated device, memory that the host can also read and write.

    Attributes:
        adopted: The array whose memory this is; None if it was allocated.
    """

    pointer: c_void_p
    nbytes: int
    adopted: npt.NDArray[Any] | None = None


class Recording:
    """A closed command list."""

    def __init__(self, handle: c_void_p) -> None:
        self.handle = handle


class LevelZeroDriver:
    """Implements :class:`bitnet.core.gpu.Driver`.

    Attributes:
        abilities: What the kernels may use of the device.
    """

    def __init__(self, level_zero: LevelZero, hardware: Hardware, name: str) -> None:
        self._level_zero = level_zero.named(name)
        self._hardware, self._name = hardware, name
        self._largest = int(hardware.properties.largest_alloc)
        make = self._level_zero.make
        self._context = make("zeContextCreate", hardware.driver, byref(ContextDesc()))
        queue = QueueDesc(ordinal=hardware.ordinal, mode=ASYNCHRONOUS)
        copies = QueueDesc(ordinal=hardware.ordinal, mode=SYNCHRONOUS)
        self._queue = make("zeCommandQueueCreate", self._context, hardware.device, byref(queue))
        self._copies = make("zeCommandListCreateImmediate", self._context, hardware.device, byref(copies))
        self._compiler = Compiler(self._level_zero, self._context, hardware, name, KernelCache())
        self._compiler.use_dot_products()
        self.abilities = tried(hardware.abilities, self._compiler.builds)
        wanted = hardware.integrated and not hardware.reads_host
        self._imports = host_imports(self._level_zero, hardware.driver) if wanted else None
        self._recordings: weakref.WeakSet[Recording] = weakref.WeakSet()
        self._dropped: deque[c_void_p] = deque()
        """Lists that nobody refers to any more but that may still run."""
        self._closed = False
        self._lock = threading.RLock()  # kernels, the queue and the list for copies serve one thread at a time

    def alloc(self, nbytes: int) -> Memory:
        if nbytes > self._largest:
            raise buffer_too_large(nbytes, self._largest, self._name)
        place = (nbytes, ALIGNMENT, self._hardware.device)
        descs = [byref(DeviceAllocDesc())]
        if self._hardware.integrated:
            descs.append(byref(HostAllocDesc()))
        name = "zeMemAllocShared" if self._hardware.integrated else "zeMemAllocDevice"
        with self._lock:
            return Memory(self._level_zero.make(name, self._context, *descs, *place), nbytes)

    def free(self, buffer: Memory) -> None:
        with self._lock:
            with contextlib.suppress(DeviceError):  # a lost device, which was reported to whoever waited for its work
                self._wait()
            if buffer.adopted is None:
                self._level_zero.status("zeMemFree", self._context, buffer.pointer)
            elif self._imports is not None:
                self._imports.give_back(buffer.pointer)

    def adopt(self, array: npt.NDArray[Any]) -> Memory | None:
        """The array's own memory, on integrated devices that can read all host memory or whose driver can import it."""
        pointer = c_void_p(array.ctypes.data)
        if not (self._hardware.integrated and array.nbytes) or array.ctypes.data % READ_ALIGNMENT:
            return None
        with self._lock:
            if not self._hardware.reads_host and not (self._imports and self._imports.take(pointer, array.nbytes)):
                return None
        return Memory(pointer, array.nbytes, array)

    def upload(self, buffer: Memory, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._wait()
            self._copy((buffer.pointer.value or 0) + offset, array.ctypes.data, array.nbytes)

    def download(self, buffer: Memory, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._wait()
            self._copy(array.ctypes.data, (buffer.pointer.value or 0) + offset, array.nbytes)

    def record(self, launches: Sequence[Launch]) -> Recording:
        with self._lock:
            self._compiler.prepare([launch.kernel for launch in launches])
            desc = ListDesc(ordinal=self._hardware.ordinal)
            handle = self._level_zero.make("zeCommandListCreate", self._context, self._hardware.device, byref(desc))
            recording = Recording(handle)
            self._recordings.add(recording)
            weakref.finalize(recording, self._dropped.append, handle)
            for launch in launches:
                self._append(handle, launch)
                self._level_zero.call("zeCommandListAppendBarrier", handle, None, 0, None)
            self._level_zero.call("zeCommandListClose", handle)
            return recording

    def submit(self, recording: Recording) -> None:
        with self._lock:
            lists = byref(recording.handle)
            self._level_zero.call("zeCommandQueueExecuteCommandLists", self._queue, 1, lists, None)

    def memory(self) -> tuple[int, int]:
        return self._hardware.memory, 0

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(DeviceError):
            self._wait()
        for recording in self._recordings:
            self._level_zero.status("zeCommandListDestroy", recording.handle)
        self._compiler.close()
        self._level_zero.status("zeCommandListDestroy", self._copies)
        self._level_zero.status("zeCommandQueueDestroy", self._queue)
        self._level_zero.status("zeContextDestroy", self._context)

    def _append(self, handle: c_void_p, launch: Launch) -> None:
        kernel = self._compiler.kernel(launch.kernel)
        call = self._level_zero.call
        call("zeKernelSetGroupSize", kernel, *launch.block)
        for i, value in enumerate(values(launch, _address)):
            call("zeKernelSetArgumentValue", kernel, i, ctypes.sizeof(value), byref(value))
        groups = GroupCount(*launch.grid)
        call("zeCommandListAppendLaunchKernel", handle, kernel, byref(groups), None, 0, None)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        if not nbytes:
            return
        if self._hardware.integrated:
            ctypes.memmove(to, source, nbytes)
            return
        arguments = (c_void_p(to), c_void_p(source), nbytes, None, 0, None)
        self._level_zero.call("zeCommandListAppendMemoryCopy", self._copies, *arguments)

    def _wait(self) -> None:
        """Wait for all submitted work."""
        self._level_zero.call("zeCommandQueueSynchronize", self._queue, c_uint64(FOREVER))
        while self._dropped:
            self._level_zero.status("zeCommandListDestroy", self._dropped.popleft())


def _address(buffer: Any) -> int:
    """Where a launch's buffer lies in the device's memory."""
    return int(buffer.pointer.value or 0)
