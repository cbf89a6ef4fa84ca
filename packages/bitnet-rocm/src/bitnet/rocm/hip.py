"""The HIP runtime through ctypes: the calls in use, with errors converted to bitnet's under HIP's names."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.drivers import failures

MIN_HIP = (6, 0)
"""Minimum version of the runtime; from it on, device properties have the layout below."""
NON_BLOCKING_STREAM = 1
UNTIMED_EVENT = 2
THREAD_LOCAL_CAPTURE = 1
"""Needed on RDNA 2, where a global capture refuses calls from other threads."""
NO_DEVICE = "hipErrorNoDevice"
OUT_OF_MEMORY = {"hipErrorOutOfMemory", "hipErrorRuntimeMemory"}
LOST = {
    "hipErrorAssert",
    "hipErrorContextIsDestroyed",
    "hipErrorDeinitialized",
    "hipErrorECCNotCorrectable",
    "hipErrorIllegalAddress",
    "hipErrorIllegalState",
    "hipErrorLaunchFailure",
    "hipErrorLaunchTimeOut",
    "hipErrorUnknown",
}
"""After these, the process can no longer use the device."""
TEST_DRIVER = "bitnet_test_driver"
"""Symbol exported by the tests' replacement of the runtime, which computes on the CPU."""


class Properties(ctypes.Structure):
    """``hipDeviceProp_tR0600`` as far as it is read; what is in between is room."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("uuid", ctypes.c_ubyte * 16),
        ("_luid", ctypes.c_ubyte * 16),
        ("total_memory", c_size_t),
        ("local_bytes", c_size_t),
        ("_registers", c_int),
        ("wave", c_int),
        ("_pitch", c_size_t),
        ("group", c_int),
        ("_grid", c_int * 7),
        ("_constant", c_size_t),
        ("_version", c_int * 2),
        ("_alignments", c_size_t * 2),
        ("_overlap", c_int),
        ("compute_units", c_int),
        ("_timeout", c_int),
        ("integrated", c_int),
        ("_textures", c_int * 46),
        ("pci_bus", c_int),
        ("pci_device", c_int),
        ("pci_domain", c_int),
        ("_more", c_int * 141),
        ("architecture", ctypes.c_char * 256),
        ("_rest", ctypes.c_ubyte * 1024),  # 56 bytes in ROCm 6 and 7.0: room for what a newer one may append
    )


_HANDLE = POINTER(c_void_p)
_SIZE = c_uint
CALLS: dict[str, Sequence[Any]] = {
    "hipInit": (c_uint,),
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipGetDevicePropertiesR0600": (POINTER(Properties), c_int),
    "hipSetDevice": (c_int,),
    "hipMalloc": (_HANDLE, c_size_t),
    "hipFree": (c_void_p,),
    "hipHostMalloc": (_HANDLE, c_size_t, c_uint),
    "hipHostFree": (c_void_p,),
    "hipMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "hipMemcpyHtoDAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "hipMemcpyDtoHAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "hipStreamCreateWithFlags": (_HANDLE, c_uint),
    "hipStreamSynchronize": (c_void_p,),
    "hipStreamDestroy": (c_void_p,),
    "hipEventCreateWithFlags": (_HANDLE, c_uint),
    "hipEventRecord": (c_void_p, c_void_p),
    "hipEventSynchronize": (c_void_p,),
    "hipEventDestroy": (c_void_p,),
    "hipStreamBeginCapture": (c_void_p, c_int),
    "hipStreamEndCapture": (c_void_p, _HANDLE),
    "hipGraphInstantiateWithFlags": (_HANDLE, c_void_p, c_ulonglong),
    "hipGraphLaunch": (c_void_p, c_void_p),
    "hipGraphDestroy": (c_void_p,),
    "hipGraphExecDestroy": (c_void_p,),
    "hipModuleLoadData": (_HANDLE, c_char_p),
    "hipModuleGetFunction": (_HANDLE, c_void_p, c_char_p),
    "hipModuleUnload": (c_void_p,),
    "hipModuleLaunchKernel": (c_void_p, *[_SIZE] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
}
"""The calls, each with its arguments' types; all return a status."""


class Hip:
    """An open runtime.

    Args:
        library: The runtime's library.

    Raises:
        AttributeError: It lacks one of :data:`CALLS`: it is too old.

    Attributes:
        is_test_driver: Whether it is the tests' own library, which has no GPU.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls = {name: getattr(library, name) for name in CALLS}
        for name, call in self._calls.items():
            call.argtypes, call.restype = CALLS[name], c_int
        self._name_of = library.hipGetErrorName
        self._name_of.argtypes, self._name_of.restype = (c_int,), c_char_p
        self.is_test_driver = hasattr(library, TEST_DRIVER)

    def status(self, call: str, *args: Any) -> str:
        """Make a call; the name of its error, empty where there is none."""
        status = self._calls[call](*args)
        return (self._name_of(status) or b"").decode() or f"error {status}" if status else ""

    def call(self, device: str, call: str, *args: Any) -> None:
        """Make a call.

        Raises:
            OutOfMemoryError, DeviceLostError, DeviceError: It failed on the device of that name.
        """
        if not (error := self.status(call, *args)):
            return
        what = f"{call} failed with {error}."
        if error in OUT_OF_MEMORY:
            raise failures.out_of_memory(what, device)
        if error in LOST:
            raise failures.lost(what, device, "rocm-smi and the system's log")
        raise DeviceError(what, device=device)

    def handle(self, device: str, call: str, *args: Any) -> int:
        """Make a call whose first argument is where a handle or an address goes; returns that."""
        made = c_void_p()
        self.call(device, call, ctypes.byref(made), *args)
        return made.value or 0

    def version(self) -> tuple[int, int, int]:
        """Version of the runtime, such as ``(6, 4, 43482)``."""
        number = c_int()
        self.call("rocm", "hipRuntimeGetVersion", ctypes.byref(number))
        return number.value // 10_000_000, number.value // 100_000 % 100, number.value % 100_000

    def count(self) -> int:
        """Number of devices, in the driver's order."""
        number = c_int()
        self.call("rocm", "hipGetDeviceCount", ctypes.byref(number))
        return number.value

    def properties(self, ordinal: int) -> Properties:
        """Properties of a device, by its index."""
        found = Properties()
        self.call(f"rocm:{ordinal}", "hipGetDevicePropertiesR0600", ctypes.byref(found), ordinal)
        return found
