"""Device-memory buffers, and copies to and from them through host-visible staging memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.gpu.drivers.failures import buffer_too_large, out_of_memory
from bitnet.vulkan.driver import Functions, api, make
from bitnet.vulkan.hardware import DEVICE_LOCAL, Hardware
from bitnet.vulkan.queue import COMPUTE_STAGE, HOST_STAGE, TRANSFER_STAGE, Queue, barrier

HOST_VISIBLE, HOST_COHERENT, HOST_CACHED = 2, 4, 8
STORAGE, COPY_FROM, COPY_TO = 0x20, 1, 2
STAGING = 16 << 20
"""Bytes of each of the two staging buffers."""
RECORDED = 64
"""Number of recorded copies kept, most recently used first: a step's upload and its tokens' download always repeat."""


@dataclass(slots=True, eq=False)
class VulkanBuffer:
    """A ``VkBuffer`` with memory of its own, which ends at a multiple of 16 bytes; ``nbytes`` is what was asked for."""

    handle: Any
    memory: Any
    nbytes: int


class Memory:
    """The buffers of a device. Its caller holds a lock."""

    def __init__(self, vk: Functions, hardware: Hardware, queue: Queue) -> None:
        self.vk, self.hardware, self.queue = vk, hardware, queue
        self._copies: OrderedDict[tuple[int, int, int, int, bool], Any] = OrderedDict()
        self._done: list[Any] = []
        self._types = api().new("VkPhysicalDeviceMemoryProperties*")
        self.vk.GetPhysicalDeviceMemoryProperties(self.hardware.handle, self._types)
        self._up, self._sent = self._staging(COPY_FROM, HOST_VISIBLE | HOST_COHERENT)
        self._down, self._received = self._staging(COPY_TO, HOST_VISIBLE | HOST_COHERENT | HOST_CACHED)
        self._used = 0

    def alloc(self, nbytes: int) -> VulkanBuffer:
        """A storage buffer in the device's own memory."""
        if nbytes > self.hardware.largest_buffer:
            raise buffer_too_large(nbytes, self.hardware.largest_buffer, self.vk.device)
        return self._make(nbytes, STORAGE | COPY_FROM | COPY_TO, DEVICE_LOCAL)

    def free(self, buffer: VulkanBuffer) -> None:
        """Destroy a buffer; nothing that uses it may run."""
        for key in [key for key in self._copies if key[0] == id(buffer)]:
            self._done.append(self._copies.pop(key))
        self.vk.destroy("Buffer", buffer.handle)
        self.vk.destroy("DeviceMemory", buffer.memory)

    def upload(self, buffer: VulkanBuffer, array: npt.NDArray[Any], offset: int) -> None:
        """Copy an array into a buffer, in order with submitted work."""
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, data.size, STAGING):
            part = data[start : start + STAGING]
            if self._used + part.size > STAGING:
                self.wait()
            at = self._used
            self._sent[at : at + part.size] = part
            self._used += -(-part.size // 16) * 16
            self.queue.later(self._copy(buffer, offset + start, at, part.size, up=True))
            if part.size == STAGING:
                self.queue.flush()

    def download(self, buffer: VulkanBuffer, array: npt.NDArray[Any], offset: int) -> None:
        """Fill an array from a buffer after all submitted work is done."""
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, data.size, STAGING):
            part = data[start : start + STAGING]
            self.queue.later(self._copy(buffer, offset + start, 0, part.size, up=False))
            self.wait()
            part[:] = self._received[: part.size]

    def wait(self) -> None:
        """Wait for all submitted work, after which the staging memory is free."""
        self.queue.wait()
        self._used = 0
        self.queue.free(self._done)
        self._done.clear()

    def close(self) -> None:
        """Free its own objects; nothing may be running."""
        for buffer in (self._up, self._down):
            self.vk.UnmapMemory(self.vk.handle, buffer.memory)
            self.free(buffer)

    def _copy(self, buffer: VulkanBuffer, offset: int, staged: int, nbytes: int, *, up: bool) -> Any:
        key = (id(buffer), offset, staged, nbytes, up)
        if key in self._copies:
            self._copies.move_to_end(key)
            return self._copies[key]
        commands = self.queue.command_buffer()
        sent, received = (self._up, staged, buffer, offset), (buffer, offset, self._down, staged)
        source, first, target, second = sent if up else received
        region = make("VkBufferCopy", size=nbytes, srcOffset=first, dstOffset=second)
        barrier(self.vk, commands, COMPUTE_STAGE | TRANSFER_STAGE, TRANSFER_STAGE)
        self.vk.CmdCopyBuffer(commands, source.handle, target.handle, 1, region)
        barrier(self.vk, commands, TRANSFER_STAGE, COMPUTE_STAGE | HOST_STAGE)
        self.vk.EndCommandBuffer(commands)
        self._copies[key] = commands
        if len(self._copies) > RECORDED:
            self._done.append(self._copies.popitem(last=False)[1])  # it may still run: freed at the next wait
        return commands

    def _staging(self, usage: int, flags: int) -> tuple[VulkanBuffer, npt.NDArray[np.uint8]]:
        ffi = api()
        buffer = self._make(STAGING, usage, flags)
        mapped = ffi.new("void**")
        self.vk.MapMemory(self.vk.handle, buffer.memory, 0, STAGING, 0, mapped)
        return buffer, np.frombuffer(ffi.buffer(mapped[0], STAGING), np.uint8)

    def _make(self, nbytes: int, usage: int, flags: int) -> VulkanBuffer:
        vk = self.vk
        size = -(-nbytes // 16) * 16  # kernels read up to 16 bytes at a time
        buffer = vk.create("Buffer", size=size, usage=usage)
        try:
            needs = api().new("VkMemoryRequirements*")
            vk.GetBufferMemoryRequirements(vk.handle, buffer, needs)
            kind = self._type(int(needs.memoryTypeBits), flags, int(needs.size))
            memory = vk.create("DeviceMemory", allocationSize=needs.size, memoryTypeIndex=kind)
        except BaseException:
            vk.destroy("Buffer", buffer)
            raise
        vk.BindBufferMemory(vk.handle, buffer, memory, 0)
        return VulkanBuffer(buffer, memory, nbytes)

    def _type(self, allowed: int, flags: int, nbytes: int) -> int:
        """The first memory type with these flags, or without what not every device has: cached, device-local."""
        for wanted in (flags, flags & ~HOST_CACHED, flags & ~DEVICE_LOCAL):
            for i in range(self._types.memoryTypeCount):
                kind = self._types.memoryTypes[i]
                fits = nbytes <= self._types.memoryHeaps[kind.heapIndex].size
                if fits and allowed >> i & 1 and kind.propertyFlags & wanted == wanted:
                    return i
        raise out_of_memory(f"no memory of the device takes a buffer of {nbytes:,} bytes.", self.vk.device)
