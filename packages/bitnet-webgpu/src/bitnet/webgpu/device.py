"""An open WebGPU device: memory, and launches that are prepared once and encoded for each step."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import wgpu
from wgpu.backends.wgpu_native import ffi, lib

from bitnet.core.gpu import Launch
from bitnet.core.gpu.drivers.failures import buffer_too_large
from bitnet.core.gpu.drivers.windows import bound
from bitnet.webgpu.compiler import Compiler, has_int8_dot
from bitnet.webgpu.failures import RAISED, failure
from bitnet.webgpu.source import INT8_DOT, SUBGROUPS

LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-workgroup-storage-size",
    "max-compute-workgroup-size-x",
    "max-compute-invocations-per-workgroup",
)
"""Limits that are requested at the adapter's values; for the others, WebGPU's defaults suffice."""
UPLOAD = 32 << 20
"""Bytes handed to wgpu at once: it copies them to memory of its own first."""


@dataclass(frozen=True, slots=True, eq=False)
class WebGPUBuffer:
    """``nbytes`` of a ``GPUBuffer``, which ends at a multiple of 16 bytes."""

    memory: wgpu.GPUBuffer
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Dispatch:
    pipeline: wgpu.GPUComputePipeline
    group: wgpu.GPUBindGroup
    grid: tuple[int, int, int]


class WebGPUDriver:
    """Implements :class:`bitnet.core.gpu.Driver` with wgpu.

    Args:
        without: Features that the kernels must not use even if the device has them.
    """

    def __init__(self, adapter: wgpu.GPUAdapter, name: str, without: Collection[str] = ()) -> None:
        self._name = name
        self._lock = threading.RLock()
        limits = {limit: adapter.limits[limit] for limit in LIMITS}
        wanted = ["subgroup"] if "subgroup" in adapter.features else []
        with self._guarded():
            self._device = adapter.request_device_sync(required_features=wanted, required_limits=limits)
        features = {SUBGROUPS} if wanted else set()
        features |= {INT8_DOT} if has_int8_dot(self._device) else set()
        self._compiler = Compiler(self._device, name, features - set(without))
        self.limits: dict[str, int] = dict(self._device.limits)

    def alloc(self, nbytes: int) -> WebGPUBuffer:
        size = -(-nbytes // 16) * 16
        if size > self.limits["max-buffer-size"]:
            raise buffer_too_large(nbytes, self.limits["max-buffer-size"], self._name)
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        with self._guarded():
            return WebGPUBuffer(self._device.create_buffer(size=size, usage=usage), nbytes)

    def free(self, buffer: WebGPUBuffer) -> None:
        with self._guarded():
            buffer.memory.destroy()

    def upload(self, buffer: WebGPUBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        data = memoryview(array).cast("B")  # type: ignore[arg-type]
        whole = len(data) // 4 * 4
        queue = self._device.queue
        with self._guarded():
            for at in range(0, whole, UPLOAD):
                queue.write_buffer(buffer.memory, offset + at, data[at : min(at + UPLOAD, whole)])
                if whole > UPLOAD:
                    queue.submit([])  # lets wgpu give its copy back before the next
            if whole < len(data):  # words are written whole: the rest of the last one is the buffer's padding
                last = bytes(data[whole:]).ljust(4, b"\0")
                queue.write_buffer(buffer.memory, offset + whole, last)

    def download(self, buffer: WebGPUBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._guarded():
            size = -(-array.nbytes // 4) * 4
            data = self._device.queue.read_buffer(buffer.memory, offset, size)
        array.view(np.uint8).reshape(-1)[:] = np.frombuffer(data, np.uint8, array.nbytes)

    def record(self, launches: Sequence[Launch]) -> list[_Dispatch]:
        with self._guarded():
            return [self._prepare(launch) for launch in launches]

    def submit(self, recording: list[_Dispatch]) -> None:
        # The library's own calls, as those of wgpu-py take twice the time; what they refuse, finish() raises.
        set_pipeline, set_group = lib.wgpuComputePassEncoderSetPipeline, lib.wgpuComputePassEncoderSetBindGroup
        dispatch, none = lib.wgpuComputePassEncoderDispatchWorkgroups, ffi.NULL
        with self._guarded():
            encoder = self._device.create_command_encoder()
            work = encoder.begin_compute_pass()
            handle = work._internal
            for item in recording:
                set_pipeline(handle, item.pipeline._internal)
                set_group(handle, 0, item.group._internal, 0, none)
                dispatch(handle, *item.grid)
            work.end()
            self._device.queue.submit([encoder.finish()])

    def memory(self) -> tuple[int, int]:
        return 0, 0  # WebGPU does not report it

    def close(self) -> None:
        with self._guarded():
            self._device.destroy()

    def _prepare(self, launch: Launch) -> _Dispatch:
        x, y, z = launch.block
        made = self._compiler.pipeline(launch.kernel, x * y * z)
        largest, resources = self.limits["max-storage-buffer-binding-size"], []
        for buffer in launch.buffers:
            memory, offset, size = bound(buffer, largest, launch.kernel.entry, self._name)
            resources.append({"buffer": memory.memory, "offset": offset, "size": size})
        if words := launch.scalars:
            data = words.ljust(-(-len(words) // 16) * 16, b"\0")
            uniform = self._device.create_buffer_with_data(data=data, usage=wgpu.BufferUsage.UNIFORM)
            resources.append({"buffer": uniform, "offset": 0, "size": len(data)})
        entries = [{"binding": i, "resource": resource} for i, resource in enumerate(resources)]
        group = self._device.create_bind_group(layout=made.layout, entries=entries)
        return _Dispatch(made.pipeline, group, launch.grid)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Exclude other threads, and convert wgpu's errors to bitnet's."""
        with self._lock:
            try:
                yield
            except RAISED as error:
                raise failure(error, self._name) from error
