"""WebGPU of a browser, reached from Pyodide: a driver on ``navigator.gpu``, without wgpu.

Kernels compile, and what the GPU has computed arrives, only while the event loop runs. So reads begin with a step and
are awaited, and what is submitted while kernels compile is held until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import js
import numpy as np
import numpy.typing as npt
from pyodide.code import run_js
from pyodide.ffi import JsException, can_run_sync, create_proxy, run_sync, to_js

from bitnet.core.errors import BitNetError, DeviceError, KernelCompileError
from bitnet.core.gpu import Launch
from bitnet.core.gpu.drivers.failures import buffer_too_large, lost, out_of_memory
from bitnet.core.gpu.drivers.windows import bound
from bitnet.webgpu.browser_kernels import BrowserKernels, js_object, message
from bitnet.webgpu.source import INT8_DOT, SUBGROUPS

LIMITS = {
    "max-buffer-size": "maxBufferSize",
    "max-storage-buffer-binding-size": "maxStorageBufferBindingSize",
    "max-compute-workgroup-storage-size": "maxComputeWorkgroupStorageSize",
    "max-compute-workgroup-size-x": "maxComputeWorkgroupSizeX",
    "max-compute-invocations-per-workgroup": "maxComputeInvocationsPerWorkgroup",
}
"""Limits that are requested at the adapter's values: their names in this package, and in browsers."""
UPLOAD = 32 << 20
"""Bytes copied at once from Python's memory to JavaScript's."""
LOSS_SECONDS = 0.2
"""Seconds in which a device that is lost says so, after its first call fails."""
_MAP_READ, _COPY_SRC, _COPY_DST, _UNIFORM, _STORAGE = 0x1, 0x4, 0x8, 0x40, 0x80
_REPLAY = """
(device, recording) => {
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  for (const { kernel, group, grid } of recording) {
    pass.setPipeline(kernel.pipeline);
    pass.setBindGroup(0, group);
    pass.dispatchWorkgroups(...grid);
  }
  pass.end();
  device.queue.submit([encoder.finish()]);
}
"""
_COPY = """
(device, source, offset, target, size) => {
  const encoder = device.createCommandEncoder();
  encoder.copyBufferToBuffer(source, offset, target, 0, size);
  device.queue.submit([encoder.finish()]);
}
"""


@dataclass(frozen=True, slots=True, eq=False)
class BrowserBuffer:
    """``nbytes`` of a ``GPUBuffer``, which ends at a multiple of 16 bytes."""

    memory: Any
    nbytes: int


