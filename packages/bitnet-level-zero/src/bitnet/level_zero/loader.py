"""Level Zero's loader through ctypes; failed calls become typed errors that name the result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_char_p, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, TypeVar

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.drivers import failures
from bitnet.core.support.dynlib import Library, open_library
from bitnet.level_zero.structures import GroupCount, InitDriversDesc, Structure

LOADER: Mapping[str, tuple[str, ...]] = {"linux": ("libze_loader.so.1",), "win32": ("ze_loader.dll",)}
DRIVER = ("libze_intel_gpu.so.1",)
"""Intel's GPU driver, which the loader opens by itself. We open it only to find out why there is no device."""
GPU_ONLY = 1
"""ZE_INIT_FLAG_GPU_ONLY, and zeInitDrivers' flag of the same meaning."""

OUT_OF_MEMORY = {0x70000002: "ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY", 0x70000003: "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"}
LOST = {
    0x70000001: "ZE_RESULT_ERROR_DEVICE_LOST",
    0x70000006: "ZE_RESULT_ERROR_DEVICE_REQUIRES_RESET",
    0x70000007: "ZE_RESULT_ERROR_DEVICE_IN_LOW_POWER_STATE",
}
BUILD_FAILED = {
    0x70000004: "ZE_RESULT_ERROR_MODULE_BUILD_FAILURE",
    0x70000005: "ZE_RESULT_ERROR_MODULE_LINK_FAILURE",
    0x7800000F: "ZE_RESULT_ERROR_INVALID_NATIVE_BINARY",
    0x78000018: "ZE_RESULT_ERROR_INVALID_MODULE_UNLINKED",
}
UNINITIALIZED = 0x78000001
INSUFFICIENT_PERMISSIONS = 0x70010000
_OTHERS = [
    "UNINITIALIZED",
    "UNSUPPORTED_VERSION",
    "UNSUPPORTED_FEATURE",
    "INVALID_ARGUMENT",
    "INVALID_NULL_HANDLE",
    "HANDLE_OBJECT_IN_USE",
    "INVALID_NULL_POINTER",
    "INVALID_SIZE",
    "UNSUPPORTED_SIZE",
    "UNSUPPORTED_ALIGNMENT",
    "INVALID_SYNCHRONIZATION_OBJECT",
    "INVALID_ENUMERATION",
    "UNSUPPORTED_ENUMERATION",
    "UNSUPPORTED_IMAGE_FORMAT",
    "INVALID_NATIVE_BINARY",
    "INVALID_GLOBAL_NAME",
    "INVALID_KERNEL_NAME",
    "INVALID_FUNCTION_NAME",
    "INVALID_GROUP_SIZE_DIMENSION",
    "INVALID_GLOBAL_WIDTH_DIMENSION",
    "INVALID_KERNEL_ARGUMENT_INDEX",
    "INVALID_KERNEL_ARGUMENT_SIZE",
    "INVALID_KERNEL_ATTRIBUTE_VALUE",
    "INVALID_MODULE_UNLINKED",
    "INVALID_COMMAND_LIST_TYPE",
    "OVERLAPPING_REGIONS",
]
"""Names in ``ze_result_t`` whose values count up from the first."""
RESULTS: Mapping[int, str] = {
    0: "ZE_RESULT_SUCCESS",
    1: "ZE_RESULT_NOT_READY",
    **OUT_OF_MEMORY,
    **LOST,
    **BUILD_FAILED,
    INSUFFICIENT_PERMISSIONS: "ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS",
    0x70010001: "ZE_RESULT_ERROR_NOT_AVAILABLE",
    0x70020000: "ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE",
    0x70020001: "ZE_RESULT_WARNING_DROPPED_DATA",
    **{UNINITIALIZED + i: f"ZE_RESULT_ERROR_{name}" for i, name in enumerate(_OTHERS)},
    0x7FFFFFFE: "ZE_RESULT_ERROR_UNKNOWN",
}
"""Values of ``ze_result_t`` and their names."""

