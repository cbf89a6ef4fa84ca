"""AMD's run-time compiler, ``libamd_comgr``, through ctypes: compiles OpenCL C to a code object for one architecture.

It comes with every HIP runtime. The kernels bring their own built-ins, so neither its headers nor its device library
are asked for, and it does what clang does with the same options. Numbers are those of ``amd_comgr.h`` 2.4 and 3.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from bitnet.core.errors import BitNetError, KernelCompileError

OPENCL_2_0 = 2
SOURCE, LOG, EXECUTABLE = 1, 5, 8
"""Kinds of data (``amd_comgr_data_kind_t``), alike in versions 2 and 3."""
STEPS = {2: (2, 6, 9), 3: (2, 4, 7)}
"""``COMPILE_SOURCE_TO_BC``, ``CODEGEN_BC_TO_RELOCATABLE`` and ``LINK_RELOCATABLE_TO_EXECUTABLE`` by the library's major
version, which renumbered them (``amd_comgr_action_kind_t``)."""
TRIPLE = "amdgcn-amd-amdhsa--"

_HANDLE = POINTER(c_uint64)  # each of the library's handles is a structure of one 64-bit number
CALLS: dict[str, Sequence[Any]] = {
    "get_isa_count": (POINTER(c_size_t),),
    "get_isa_name": (c_size_t, POINTER(c_char_p)),
    "create_data": (c_int, _HANDLE),
    "release_data": (c_uint64,),
    "set_data": (c_uint64, c_size_t, c_char_p),
    "set_data_name": (c_uint64, c_char_p),
    "get_data": (c_uint64, POINTER(c_size_t), c_void_p),
    "create_data_set": (_HANDLE,),
    "destroy_data_set": (c_uint64,),
    "data_set_add": (c_uint64, c_uint64),
    "action_data_count": (c_uint64, c_int, POINTER(c_size_t)),
    "action_data_get_data": (c_uint64, c_int, c_size_t, _HANDLE),
    "create_action_info": (_HANDLE,),
    "destroy_action_info": (c_uint64,),
    "action_info_set_isa_name": (c_uint64, c_char_p),
    "action_info_set_language": (c_uint64, c_int),
    "action_info_set_option_list": (c_uint64, POINTER(c_char_p), c_size_t),
    "action_info_set_logging": (c_uint64, c_bool),
    "do_action": (c_int, c_uint64, c_uint64, c_uint64),
}
"""The calls, less ``amd_comgr_``, each with its arguments' types; all return a status."""


class ComgrError(BitNetError):
    """A call of the library failed, or it is of another version."""


class Comgr:
    """The open library, which several threads may use at once.

    Raises:
        AttributeError: It lacks one of :data:`CALLS`.
        ComgrError: Its version is not supported.

    Attributes:
        version: Such as ``(3, 0)``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls = {name: getattr(library, f"amd_comgr_{name}") for name in CALLS}
        for name, call in self._calls.items():
            call.argtypes, call.restype = CALLS[name], c_int
        major, minor = c_size_t(), c_size_t()
        library.amd_comgr_get_version(byref(major), byref(minor))
        self.version = major.value, minor.value
        if major.value not in STEPS:
            raise ComgrError(f"libamd_comgr {major.value}.{minor.value} is neither version 2 nor 3.")

    def architectures(self) -> frozenset[str]:
        """Those that it compiles for, such as ``gfx90a``."""
        count, name = c_size_t(), c_char_p()
        self._do("get_isa_count", byref(count))
        names = []
        for index in range(count.value):
            self._do("get_isa_name", index, byref(name))
            names.append((name.value or b"").decode().removeprefix(TRIPLE))
        return frozenset(names)

    def compile(self, source: str, name: str, architecture: str, options: Sequence[str], device: str) -> bytes:
        """A code object of OpenCL C.

        Args:
            name: Name of the source in messages.
            device: The device's name, for errors.

        Raises:
            KernelCompileError: The source does not compile; the log is the compiler's.
            ComgrError: Something else failed, such as memory.
        """
        if architecture not in self.architectures():
            version = ".".join(map(str, self.version))
            raise KernelCompileError(
                f"libamd_comgr {version} does not know {architecture}.", device=device, log="", hint="Update ROCm."
            )
        with ExitStack() as stack:
            info, given = self._info(stack, architecture), self._made(stack, "data_set")
            data, text = self._made(stack, "data", SOURCE), source.encode()
            self._do("set_data", data, len(text), text)
            self._do("set_data_name", data, name.encode())
            self._do("data_set_add", given, data)
            *compiling, linking = STEPS[self.version[0]]
            for action in (*compiling, linking):
                self._options(info, options if action != linking else ())  # the linker knows none of them
                result = self._made(stack, "data_set")
                if self._calls["do_action"](action, info, given, result):
                    log = b"\n".join(self._contents(result, LOG)).decode(errors="replace").strip("\0\n ")
                    raise KernelCompileError(f"{name} does not compile.", device=device, log=log)
                given = result
            (code,) = self._contents(given, EXECUTABLE)
            return code

    def _info(self, stack: ExitStack, architecture: str) -> int:
        info = self._made(stack, "action_info")
        self._do("action_info_set_language", info, OPENCL_2_0)
        self._do("action_info_set_isa_name", info, f"{TRIPLE}{architecture}".encode())
        self._do("action_info_set_logging", info, True)
        return info

    def _options(self, info: int, options: Sequence[str]) -> None:
        words = (c_char_p * len(options))(*(option.encode() for option in options))
        self._do("action_info_set_option_list", info, words, len(options))

    def _contents(self, data_set: int, kind: int) -> list[bytes]:
        """The data of a kind in a set."""
        count, size, data = c_size_t(), c_size_t(), c_uint64()
        self._do("action_data_count", data_set, kind, byref(count))
        found = []
        for index in range(count.value):
            self._do("action_data_get_data", data_set, kind, index, byref(data))
            try:
                self._do("get_data", data, byref(size), None)
                room = ctypes.create_string_buffer(size.value)
                self._do("get_data", data, byref(size), room)
            finally:
                self._calls["release_data"](data)
            found.append(room.raw)
        return found

    def _made(self, stack: ExitStack, what: str, *args: Any) -> int:
        """A new handle, which the stack gives back."""
        handle = c_uint64()
        self._do(f"create_{what}", *args, byref(handle))
        stack.callback(self._calls[f"{'release' if what == 'data' else 'destroy'}_{what}"], handle)
        return handle.value

    def _do(self, call: str, *args: Any) -> None:
        if status := self._calls[call](*args):
            raise ComgrError(f"amd_comgr_{call} failed with status {status}.")
