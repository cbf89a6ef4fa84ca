"""The structures of ``kernels/cpu/program.h``, field by field, for ctypes.

Long, because it mirrors that whole file.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p


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
    CAUSAL_CONV = 16
    DELTA_GATES = 17
    DELTA_RULE = 18
    GATED_QUANT = 19
    ROUTE = 20
    EXPERT_MATMUL = 21
    NORM_TOKENS = 22
    BINARY_MATMUL = 23


class Matrix(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("columns", c_int32), ("stride", c_int32))


class TransformOf(ctypes.Structure):
    """``transform_t``: signs of a row or NULL, and elements of a block; 0: no transform."""

    _fields_ = (("signs", c_void_p), ("block", c_int32), ("pad", c_int32))


class State(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("entry", c_int64))


class CodeBlocks(ctypes.Structure):
    """``code_blocks_t``: where the digits and the scale of a ternary block are."""

    _fields_ = (
        ("columns", c_int32),
        ("size", c_int32),
        ("scale_at", c_int32),
        ("base", c_int32),
        ("place", c_uint8 * 256),
        ("factor", c_uint8 * 256),
    )


class EmbedOp(ctypes.Structure):
    _fields_ = (
        ("table", c_void_p),
        ("type", c_int32),
        ("pad", c_int32),
        ("out", Matrix),
        ("transform", TransformOf),
        ("blocks", c_void_p),
    )


class NormQuantOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("weight", c_void_p),
        ("eps", c_float),
        ("pad", c_int32),
        ("out", Matrix),
        ("scale", c_void_p),
        ("transform", TransformOf),
    )


class TernaryPart(ctypes.Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("rows", c_int32),
        ("scale", c_float),
        ("unpacked", c_void_p),
    )


class TernaryMatmulOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("scale", c_void_p),
        ("parts", c_void_p),
        ("part_count", c_int32),
        ("add", c_int32),
        ("out", Matrix),
        ("group", c_int32),
        ("binary", c_int32),
    )


class TableEmbedOp(ctypes.Structure):
    _fields_ = (
        ("table", TernaryPart),
        ("group", c_int32),
        ("pad", c_int32),
        ("out", Matrix),
        ("transform", TransformOf),
    )


class TableMatmulOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("table", TernaryPart), ("group", c_int32), ("pad", c_int32), ("out", Matrix))


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
        ("binary", c_int64),
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
        ("rotated", c_int32),
        ("table", c_int32),
        ("norms_last", c_int32),
    )


class AttentionOp(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("out", Matrix),
        ("layer", KVLayer),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("table", c_int32),
    )


class GluNormQuantOp(ctypes.Structure):
    _fields_ = (
        ("gate_up", Matrix),
        ("weight", c_void_p),
        ("eps", c_float),
        ("activation", c_int32),
        ("out", Matrix),
        ("scale", Matrix),
        ("transform", TransformOf),
        ("parts", c_int32),
        ("clamp", c_float),
    )


class NormRowsOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("weight", c_void_p),
        ("eps", c_float),
        ("pad", c_int32),
        ("out", Matrix),
        ("transform", TransformOf),
    )


class AddBiasOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("bias", c_void_p))


class CenterRowsOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("out", Matrix))


class NormTokensOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("out", Matrix), ("weight", c_void_p), ("eps", c_float), ("add", c_int32))


class CausalConvOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("out", Matrix),
        ("weight", c_void_p),
        ("state", State),
        ("taps", c_int32),
        ("pad", c_int32),
    )


class DeltaGatesOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("out", Matrix),
        *((name, c_void_p) for name in ("weight", "alpha", "beta", "bias", "rate")),
        ("eps", c_float),
        ("heads", c_int32),
    )


class DeltaRuleOp(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("gates", Matrix),
        ("out", Matrix),
        ("state", State),
        *((name, c_int32) for name in ("k_heads", "v_heads", "d_k", "d_v")),
        ("eps", c_float),
        ("tiled", c_int32),
    )


class GatedQuantOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("gate", Matrix),
        ("out", Matrix),
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("eps", c_float),
        *((name, c_int32) for name in ("head_dim", "silu", "untile")),
        ("transform", TransformOf),
    )


class RouteOp(ctypes.Structure):
    _fields_ = (
        ("x", Matrix),
        ("ids", Matrix),
        ("shares", Matrix),
        ("weight", c_void_p),
        ("router", c_void_p),
        ("eps", c_float),
        ("experts", c_int32),
    )


class ExpertMatmulOp(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("x", "scale", "ids", "shares")),
        ("parts", c_void_p),
        ("part_count", c_int32),
        ("experts", c_int32),
        ("out", Matrix),
        ("group", c_int32),
        ("each", c_int32),
    )


class DenseMatmulOp(ctypes.Structure):
    _fields_ = (("x", Matrix), ("weight", c_void_p), ("type", c_int32), ("pad", c_int32), ("out", Matrix))


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
        ("norm_tokens", NormTokensOp),
        ("causal_conv", CausalConvOp),
        ("delta_gates", DeltaGatesOp),
        ("delta_rule", DeltaRuleOp),
        ("gated_quant", GatedQuantOp),
        ("route", RouteOp),
        ("expert_matmul", ExpertMatmulOp),
    )


class Op(ctypes.Structure):
    _anonymous_ = ("any",)
    _fields_ = (("kind", c_int32), ("pad", c_int32), ("any", AnyOp))


KV_TYPES = "f32", "f16", "i8"
"""Types of the KV cache, numbered as in ``enum kv_type`` of ``kernels/cpu/program.h``."""


ACTIVATIONS = "relu2", "silu", "gelu_tanh"
"""Numbered as in ``enum activation`` of ``kernels/cpu/program.h``."""
WEIGHT_TYPES = "f32", "f16", "q8_0", "q4_0", "q6_k", "q4_k"
"""Types of dense matrices, numbered as in ``enum weight_type`` of ``kernels/cpu/program.h``."""


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
            "state_from",
            "state_to",
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