_handle, _out, _struct = c_void_p, POINTER(c_void_p), POINTER(Structure)
_count, _list = POINTER(c_uint32), c_void_p
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "zeInit": (c_uint32,),
    "zeDriverGet": (_count, _list),
    "zeDriverGetApiVersion": (_handle, _count),
    "zeDriverGetProperties": (_handle, _list),
    "zeDriverGetExtensionFunctionAddress": (_handle, c_char_p, _out),
    "zeDriverGetExtensionProperties": (_handle, _count, _list),
    "zeDeviceGet": (_handle, _count, _list),
    "zeDeviceGetProperties": (_handle, _list),
    "zeDeviceGetComputeProperties": (_handle, _list),
    "zeDeviceGetModuleProperties": (_handle, _list),
    "zeDeviceGetMemoryProperties": (_handle, _count, _list),
    "zeDeviceGetMemoryAccessProperties": (_handle, _list),
    "zeDeviceGetCommandQueueGroupProperties": (_handle, _count, _list),
    "zeContextCreate": (_handle, _list, _out),
    "zeContextDestroy": (_handle,),
    "zeCommandQueueCreate": (_handle, _handle, _list, _out),
    "zeCommandQueueDestroy": (_handle,),
    "zeCommandQueueExecuteCommandLists": (_handle, c_uint32, _out, _handle),
    "zeCommandQueueSynchronize": (_handle, c_uint64),
    "zeCommandListCreate": (_handle, _handle, _list, _out),
    "zeCommandListCreateImmediate": (_handle, _handle, _list, _out),
    "zeCommandListDestroy": (_handle,),
    "zeCommandListClose": (_handle,),
    "zeCommandListAppendMemoryCopy": (_handle, c_void_p, c_void_p, c_size_t, _handle, c_uint32, _list),
    "zeCommandListAppendBarrier": (_handle, _handle, c_uint32, _list),
    "zeCommandListAppendLaunchKernel": (_handle, _handle, POINTER(GroupCount), _handle, c_uint32, _list),
    "zeMemAllocDevice": (_handle, _list, c_size_t, c_size_t, _handle, _out),
    "zeMemAllocShared": (_handle, _list, _list, c_size_t, c_size_t, _handle, _out),
    "zeMemFree": (_handle, c_void_p),
    "zeModuleCreate": (_handle, _handle, _list, _out, _out),
    "zeModuleDestroy": (_handle,),
    "zeModuleGetNativeBinary": (_handle, POINTER(c_size_t), c_void_p),
    "zeModuleBuildLogGetString": (_handle, POINTER(c_size_t), c_char_p),
    "zeModuleBuildLogDestroy": (_handle,),
    "zeKernelCreate": (_handle, _list, _out),
    "zeKernelDestroy": (_handle,),
    "zeKernelSetGroupSize": (_handle, c_uint32, c_uint32, c_uint32),
    "zeKernelSetArgumentValue": (_handle, c_uint32, c_size_t, c_void_p),
    "zeKernelGetProperties": (_handle, _list),
}
"""Arguments of every function in use; each returns a ``ze_result_t``."""

Filled = TypeVar("Filled", bound=ctypes.Structure)


class LevelZeroError(DeviceError):
    """A call failed. ``result`` is its ``ze_result_t``, which the message names."""

    def __init__(self, message: str, *, device: str, result: int, hint: str | None = None) -> None:
        super().__init__(message, device=device, hint=hint)
        self.result = result


class LevelZero:
    """The loader's functions, as ``level_zero.call("zeInit", 0)``.

    Args:
        library: The loader, open.
        device: Name for errors.

    Raises:
        DeviceError: The library lacks a function.
    """

    def __init__(self, library: Library, device: str = "level-zero") -> None:
        self._device = device
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in SIGNATURES.items():
            try:
                function = getattr(library.handle, name)
            except AttributeError:
                hint = "Update the Level Zero loader (Debian: libze1)."
                raise DeviceError(f"{library.name} has no function {name}.", device=device, hint=hint) from None
            function.restype, function.argtypes = c_uint32, arguments
            self._functions[name] = function
        self._init_drivers = getattr(library.handle, "zeInitDrivers", None)  # from version 1.10 on

    def named(self, device: str) -> LevelZero:
        """The same functions, with errors that name a device."""
        copy = object.__new__(LevelZero)
        copy._device, copy._functions, copy._init_drivers = device, self._functions, self._init_drivers
        return copy

    def status(self, name: str, *arguments: Any) -> int:
        """Call a function; returns its result."""
        return self._functions[name](*arguments)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            OutOfMemoryError, DeviceLostError, LevelZeroError: It failed.
        """
        result = self._functions[name](*arguments)
        if result:
            self.fail(name, result)

    def fail(self, name: str, result: int) -> None:
        """Raise the error for a result."""
        what = f"{name} failed with {RESULTS.get(result, f'{result:#x}')}."
        if result in OUT_OF_MEMORY:
            raise failures.out_of_memory(what, self._device)
        if result in LOST:
            raise failures.lost(what, self._device)
        raise LevelZeroError(what, device=self._device, result=result)

    def make(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function whose last argument is the handle or pointer that it makes."""
        made = c_void_p()
        self.call(name, *arguments, byref(made))
        return made

    def filled(self, name: str, owner: c_void_p, structure: type[Filled]) -> Filled:
        """Properties of one thing."""
        made = structure()
        self.call(name, owner, byref(made))
        return made

    def every(self, name: str, owner: c_void_p, structure: type[Filled]) -> list[Filled]:
        """Properties of several objects; called without a buffer, the function returns their number."""
        count = c_uint32()
        self.call(name, owner, byref(count), None)
        made = (structure * count.value)(*(structure() for _ in range(count.value)))  # each tells its type
        self.call(name, owner, byref(count), made)
        return list(made)

    def handles(self, name: str, *owner: c_void_p) -> list[c_void_p]:
        """Handles of several things."""
        count = c_uint32()
        self.call(name, *owner, byref(count), None)
        made = (c_void_p * count.value)()
        self.call(name, *owner, byref(count), made)
        return [c_void_p(handle) for handle in made]

    def drivers(self) -> list[c_void_p]:
        """Every driver for GPUs, made ready.

        Raises:
            DeviceError: There is none.
        """
        if self._init_drivers is not None:
            count, wanted = c_uint32(), InitDriversDesc(flags=GPU_ONLY)
            self._init_drivers.restype = c_uint32
            result = self._init_drivers(byref(count), None, byref(wanted))
            if result:
                self.fail("zeInitDrivers", result)
            made = (c_void_p * count.value)()
            result = self._init_drivers(byref(count), made, byref(wanted))
            if result:
                self.fail("zeInitDrivers", result)
            return [c_void_p(handle) for handle in made]
        self.call("zeInit", GPU_ONLY)
        return self.handles("zeDriverGet")


@cache
def loader() -> Library:
    """The loader's library, opened once."""
    return open_library(LOADER)
