"""Submits command buffers on one queue in batches, and waits for them with a time limit."""

from __future__ import annotations

from typing import Any

from bitnet.core.errors import DeviceError, DeviceLostError
from bitnet.vulkan.driver import TIMEOUT, Functions, api, make
from bitnet.vulkan.hardware import Hardware

PATIENCE = 600.0
"""Seconds to wait for submitted work before the device counts as lost."""
SLICES = 20
BATCH, MAX_BATCH = 8, 64
"""Command buffers of a submission: the usual number while the device has work, and the maximum."""
SIMULTANEOUS_USE, RESETTABLE = 4, 2
COMPUTE_STAGE, TRANSFER_STAGE, HOST_STAGE = 0x800, 0x1000, 0x4000
ACCESS = {COMPUTE_STAGE: 0x60, TRANSFER_STAGE: 0x1800, HOST_STAGE: 0x6000}
"""VkAccessFlagBits of a stage's reads and writes. The bits for all memory would cost 2 to 3 µs a barrier on NVIDIA."""


def barrier(vk: Functions, commands: Any, before: int, after: int) -> None:
    """Make all writes of earlier commands visible to later commands."""
    source, target = (sum(ACCESS[stage] for stage in ACCESS if stage & stages) for stages in (before, after))
    memory = make("VkMemoryBarrier", srcAccessMask=source, dstAccessMask=target)
    vk.CmdPipelineBarrier(commands, before, after, 0, 1, memory, 0, api().NULL, 0, api().NULL)


class Queue:
    """The one queue of a device. Its caller holds a lock. Without timeline semaphores, every wait submits a fence."""

    def __init__(self, vk: Functions, hardware: Hardware) -> None:
        ffi, family = api(), hardware.queue_family
        self._vk, self.patience = vk, PATIENCE
        handle = ffi.new("VkQueue*")
        vk.GetDeviceQueue(vk.handle, family, 0, handle)
        self._queue = handle[0]
        self._pool = vk.create("CommandPool", queueFamilyIndex=family, flags=RESETTABLE)
        self._pending: list[Any] = []
        self.busy = False
        self._lost: DeviceLostError | None = None
        # What a submission and a wait are told, made once: both are in the loop of every token.
        self._commands, self._value = ffi.new("VkCommandBuffer[]", MAX_BATCH), ffi.new("uint64_t[]", [0])
        self._semaphore = self._fence = ffi.NULL
        fields: dict[str, Any] = {"pCommandBuffers": self._commands}
        if "timelineSemaphore" in hardware.features:
            self._semaphore = vk.create("Semaphore", pNext=make("VkSemaphoreTypeCreateInfo", semaphoreType=1))
            self._wait_info = make("VkSemaphoreWaitInfo", pValues=self._value, pSemaphores=[self._semaphore])
            value = {"signalSemaphoreValueCount": 1, "pSignalSemaphoreValues": self._value}
            fields["pNext"] = make("VkTimelineSemaphoreSubmitInfo", **value)
            fields["pSignalSemaphores"] = [self._semaphore]
        else:
            self._fence = vk.create("Fence")
        self._info = make("VkSubmitInfo", **fields)

    def command_buffer(self) -> Any:
        """A new command buffer, ready for recording."""
        handle = api().new("VkCommandBuffer*")
        info = make("VkCommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1)
        self._vk.AllocateCommandBuffers(self._vk.handle, info, handle)
        self._vk.BeginCommandBuffer(handle[0], make("VkCommandBufferBeginInfo", flags=SIMULTANEOUS_USE))
        return handle[0]

    def free(self, commands: list[Any]) -> None:
        """Free command buffers, none of which may still be running."""
        if commands:
            self._vk.FreeCommandBuffers(self._vk.handle, self._pool, len(commands), commands)

    def submit(self, commands: Any) -> None:
        """Start a command buffer after all earlier ones: at once on an idle device, else in a small batch."""
        self._pending.append(commands)
        if not self.busy or len(self._pending) >= BATCH:
            self.flush()

    def later(self, commands: Any) -> None:
        """Start a command buffer together with the next one that is submitted."""
        self._pending.append(commands)

    def flush(self) -> None:
        """Submit all waiting command buffers.

        Raises:
            OutOfMemoryError: There was not enough memory. Nothing has begun, and all of it still waits.
            DeviceLostError: The device is lost.
        """
        while self._pending:
            now = self._pending[:MAX_BATCH]
            self._commands[0 : len(now)] = now
            self._info.commandBufferCount, self._value[0] = len(now), self._value[0] + 1
            try:
                self._submit(1, self._info, api().NULL)
            except DeviceError:
                self._value[0] -= 1
                raise
            del self._pending[: len(now)]
            self.busy = True

    def wait(self) -> None:
        """Submit all waiting command buffers, and return once they are done.

        Raises:
            OutOfMemoryError: There was not enough memory to start them.
            DeviceLostError: The device is lost, or does not answer in time.
        """
        if self._lost is not None:
            raise self._lost
        self.flush()
        if not self.busy:
            return
        if not self._semaphore:
            self._submit(0, api().NULL, self._fence)  # it is signalled behind all that was submitted before
        # Wait in slices, so that time in which the process was stopped or the machine asleep uses up at most one slice.
        if all(self._times_out(int(self.patience / SLICES * 1e9)) for _ in range(SLICES)):
            hint = "Restart the program; use another device if this one is too slow for the model."
            self._lost = DeviceLostError(f"no answer in {self.patience:g} s.", device=self._vk.device, hint=hint)
            raise self._lost
        if not self._semaphore:
            self._vk.ResetFences(self._vk.handle, 1, [self._fence])
        self.busy = False

    def close(self) -> None:
        """Free its objects; nothing may be running."""
        self._vk.destroy("Fence", self._fence)
        self._vk.destroy("Semaphore", self._semaphore)
        self._vk.destroy("CommandPool", self._pool)

    def _submit(self, count: int, info: Any, fence: Any) -> None:
        try:
            self._vk.QueueSubmit(self._queue, count, info, fence)
        except DeviceLostError as error:
            self._lost = error  # the end of this submission would be waited for in vain
            raise

    def _times_out(self, nanoseconds: int) -> bool:
        if self._semaphore:
            return bool(self._vk.WaitSemaphores(self._vk.handle, self._wait_info, nanoseconds) == TIMEOUT)
        return bool(self._vk.WaitForFences(self._vk.handle, 1, [self._fence], 1, nanoseconds) == TIMEOUT)
