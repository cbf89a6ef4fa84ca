"""Recordings of a step's launches, for which Python sends only a few messages per step.

Both forms run the launches in order, each seeing the writes before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from bitnet.core.errors import DeviceError
from bitnet.metal.objc import MTLSize, NSRange, Objc

CONCURRENT_DISPATCH = 32
"""MTLIndirectCommandTypeConcurrentDispatch: threadgroups of a compute kernel."""
READ_AND_WRITE = 1 | 2
"""MTLResourceUsageRead and MTLResourceUsageWrite."""


class Command(NamedTuple):
    """A launch: its pipeline, the buffers of its arguments with their offsets in bytes, and its size."""

    pipeline: int
    buffers: Sequence[int]
    offsets: Sequence[int]
    groups: MTLSize
    threads: MTLSize


class KeptMessages:
    """The messages that encode the launches, stored as objects that Foundation sends in sequence.

    Attributes:
        handle: The NSArray of NSInvocations, which is the caller's.
    """

    def __init__(self, objc: Objc, commands: Sequence[Command]) -> None:
        self._objc, self._invoke = objc, objc.selector("invokeWithTarget:")
        self._pointed_to: list[object] = []
        messages: list[int] = []
        bound = 0
        with objc.pool():
            for command in commands:
                if command.pipeline != bound:
                    bound = command.pipeline
                    messages.append(objc.kept_message("setComputePipelineState:", ctypes.c_void_p(bound)))
                messages.append(self._arguments(command))
                sizes = command.groups, command.threads
                messages.append(objc.kept_message("dispatchThreadgroups:threadsPerThreadgroup:", *sizes))
            self.handle = objc.array(messages)

    def encode(self, encoder: int) -> None:
        """Encode the launches."""
        self._objc.send(self.handle, "makeObjectsPerformSelector:withObject:", self._invoke, encoder)

    def _arguments(self, command: Command) -> int:
        count = len(command.buffers)
        buffers, offsets = (ctypes.c_void_p * count)(*command.buffers), (ctypes.c_ulong * count)(*command.offsets)
        self._pointed_to += (buffers, offsets)
        addresses = (ctypes.cast(array, ctypes.c_void_p) for array in (buffers, offsets))
        return self._objc.kept_message("setBuffers:offsets:withRange:", *addresses, NSRange(0, count))


class IndirectCommands:
    """The launches in an indirect command buffer, which the GPU reads.

    Attributes:
        handle: The MTLIndirectCommandBuffer, which is the caller's.

    Raises:
        DeviceError: The device cannot make such a buffer.
    """

    def __init__(self, objc: Objc, device: int, name: str, commands: Sequence[Command]) -> None:
        self._objc = objc
        with objc.pool():
            wanted = objc.made("MTLIndirectCommandBufferDescriptor")
            try:
                objc.send(wanted, "setCommandTypes:", CONCURRENT_DISPATCH)
                objc.send(wanted, "setInheritBuffers:", False)
                objc.send(wanted, "setInheritPipelineState:", False)
                objc.send(wanted, "setMaxKernelBufferBindCount:", max(len(command.buffers) for command in commands))
                make = "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:"
                made = objc.send(device, make, wanted, len(commands), 0)
            finally:
                objc.release(wanted)
            if not made:
                raise DeviceError("it makes no indirect command buffer.", device=name)
            self.handle = int(made)
            for i, command in enumerate(commands):
                at = objc.send(made, "indirectComputeCommandAtIndex:", i)
                objc.send(at, "setComputePipelineState:", command.pipeline)
                for index, (buffer, offset) in enumerate(zip(command.buffers, command.offsets, strict=True)):
                    objc.send(at, "setKernelBuffer:offset:atIndex:", buffer, offset, index)
                sizes = command.groups, command.threads
                objc.send(at, "concurrentDispatchThreadgroups:threadsPerThreadgroup:", *sizes)
                if i:
                    objc.send(at, "setBarrier")
        used = dict.fromkeys(buffer for command in commands for buffer in command.buffers)
        self._used, self._all = (ctypes.c_void_p * len(used))(*used), NSRange(0, len(commands))

    def encode(self, encoder: int) -> None:
        """Encode the launches, and which buffers they use: those must be resident, and other work waits for them."""
        self._objc.send(encoder, "useResources:count:usage:", self._used, len(self._used), READ_AND_WRITE)
        self._objc.send(encoder, "executeCommandsInBuffer:withRange:", self.handle, self._all)


class Recording:
    """Launches to encode, and the buffer of their numbers.

    Attributes:
        owned: The objects that end with it.
    """

    def __init__(self, launches: KeptMessages | IndirectCommands, scalars: int) -> None:
        self.encode, self.owned = launches.encode, (launches.handle, scalars)