class BrowserDriver:
    """Implements :class:`bitnet.core.gpu.Driver` and :class:`bitnet.core.gpu.Fetching` with a ``GPUDevice``."""

    def __init__(self, device: Any, name: str, features: Collection[str]) -> None:
        self._device, self._name = device, name
        self.limits = {ours: int(getattr(device.limits, theirs)) for ours, theirs in LIMITS.items()}
        self._replay, self._copy = run_js(_REPLAY), run_js(_COPY)
        self._kernels = BrowserKernels(device, name, features)
        self._held: list[Callable[[], None]] = []
        self._arriving: list[Awaitable[Any]] = []
        self._closed = False
        self._failure: BitNetError | None = None
        self._proxies = [create_proxy(self._failed), create_proxy(self._lost)]
        device.addEventListener("uncapturederror", self._proxies[0])
        device.lost.then(self._proxies[1])

    def alloc(self, nbytes: int) -> BrowserBuffer:
        size = -(-nbytes // 16) * 16
        if size > self.limits["max-buffer-size"]:
            raise buffer_too_large(nbytes, self.limits["max-buffer-size"], self._name)
        return BrowserBuffer(self._buffer(size, _STORAGE | _COPY_SRC | _COPY_DST), nbytes)

    def free(self, buffer: BrowserBuffer) -> None:
        self._in_order(buffer.memory.destroy)  # what is held may use it

    def upload(self, buffer: BrowserBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        data = array.reshape(-1).view(np.uint8)
        for at in range(0, len(data), UPLOAD):
            part = data[at : at + UPLOAD]
            if len(part) % 4:  # words are written whole: the rest of the last one is the buffer's padding
                part = np.concatenate([part, np.zeros(-len(part) % 4, np.uint8)])
            copied = to_js(part.data)
            self._in_order(partial(self._device.queue.writeBuffer, buffer.memory, offset + at, copied))

    def fetch(self, buffer: BrowserBuffer, array: npt.NDArray[Any], offset: int = 0) -> Callable[[], None]:
        size = -(-array.nbytes // 4) * 4
        staging = self._buffer(size, _MAP_READ | _COPY_DST)
        self._in_order(partial(self._copy_out, buffer, offset, staging, size))
        return partial(self._take, staging, array)

    async def arrival(self, progress: Callable[[int, int], None] | None = None) -> None:
        try:
            while self._kernels.compiling:  # another task may begin more meanwhile
                await self._kernels.compiled(progress or (lambda done, total: None))
                held, self._held = self._held, []
                for call in held:
                    call()
            arriving = tuple(self._arriving)  # which another task may wait for, too
            for one in arriving:
                await one
            self._arriving = [one for one in self._arriving if not any(one is done for done in arriving)]
        except JsException as error:
            await asyncio.sleep(LOSS_SECONDS)  # a lost device fails its copies before it says that it is lost
            self._raise()
            raise DeviceError(message(error), device=self._name) from None
        except KernelCompileError:  # also what a lost device's kernels end with
            await asyncio.sleep(LOSS_SECONDS)
            self._raise()
            raise
        self._raise()

    def download(self, buffer: BrowserBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        self.fetch(buffer, array, offset)()

    def record(self, launches: Sequence[Launch]) -> Any:
        return to_js([self._prepared(launch) for launch in launches])

    def submit(self, recording: Any) -> None:
        self._in_order(partial(self._replay, self._device, recording))

    def memory(self) -> tuple[int, int]:
        return 0, 0  # WebGPU does not report it

    def close(self) -> None:
        self._closed = True
        self._device.removeEventListener("uncapturederror", self._proxies[0])
        self._device.destroy()

    def _buffer(self, size: int, usage: int) -> Any:
        return self._device.createBuffer(js_object({"size": size, "usage": usage}))

    def _in_order(self, call: Callable[[], None]) -> None:
        """Call it after all earlier calls: now, or once the kernels have compiled."""
        if self._kernels.compiling:
            self._held.append(call)
        else:
            call()

    def _copy_out(self, buffer: BrowserBuffer, offset: int, staging: Any, size: int) -> None:
        self._copy(self._device, buffer.memory, offset, staging, size)
        self._arriving.append(staging.mapAsync(_MAP_READ))

    def _take(self, staging: Any, array: npt.NDArray[Any]) -> None:
        if staging.mapState != "mapped":
            if not can_run_sync():
                raise DeviceError(
                    "this browser cannot read it here, as WebAssembly cannot wait for JavaScript.",
                    device=self._name,
                    hint="Leave out options that choose tokens on the host, such as response formats, or use the CPU.",
                )
            run_sync(self.arrival())
        data = js.Uint8Array.new(staging.getMappedRange()).to_bytes()
        array.view(np.uint8).reshape(-1)[:] = np.frombuffer(data, np.uint8, array.nbytes)
        staging.destroy()

    def _prepared(self, launch: Launch) -> Any:
        x, y, z = launch.block
        kernel, layout = self._kernels.kernel(launch.kernel, x * y * z)
        largest, resources = self.limits["max-storage-buffer-binding-size"], []
        for buffer in launch.buffers:
            memory, offset, size = bound(buffer, largest, launch.kernel.entry, self._name)
            resources.append({"buffer": memory.memory, "offset": offset, "size": size})
        if words := launch.scalars:
            data = np.frombuffer(words.ljust(-(-len(words) // 16) * 16, b"\0"), np.uint8)
            uniform = BrowserBuffer(self._buffer(len(data), _UNIFORM | _COPY_DST), len(data))
            self.upload(uniform, data)
            resources.append({"buffer": uniform.memory, "offset": 0, "size": len(data)})
        entries = [{"binding": i, "resource": resource} for i, resource in enumerate(resources)]
        group = self._device.createBindGroup(js_object({"layout": layout, "entries": entries}))
        return js_object({"kernel": kernel, "group": group, "grid": launch.grid})

    def _failed(self, event: Any) -> None:
        """Note the first error that the browser reports; the next wait raises it."""
        kind, text = event.error.constructor.name, message(event.error)
        if self._failure is None:
            if kind == "GPUOutOfMemoryError":
                self._failure = out_of_memory(text, self._name)
            elif "WGSL" in text or "ShaderModule" in text or "shader" in text:
                self._failure = KernelCompileError("a kernel does not compile.", device=self._name, log=text)
            else:
                self._failure = DeviceError(text, device=self._name)

    def _lost(self, info: Any) -> None:
        if not self._closed:
            self._failure = lost(
                f"the browser's GPU is lost: {message(info)}",
                self._name,
                "Load the model again with `await load_model_async(...)`.",
            )

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


def features_of(adapter: Any) -> set[str]:
    """Those of INT8_DOT and SUBGROUPS that the kernels may use on an adapter."""
    language = js.navigator.gpu.wgslLanguageFeatures
    found = {INT8_DOT} if language.has("packed_4x8_integer_dot_product") else set[str]()
    return found | ({SUBGROUPS} if adapter.features.has("subgroups") and language.has("subgroup_id") else set())
