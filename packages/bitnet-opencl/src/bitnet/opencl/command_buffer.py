"""``cl_khr_command_buffer``, which pyopencl does not know: launches recorded once and enqueued as one."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyopencl as cl

from bitnet.opencl.launches import Command, check, library

CAPABILITIES = 0x12A9
"""CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR."""
SIMULTANEOUS_USE = 1 << 2
"""The capability to be enqueued while it runs."""
FLAGS = 0x1293
"""CL_COMMAND_BUFFER_FLAGS_KHR, whose bit 0 is simultaneous use."""

_pointer, _uint, _int = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32


class Functions(NamedTuple):
    """Functions of the extension, as found in the driver."""

    create: Any
    kernel: Any
    finalize: Any
    enqueue: Any
    release: Any


class CommandBuffer:
    """Commands that run in order on one queue, any number of times; it may be enqueued again while it runs.

    Raises:
        cl.Error: The driver does not record them.
    """

    def __init__(self, functions: Functions, queue: cl.CommandQueue, commands: Sequence[Command]) -> None:
        self._functions, self._queue = functions, _pointer(queue.int_ptr)
        self._commands = commands  # a buffer need not keep its kernels alive
        status = _int()
        flags = (ctypes.c_uint64 * 3)(FLAGS, 1, 0)
        self._handle = _pointer(functions.create(1, ctypes.byref(self._queue), flags, ctypes.byref(status)))
        check("clCreateCommandBufferKHR", status.value)
        weakref.finalize(self, functions.release, self._handle)
        before: Any = None
        for command in commands:
            after = (_uint * 1)()
            sizes = ((ctypes.c_size_t * 3)(*size) for size in (command.global_size, command.local_size))
            waits, handle = int(before is not None), _pointer(command.kernel.int_ptr)
            arguments = (self._handle, None, None, handle, 3, None, *sizes, waits, before, after, None)
            check("clCommandNDRangeKernelKHR", functions.kernel(*arguments))
            before = after
        check("clFinalizeCommandBufferKHR", functions.finalize(self._handle))

    def enqueue(self) -> None:
        """Run it after what the queue was given before. Raises cl.Error."""
        queues = ctypes.byref(self._queue)
        check("clEnqueueCommandBufferKHR", self._functions.enqueue(1, queues, self._handle, 0, None, None))


def functions(device: cl.Device) -> Functions | None:
    """The extension's functions, if the device supports it and allows a buffer to be enqueued while it runs."""
    if "cl_khr_command_buffer" not in device.extensions.split():
        return None
    loader = library()
    if loader is None:
        return None
    found = ctypes.c_uint64()
    handle = _pointer(device.int_ptr)
    if loader.clGetDeviceInfo(handle, _uint(CAPABILITIES), ctypes.c_size_t(8), ctypes.byref(found), None):
        return None
    if not found.value & SIMULTANEOUS_USE:
        return None
    sync = [_uint, _pointer, _pointer]
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "clCreateCommandBufferKHR": (_pointer, [_uint, _pointer, _pointer, _pointer]),
        "clCommandNDRangeKernelKHR": (_int, [_pointer] * 4 + [_uint] + [_pointer] * 3 + [*sync, _pointer]),
        "clFinalizeCommandBufferKHR": (_int, [_pointer]),
        "clEnqueueCommandBufferKHR": (_int, [_uint, _pointer, _pointer, *sync]),
        "clReleaseCommandBufferKHR": (_int, [_pointer]),
    }
    look = loader.clGetExtensionFunctionAddressForPlatform
    look.restype, look.argtypes = _pointer, [_pointer, ctypes.c_char_p]
    platform = _pointer(device.platform.int_ptr)
    made = []
    for name, (result, arguments) in signatures.items():
        address = look(platform, name.encode())
        if not address:
            return None
        made.append(ctypes.CFUNCTYPE(result, *arguments)(address))
    return Functions(*made)
