"""An open Vulkan device: memory, and command buffers that are recorded once and submitted for every step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from bitnet.core.errors import DeviceLostError, OutOfMemoryError
from bitnet.core.gpu import Launch
from bitnet.core.gpu.drivers.hazards import Hazards
from bitnet.core.gpu.drivers.windows import bound
from bitnet.core.support.cache import KernelCache
from bitnet.vulkan.driver import Functions, api, make
from bitnet.vulkan.hardware import BUDGET, COMPUTE_SHADER, Hardware, memory, open_device
from bitnet.vulkan.memory import Memory, VulkanBuffer
from bitnet.vulkan.pipelines import STORAGE_BUFFER, Pipeline, Pipelines
from bitnet.vulkan.queue import COMPUTE_STAGE, TRANSFER_STAGE, Queue, barrier

BIND_COMPUTE = 1


class Recording:
    """A command buffer with its descriptor sets; returned to its driver when garbage-collected."""

    def __init__(self, driver: VulkanDriver, commands: Any, pool: Any) -> None:
        self._driver, self.commands, self.pool = driver, commands, pool

    def __del__(self) -> None:
        self._driver.dropped.append((self.commands, self.pool))


class VulkanDriver:
    """Implements :class:`bitnet.core.gpu.Driver`.

    Args:
        name: The device's name, for errors.
    """

    def __init__(self, hardware: Hardware, name: str) -> None:
        self.hardware = hardware
        self.dropped: list[tuple[Any, Any]] = []
        self._lock = threading.RLock()
        self._vk = Functions(name, open_device(hardware, name))
        self._queue = Queue(self._vk, hardware)
        self._memory = Memory(self._vk, hardware, self._queue)
        self._pipelines = Pipelines(self._vk, hardware, KernelCache())

    def alloc(self, nbytes: int) -> VulkanBuffer:
        with self._lock:
            return self._memory.alloc(nbytes)

    def free(self, buffer: VulkanBuffer) -> None:
        with self._lock:
            if self._ends():
                self._memory.free(buffer)

    def upload(self, buffer: VulkanBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._memory.upload(buffer, array, offset)

    def download(self, buffer: VulkanBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._lock:
            self._memory.download(buffer, array, offset)

    def record(self, launches: Sequence[Launch]) -> Recording:
        vk = self._vk
        with self._lock:
            self._give_back()
            pipelines = [
                self._pipelines.get(launch.kernel, launch.block[0], len(launch.buffers), len(launch.scalars))
                for launch in launches
            ]
            self._pipelines.save()
            count = sum(len(launch.buffers) for launch in launches)
            size = make("VkDescriptorPoolSize", type=STORAGE_BUFFER, descriptorCount=max(count, 1))
            pool = vk.create("DescriptorPool", maxSets=max(len(launches), 1), pPoolSizes=[size])
            commands, hazards = self._queue.command_buffer(), Hazards()
            recording = Recording(self, commands, pool)
            barrier(vk, commands, COMPUTE_STAGE | TRANSFER_STAGE, COMPUTE_STAGE)
            for launch, pipeline in zip(launches, pipelines, strict=True):
                if hazards.waits((buffer, at in pipeline.written) for at, buffer in enumerate(launch.buffers)):
                    barrier(vk, commands, COMPUTE_STAGE, COMPUTE_STAGE)
                sets = self._descriptors(pool, pipeline, launch)
                vk.CmdBindPipeline(commands, BIND_COMPUTE, pipeline.handle)
                vk.CmdBindDescriptorSets(commands, BIND_COMPUTE, pipeline.layout, 0, 1, sets, 0, api().NULL)
                if scalars := launch.scalars:
                    vk.CmdPushConstants(commands, pipeline.layout, COMPUTE_SHADER, 0, len(scalars), scalars)
                vk.CmdDispatch(commands, *launch.grid)
            vk.EndCommandBuffer(commands)
            return recording

    def submit(self, recording: Recording) -> None:
        with self._lock:
            self._queue.submit(recording.commands)

    def memory(self) -> tuple[int, int]:
        return memory(self._vk, self.hardware.handle, budget=BUDGET in self.hardware.extensions)

    def close(self) -> None:
        with self._lock:
            if self._ends():
                self._give_back()
                self._pipelines.close()
                self._memory.close()
                self._queue.close()
                self._vk.DestroyDevice(self._vk.handle, api().NULL)

    def _ends(self) -> bool:
        """Wait until nothing runs; False if that fails, and objects that the device may still use must be kept."""
        try:
            self._memory.wait()
        except (DeviceLostError, OutOfMemoryError):  # in the latter case what still waits names it
            return False
        return True

    def _give_back(self) -> None:
        """Free recordings that nobody refers to any more."""
        if not self.dropped:
            return
        self._memory.wait()
        dropped, self.dropped = self.dropped, []
        self._queue.free([commands for commands, _ in dropped])
        for _, pool in dropped:
            self._vk.destroy("DescriptorPool", pool)

    def _descriptors(self, pool: Any, pipeline: Pipeline, launch: Launch) -> Any:
        shown = []
        for buffer in launch.buffers:
            memory, offset, size = bound(buffer, self.hardware.largest_binding, launch.kernel.entry, self._vk.device)
            shown.append(make("VkDescriptorBufferInfo", buffer=memory.handle, offset=offset, range=size))
        handle = api().new("VkDescriptorSet*")
        info = make("VkDescriptorSetAllocateInfo", descriptorPool=pool, pSetLayouts=[pipeline.sets])
        self._vk.AllocateDescriptorSets(self._vk.handle, info, handle)
        # One write for all: past the end of a binding, which has one descriptor, it goes on with the next binding.
        given = {"descriptorCount": len(shown), "descriptorType": STORAGE_BUFFER, "pBufferInfo": shown}
        write = make("VkWriteDescriptorSet", dstSet=handle[0], **given)
        self._vk.UpdateDescriptorSets(self._vk.handle, 1, write, 0, api().NULL)
        return handle
