"""Command buffers on one queue: batches of them submitted together, and waits that end."""

from __future__ import annotations

from typing import Any

from bitnet.core.errors import DeviceError, DeviceLostError
from bitnet.vulkan.driver import TIMEOUT, Functions, api, make

PATIENCE = 600.0
"""Seconds without an end of what was submitted after which the device counts as lost."""
SLICES = 20
BATCH, MOST = 8, 64
"""Command buffers that wait for one another to be submitted together, once the device has work, and at most."""
SIMULTANEOUS_USE, RESETTABLE = 4, 2


class Queue:
    """The one queue of a device. Its caller holds a lock.

    Args:
        timeline: Whether the device has timeline semaphores; else every submission has a fence.
        patience: See :data:`PATIENCE`.
    """

    def __init__(self, vk: Functions, device: Any, family: int, *, timeline: bool, patience: float = PATIENCE) -> None:
        ffi = api()
        self._vk, self._device, self._patience = vk, device, patience
        handle = ffi.new("VkQueue*")
        vk.GetDeviceQueue(device, family, 0, handle)
        self._queue = handle[0]
        info = make("VkCommandPoolCreateInfo", queueFamilyIndex=family, flags=RESETTABLE)
        self.pool = vk.create("CommandPool", device, info)
        self._pending: list[Any] = []
        self._fences: list[Any] = []
        self._semaphore = None
        self.busy = False
        self._lost: DeviceLostError | None = None
        # What a submission and a wait are told, made once: both are in the loop of every token.
        self._commands = ffi.new("VkCommandBuffer[]", MOST)
        self._value = ffi.new("uint64_t[]", [0])
        self._info = self._wait_info = make("VkSubmitInfo", pCommandBuffers=self._commands)
        if timeline:
            kind = make("VkSemaphoreTypeCreateInfo", semaphoreType=1)
            self._semaphore = vk.create("Semaphore", device, make("VkSemaphoreCreateInfo", pNext=kind))
            signal = make(
                "VkTimelineSemaphoreSubmitInfo", signalSemaphoreValueCount=1, pSignalSemaphoreValues=self._value
            )
            semaphores = [self._semaphore]
            self._info = make(
                "VkSubmitInfo",
                pNext=signal,
                pCommandBuffers=self._commands,
                signalSemaphoreCount=1,
                pSignalSemaphores=semaphores,
            )
            self._wait_info = make("VkSemaphoreWaitInfo", semaphoreCount=1, pSemaphores=semaphores, pValues=self._value)

    def command_buffer(self) -> Any:
        """A new one, to be recorded."""
        handle = api().new("VkCommandBuffer*")
        info = make("VkCommandBufferAllocateInfo", commandPool=self.pool, commandBufferCount=1)
        self._vk.AllocateCommandBuffers(self._device, info, handle)
        self._vk.BeginCommandBuffer(handle[0], make("VkCommandBufferBeginInfo", flags=SIMULTANEOUS_USE))
        return handle[0]

    def free(self, commands: list[Any]) -> None:
        """Give command buffers back; none of them may still run."""
        if commands:
            self._vk.FreeCommandBuffers(self._device, self.pool, len(commands), commands)

    def submit(self, commands: Any) -> None:
        """Start a command buffer after all before it: at once on an idle device, else a few of them together."""
        self._pending.append(commands)
        if not self.busy or len(self._pending) >= BATCH:
            self.flush()

    def later(self, commands: Any) -> None:
        """Start a command buffer with the next that is submitted."""
        self._pending.append(commands)

    def flush(self) -> None:
        """Start all that waits.

        Raises:
            OutOfMemoryError: There was none for it. Nothing of it has begun then, and all of it still waits.
            DeviceLostError: The device is lost.
        """
        while self._pending:
            now = self._pending[:MOST]
            self._commands[0 : len(now)] = now
            self._info.commandBufferCount = len(now)
            fence, nothing = api().NULL, api().NULL
            if self._semaphore is None:
                fence = self._vk.create("Fence", self._device, make("VkFenceCreateInfo"))
            self._value[0] += 1
            try:
                self._vk.QueueSubmit(self._queue, 1, self._info, fence)
            except DeviceLostError as error:
                self._lost = error  # the end of this submission would be waited for in vain
                raise
            except DeviceError:
                self._value[0] -= 1
                self._vk.DestroyFence(self._device, fence, nothing)
                raise
            del self._pending[: len(now)]
            self.busy = True
            if fence != nothing:
                self._fences.append(fence)

    def wait(self) -> None:
        """Start all that waits, and return once it is done.

        Raises:
            OutOfMemoryError: There was none to start it.
            DeviceLostError: The device is lost, or does not answer in time.
        """
        if self._lost is not None:
            raise self._lost
        self.flush()
        if not self.busy:
            return
        # In slices: time in which this process was stopped, or the machine asleep, uses up no more than one.
        if all(self._times_out(int(self._patience / SLICES * 1e9)) for _ in range(SLICES)):
            raise DeviceLostError(
                f"no answer in {self._patience:g} s.",
                device=self._vk.device,
                hint="Start again; use another device where this one is too slow for the model.",
            )
        self._drop_fences()
        self.busy = False

    def close(self) -> None:
        """Free what it has; nothing may run any more."""
        nothing = api().NULL
        self._drop_fences()
        if self._semaphore is not None:
            self._vk.DestroySemaphore(self._device, self._semaphore, nothing)
        self._vk.DestroyCommandPool(self._device, self.pool, nothing)

    def _times_out(self, nanoseconds: int) -> bool:
        if self._semaphore is None:
            ended = self._vk.WaitForFences(self._device, len(self._fences), self._fences, 1, nanoseconds)
        else:
            ended = self._vk.WaitSemaphores(self._device, self._wait_info, nanoseconds)
        return bool(ended == TIMEOUT)

    def _drop_fences(self) -> None:
        for fence in self._fences:
            self._vk.DestroyFence(self._device, fence, api().NULL)
        self._fences.clear()
