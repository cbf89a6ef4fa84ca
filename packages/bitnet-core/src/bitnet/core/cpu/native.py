"""Opens the native library, and declares its structures and functions for ctypes.

The structures mirror ``kernels/cpu/program.h`` field by field; :func:`library` checks that their sizes agree.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import TypeAlias

from bitnet.core.support.dynlib import Library, open_library

PATH = (
    Path(__file__).parent
    / "_native"
    / {
        "darwin": "libbitnet_cpu.dylib",
        "win32": "bitnet_cpu.dll",
    }.get(sys.platform, "libbitnet_cpu.so")
)

LEVELS = ("amx", "vbmi_avx512", "avx512", "vnni_avx2", "avx2", "neon", "scalar")
"""Every instruction-set level for which kernels are compiled, on any processor. The part after the last underscore
names the device."""

Handle: TypeAlias = int
"""Address of an object made by the library."""


class OpKind(enum.IntEnum):
    """``enum op_kind``."""

    EMBED = 0
    NORM_QUANT = 1
    TERNARY_MATMUL = 2
    ROPE_APPEND = 3
    ATTENTION = 4
    GLU_NORM_QUANT = 5
    NORM_ROWS = 6
    DENSE_MATMUL = 7
    SAMPLE = 8
    QUANTIZE = 9
    HEAD_SAMPLE = 10
    GROUP_MATMUL = 11
    TABLE_EMBED = 12
    TABLE_MATMUL = 13
    ADD_BIAS = 14
    CENTER_ROWS = 15


class Matrix(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("columns", c_int32), ("stride", c_int32))


class EmbedOp(ctypes.Structure):
    _fields_ = (("table", c_void_p), ("half", c_int32), ("pad", c_int32), ("out", Matrix))


class NormQuantOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("weight", c_void_p),
        ("eps", c_float),
        ("pad", c_int32),
        ("out", Matrix),
        ("scale", c_void_p),
    )


class TernaryPart(ctypes.Structure):
    _fields_ = (("codes", c_void_p), ("scales", c_void_p), ("rows", c_int32), ("scale", c_float))


class TernaryMatmulOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("scale", c_void_p),
        ("parts", c_void_p),
        ("part_count", c_int32),
        ("add", c_int32),
        ("out", Matrix),
        ("group", c_int32),
        ("pad", c_int32),
    )


class TableEmbedOp(ctypes.Structure):
    _fields_ = (("table", TernaryPart), ("group", c_int32), ("pad", c_int32), ("out", Matrix))


class TableMatmulOp(ctypes.Structure):
    _fields_ = (("x", Matrix), *TableEmbedOp._fields_)


class PackJob(ctypes.Structure):
    """``pack_t``: a ternary matrix, the destination of its packed form, and its scales if there are several."""

    _fields_ = (
        ("codes", c_void_p),
        ("packed", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("group", c_int64),
        ("scales", c_void_p),
        ("packed_scales", c_void_p),
    )


class KVLayer(ctypes.Structure):
    _fields_ = (("k", c_void_p), ("v", c_void_p))


class RopeAppendOp(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("layer", KVLayer),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("interleaved", c_int32),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("pad", c_int32),
    )


class AttentionOp(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("out", Matrix),
        ("layer", KVLayer),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("pad", c_int32),
    )


class GluNormQuantOp(ctypes.Structure):
    _fields_ = (
        ("gate_up", Matrix),
        ("weight", c_void_p),
        ("eps", c_float),
        ("silu", c_int32),
        ("out", Matrix),
        ("scale", c_void_p),
    )


class NormRowsOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("weight", c_void_p), ("eps", c_float), ("pad", c_int32), ("out", Matrix))


class AddBiasOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("bias", c_void_p))


class CenterRowsOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("out", Matrix))


class DenseMatmulOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("weight", c_void_p), ("half", c_int32), ("pad", c_int32), ("out", Matrix))


class SampleOp(ctypes.Structure):
    _fields_ = (("logits", Matrix), ("out", c_void_p), ("marks", c_void_p), ("biases", c_void_p))


class QuantizeOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("rows", c_int32), ("pad", c_int32), ("codes", Matrix), ("scale", c_void_p))


class HeadSampleOp(ctypes.Structure):
    _fields_ = (
        ("dense", c_void_p),
        ("sample", c_void_p),
        ("codes", c_void_p),
        ("step", c_void_p),
        ("chunk_step", c_void_p),
        ("chunk_norm", c_void_p),
        ("column", c_void_p),
        ("offset", c_void_p),
    )


class AnyOp(ctypes.Union):
    _fields_ = (
        ("embed", EmbedOp),
        ("norm_quant", NormQuantOp),
        ("ternary_matmul", TernaryMatmulOp),
        ("rope_append", RopeAppendOp),
        ("attention", AttentionOp),
        ("glu_norm_quant", GluNormQuantOp),
        ("norm_rows", NormRowsOp),
        ("dense_matmul", DenseMatmulOp),
        ("sample", SampleOp),
        ("quantize", QuantizeOp),
        ("head_sample", HeadSampleOp),
        ("table_embed", TableEmbedOp),
        ("table_matmul", TableMatmulOp),
        ("add_bias", AddBiasOp),
        ("center_rows", CenterRowsOp),
    )


class Op(ctypes.Structure):
    _anonymous_ = ("any",)
    _fields_ = (("kind", c_int32), ("pad", c_int32), ("any", AnyOp))


KV_TYPES = "f32", "f16", "i8"
"""Types of the KV cache, numbered as in ``enum kv_type`` of ``kernels/cpu/program.h``."""


class KV(ctypes.Structure):
    _fields_ = (
        ("type", c_int32),
        ("block_size", c_int32),
        ("k_stride", c_int32),
        ("v_stride", c_int32),
        ("block", c_int64),
        ("k_head", c_int64),
        ("v_head", c_int64),
    )


class NativeLimits(ctypes.Structure):
    _fields_ = (("max_tokens", c_int32), ("max_seqs", c_int32), ("max_rows", c_int32), ("max_blocks", c_int32))


class NativeStepLayout(ctypes.Structure):
    """Word offsets, under the names of :class:`~bitnet.core.hal.StepLayout`."""

    _fields_ = tuple(
        (name, c_int32)
        for name in (
            "words",
            "tokens",
            "token_seq",
            "seq_begin",
            "seq_len",
            "rows",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed_lo",
            "seed_hi",
            "slot",
            "repetition",
            "presence",
            "frequency",
            "block_table",
        )
    )


class NativeProgram(ctypes.Structure):
    _fields_ = (
        ("ops", c_void_p),
        ("op_count", c_int32),
        ("deterministic", c_int32),
        ("kv", KV),
        ("limits", NativeLimits),
        ("step", NativeStepLayout),
    )


FUNCTIONS = {
    "bitnet_level": (c_void_p, (c_int,)),
    "bitnet_level_name": (c_char_p, (c_void_p,)),
    "bitnet_level_runs": (c_bool, (c_void_p,)),
    "bitnet_packed_bytes": (c_size_t, (c_void_p, c_int64, c_int64, c_int64)),
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
    "bitnet_packed_scales": (c_size_t, (c_void_p, c_int64, c_int64, c_int64)),
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
    found = open_library(str(PATH))
    if found.handle is None:
        return found
    try:
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(found.handle, name)
            function.restype, function.argtypes = result, arguments
        sizes = found.handle.bitnet_op_size(), found.handle.bitnet_program_size()
    except AttributeError as error:
        return Library(None, "", {str(PATH): f"made for another version of bitnet-core: {error}"}, "broken")
    if sizes != (ctypes.sizeof(Op), ctypes.sizeof(NativeProgram)):
        return Library(None, "", {str(PATH): "made for another version of bitnet-core"}, "broken")
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
