"""Opens the native library and declares its functions for ctypes; :func:`library` checks that the sizes of its
structures agree with those of :mod:`bitnet.core.cpu.structures`."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import TypeAlias

from bitnet.core.cpu.structures import DenseMatmulOp, HeadSampleOp, NativeProgram, Op, PackJob
from bitnet.core.support.dynlib import Library, open_library

NAMES = {
    "darwin": ("libbitnet_cpu.dylib",),
    "win32": ("bitnet_cpu.dll",),
    "emscripten": ("libbitnet_cpu_relaxed.wasm", "libbitnet_cpu.wasm"),
}
PATHS = tuple(Path(__file__).parent / "_native" / name for name in NAMES.get(sys.platform, ("libbitnet_cpu.so",)))
"""Files of the library, best first. The first one that loads is the library: a browser refuses one as a whole if it
lacks an instruction."""

LEVELS = ("amx", "vbmi_avx512", "avx512", "vnni_avx2", "avx2", "neon", "relaxed_simd128", "simd128", "scalar")
"""Every instruction-set level for which kernels are compiled, on any processor. The part after the last underscore
names the device."""

Handle: TypeAlias = int
"""Address of an object made by the library."""


FUNCTIONS = {
    "bitnet_level": (c_void_p, (c_int,)),
    "bitnet_level_name": (c_char_p, (c_void_p,)),
    "bitnet_level_runs": (c_bool, (c_void_p,)),
    "bitnet_packed_bytes": (c_size_t, (c_void_p, c_int64, c_int64, c_int64, c_int64)),
    "bitnet_op_size": (c_size_t, ()),
    "bitnet_program_size": (c_size_t, ()),
    "bitnet_pages_alloc": (c_void_p, (c_size_t,)),
    "bitnet_pages_free": (None, (c_void_p, c_size_t)),
    "bitnet_pool_new": (c_void_p, (c_int,)),
    "bitnet_pool_delete": (None, (c_void_p,)),
    "bitnet_pack": (None, (c_void_p, c_void_p, POINTER(PackJob))),
    "bitnet_executable_new": (c_void_p, (c_void_p, c_void_p, c_int, POINTER(NativeProgram))),
    "bitnet_executable_delete": (None, (c_void_p,)),
    "bitnet_executable_bytes": (c_size_t, (c_void_p,)),
    "bitnet_executable_run": (None, (c_void_p, c_void_p, c_int32, c_void_p, c_void_p)),
    "bitnet_executable_kernel": (c_char_p, (c_void_p, c_int)),
    "bitnet_head_bytes": (c_size_t, (c_void_p, c_int64, c_int64)),
    "bitnet_head_pack": (c_bool, (c_void_p, c_void_p, c_int, POINTER(DenseMatmulOp), POINTER(HeadSampleOp))),
    "bitnet_executable_scored": (c_int64, (c_void_p,)),
    "bitnet_executable_exact": (c_bool, (c_void_p,)),
    "bitnet_packed_scales": (c_size_t, (c_void_p, c_int64, c_int64, c_int64)),
    "bitnet_one_bit": (c_bool, (c_void_p,)),
    "bitnet_guard": (c_int, (c_void_p, c_size_t)),
    "bitnet_unguard": (None, (c_int,)),
    "bitnet_guard_lost": (c_bool, (c_int,)),
    "bitnet_probe_read": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "bitnet_probe_int8": (c_int64, (c_void_p, c_void_p, c_int64)),
}
"""Result type and argument types of each function."""


@cache
def library() -> Library:
    """The library with its functions declared, or why it cannot be opened. Opening it starts no thread."""
    found = open_library([str(path) for path in PATHS])
    if found.handle is None:
        return found
    try:
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(found.handle, name)
            function.restype, function.argtypes = result, arguments
        sizes = found.handle.bitnet_op_size(), found.handle.bitnet_program_size()
    except AttributeError as error:
        return Library(None, "", {found.name: f"made for another version of bitnet-core: {error}"}, "broken")
    if sizes != (ctypes.sizeof(Op), ctypes.sizeof(NativeProgram)):
        return Library(None, "", {found.name: "made for another version of bitnet-core"}, "broken")
    return found


def levels(opened: ctypes.CDLL | None) -> dict[str, Handle]:
    """The levels of an open library that this processor supports, best first."""
    if opened is None:
        return {}
    found = {}
    for index in range(len(LEVELS)):
        if (level := opened.bitnet_level(index)) and opened.bitnet_level_runs(level):
            found[opened.bitnet_level_name(level).decode()] = level
    return found
