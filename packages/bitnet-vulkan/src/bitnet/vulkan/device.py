"""An open Vulkan device: memory, and launches recorded once in command buffers that are submitted for every step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.cache import KernelCache
from bitnet.core.errors import DeviceError, DeviceLostError, OutOfMemoryError
from bitnet.core.gpu import Launch
from bitnet.core.gpu.probing import SMALLER
from bitnet.vulkan.driver import Functions, api, make
from bitnet.vulkan.hardware import Hardware, open_device
from bitnet.vulkan.memory import (
    COMPUTE_STAGE,
    SHADER_READ,
    SHADER_WRITE,
    TRANSFER_STAGE,
    TRANSFER_WRITE,
    Memory,
    VulkanBuffer,
    Window,
)
from bitnet.vulkan.pipelines import COMPUTE as COMPUTE_FLAG
from bitnet.vulkan.pipelines import STORAGE_BUFFER, Pipeline, Pipelines
from bitnet.vulkan.queue import PATIENCE, Queue

BIND_COMPUTE = 1
BUDGET = "VK_EXT_memory_budget"


class Recording:
    """A command buffer with its descriptor sets; given back to its driver when nobody has it any more."""

    def __init__(self, driver: VulkanDriver, commands: Any, pool: Any) -> None:
        self._driver, self.commands, self.pool = driver, commands, pool

    def __del__(self) -> None:
        self._driver.dropped.append((self.commands, self.pool))


class VulkanDriver:
    """Implements :class:`bitnet.core.gpu.Driver`.

    Args:
        name: The device's, for errors.
        patience: Seconds after which a device that does not answer counts as lost.
    """

    def __init__(self, hardware: Hardware, name: str, *, patience: float = PATIENCE) -> None:
        self.hardware, self._name = hardware, name
        self.dropped: list[tuple[Any, Any]] = []
        self._lock, self._lost = threading.RLock(), False
        self._device = open_device(hardware, name)
        self._vk = Functions(name, self._device)
        timeline = "timelineSemaphore" in hardware.features
        self._queue = Queue(self._vk, self._device, hardware.queue_family, timeline=timeline, patience=patience)
        self._memory = Memory(self._vk, self._device, hardware, self._queue)
        self._pipelines = Pipelines(self._vk, self._device, hardware, KernelCache())

    def alloc(self, nbytes: int) -> VulkanBuffer:
        with self._lock:
            return self._memory.alloc(nbytes)

    def free(self, buffer: VulkanBuffer) -> None:
        with self._ended() as alive:
            if alive:
                self._memory.free(buffer)

    def upload(self, buffer: VulkanBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._memory.upload(buffer, array, offset)

    def download(self, buffer: VulkanBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._memory.download(buffer, array, offset)

    def record(self, launches: Sequence[Launch]) -> Recording:
        with self._lock:
            self._give_back()
            prepared = [(launch, *_split(launch)) for launch in launches]
            pipelines = [
                self._pipelines.get(launch.kernel, launch.block[0], len(windows), len(scalars))
                for launch, windows, scalars in prepared
            ]
            self._pipelines.save()
            pool = self._descriptor_pool([len(windows) for _, windows, _ in prepared])
            commands = self._queue.command_buffer()
            recording = Recording(self, commands, pool)
            touched: dict[int, bool] = {}  # buffers used since the last barrier: written, or read only
            self._barrier(commands, COMPUTE_STAGE | TRANSFER_STAGE)
            for (launch, windows, scalars), pipeline in zip(prepared, pipelines, strict=True):
                if _meets(touched, windows, pipeline.written):
                    self._barrier(commands, COMPUTE_STAGE)
                    touched.clear()
                for at, window in enumerate(windows):
                    key = id(window.buffer)
                    touched[key] = touched.get(key, False) or at in pipeline.written
                self._dispatch(commands, launch, pipeline, self._descriptors(pool, pipeline, windows), scalars)
            self._vk.EndCommandBuffer(commands)
            return recording

    def submit(self, recording: Recording) -> None:
        with self._lock:
            self._queue.submit(recording.commands)

    def memory(self) -> tuple[int, int]:
        if BUDGET not in self.hardware.extensions:
            return self.hardware.memory, 0
        budget = make("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
        found = make("VkPhysicalDeviceMemoryProperties2", pNext=budget)
        self._vk.GetPhysicalDeviceMemoryProperties2(self.hardware.handle, found)
        heaps = found.memoryProperties.memoryHeaps
        own = [i for i in range(found.memoryProperties.memoryHeapCount) if heaps[i].flags & 1]
        largest = max(own, key=lambda i: heaps[i].size)
        return int(heaps[largest].size), max(0, int(budget.heapBudget[largest] - budget.heapUsage[largest]))

    def close(self) -> None:
        with self._ended() as alive:
            if alive:
                self._give_back()
                self._pipelines.close()
                self._memory.close()
                self._queue.close()
                self._vk.DestroyDevice(self._device, api().NULL)

    @contextmanager
    def _ended(self) -> Iterator[bool]:
        """When nothing runs any more; false where that cannot be had: what the device may be at work on has to stay."""
        with self._lock:
            alive = not self._lost
            if alive:
                try:
                    self._memory.wait()
                except DeviceLostError:
                    alive, self._lost = False, True
                except OutOfMemoryError:  # what still waits names them
                    alive = False
            yield alive

    def _give_back(self) -> None:
        """Free the recordings that nobody has any more."""
        if not self.dropped:
            return
        self._memory.wait()
        dropped, self.dropped = self.dropped, []
        self._queue.free([commands for commands, _ in dropped])
        for _, pool in dropped:
            self._vk.DestroyDescriptorPool(self._device, pool, api().NULL)

    def _descriptor_pool(self, counts: list[int]) -> Any:
        size = make("VkDescriptorPoolSize", type=STORAGE_BUFFER, descriptorCount=max(sum(counts), 1))
        info = make("VkDescriptorPoolCreateInfo", maxSets=max(len(counts), 1), poolSizeCount=1, pPoolSizes=[size])
        return self._vk.create("DescriptorPool", self._device, info)

    def _descriptors(self, pool: Any, pipeline: Pipeline, windows: list[Window]) -> Any:
        handle = api().new("VkDescriptorSet*")
        info = make(
            "VkDescriptorSetAllocateInfo", descriptorPool=pool, descriptorSetCount=1, pSetLayouts=[pipeline.sets]
        )
        self._vk.AllocateDescriptorSets(self._device, info, handle)
        writes = []
        for at, window in enumerate(windows):
            if window.size > self.hardware.largest_binding:
                raise DeviceError(
                    f"a kernel needs {window.size:,} bytes of one buffer; the device binds at most "
                    f"{self.hardware.largest_binding:,}.",
                    device=self._name,
                    hint=SMALLER,
                )
            shown = make("VkDescriptorBufferInfo", buffer=window.buffer.handle, offset=window.offset, range=window.size)
            write = make(
                "VkWriteDescriptorSet",
                dstSet=handle[0],
                dstBinding=at,
                descriptorCount=1,
                descriptorType=STORAGE_BUFFER,
                pBufferInfo=shown,
            )
            writes.append(write)
        array = api().new("VkWriteDescriptorSet[]", [write[0] for write in writes])
        self._vk.UpdateDescriptorSets(self._device, len(writes), array, 0, api().NULL)
        return handle

    def _dispatch(self, commands: Any, launch: Launch, pipeline: Pipeline, sets: Any, scalars: list[bytes]) -> None:
        vk, nothing = self._vk, api().NULL
        vk.CmdBindPipeline(commands, BIND_COMPUTE, pipeline.handle)
        vk.CmdBindDescriptorSets(commands, BIND_COMPUTE, pipeline.layout, 0, 1, sets, 0, nothing)
        if scalars:
            data = b"".join(scalars)
            vk.CmdPushConstants(commands, pipeline.layout, COMPUTE_FLAG, 0, len(data), data)
        vk.CmdDispatch(commands, *launch.grid)

    def _barrier(self, commands: Any, stages: int) -> None:
        """All that was written before, in these stages, is seen by all kernels after."""
        before = SHADER_WRITE | (TRANSFER_WRITE if stages & TRANSFER_STAGE else 0)
        barrier = make("VkMemoryBarrier", srcAccessMask=before, dstAccessMask=SHADER_READ | SHADER_WRITE)
        nothing = api().NULL
        self._vk.CmdPipelineBarrier(commands, stages, COMPUTE_STAGE, 0, 1, barrier, 0, nothing, 0, nothing)


def _split(launch: Launch) -> tuple[list[Window], list[bytes]]:
    """The launch's buffers, as the windows that its kernel sees, and its scalars' bytes."""
    windows, scalars = [], []
    for arg in launch.args:
        if isinstance(arg, VulkanBuffer):
            windows.append(Window(arg, 0, arg.size))
        elif isinstance(arg, Window):
            windows.append(arg)
        else:
            assert isinstance(arg, np.generic)
            scalars.append(arg.tobytes())
    return windows, scalars


def _meets(touched: dict[int, bool], windows: list[Window], written: frozenset[int]) -> bool:
    """Whether a launch reads what was written since the last barrier, or writes what was used since."""
    return any(
        touched.get(id(window.buffer), False) or (at in written and id(window.buffer) in touched)
        for at, window in enumerate(windows)
    )
