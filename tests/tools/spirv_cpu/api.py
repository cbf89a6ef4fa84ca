"""The few functions of OpenCL's C interface that this needs, by ctypes on Intel's driver for CPUs."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from bitnet.core.errors import DeviceError, DeviceLostError, OutOfMemoryError
from bitnet.core.gpu.probing import SMALLER
from bitnet.core.support.dynlib import Library, open_library

NAMES = {"linux": ["libintelocl.so", str(Path(sys.prefix) / "lib" / "libintelocl.so")]}
"""The driver, where its own installer or PyPI's intel-opencl-rt puts it."""
NAME, VENDOR, DRIVER_VERSION, EXTENSIONS, IL_VERSION = 0x102B, 0x102C, 0x102D, 0x1030, 0x105B
MAX_COMPUTE_UNITS, MAX_WORK_GROUP_SIZE, LOCAL_MEM_SIZE, GLOBAL_MEM_SIZE = 0x1002, 0x1004, 0x1023, 0x101F
BUILD_LOG = 0x1183
LACKS_MEMORY, LOST = {-4, -5, -6, -61}, {-2, -34, -36}
"""Statuses (OpenCL 3.0, CL_MEM_OBJECT_ALLOCATION_FAILURE … and CL_DEVICE_NOT_AVAILABLE …)."""
ALL_DEVICES = 0xFFFFFFFF

Handle = ctypes.c_void_p
Size = ctypes.c_size_t


@cache
def library() -> Library:
    """The driver's library; false where there is none."""
    return open_library(NAMES)


def check(routine: str, status: int, device: str = "") -> None:
    """Raise what a status other than success stands for."""
    if status == 0:
        return
    message = f"{routine} failed with status {status}."
    if status in LACKS_MEMORY:
        raise OutOfMemoryError(message, device=device, hint=SMALLER)
    raise (DeviceLostError if status in LOST else DeviceError)(message, device=device)


def call(routine: str, *args: object, device: str = "") -> None:
    """Call a function that returns its status."""
    check(routine, getattr(library().handle, routine)(*args), device)


def make(routine: str, *args: object, device: str = "") -> Handle:
    """Call a function that returns a new object and takes a place for its status last."""
    status, function = ctypes.c_int32(), getattr(library().handle, routine)
    function.restype = Handle
    handle = Handle(function(*args, ctypes.byref(status)))
    check(routine, status.value, device)
    return handle


def devices() -> list[Handle]:
    """Every device of the driver, in its order."""
    if not library():
        return []
    platform, count = Handle(), ctypes.c_uint32()
    call("clGetPlatformIDs", 1, ctypes.byref(platform), None)
    every = ctypes.c_uint64(ALL_DEVICES)
    call("clGetDeviceIDs", platform, every, 0, None, ctypes.byref(count))
    found = (Handle * count.value)()
    call("clGetDeviceIDs", platform, every, count, found, None)
    return [Handle(each) for each in found]


def number(device: Handle, what: int) -> int:
    """A number that a device reports."""
    found = ctypes.c_uint64()
    call("clGetDeviceInfo", device, what, Size(8), ctypes.byref(found), None)
    return found.value


def text(device: Handle, what: int) -> str:
    """A text that a device reports."""
    size = Size()
    call("clGetDeviceInfo", device, what, Size(0), None, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    call("clGetDeviceInfo", device, what, size, found, None)
    return found.value.decode().strip()
