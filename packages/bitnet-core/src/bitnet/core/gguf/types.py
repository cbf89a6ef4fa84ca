"""Names, numbers and sizes of the GGUF format: tensor types, metadata value types, bytes of a tensor.

Source: the GGUF specification (ggml ``docs/gguf.md``) and ``ggml.h``; I2_S, TL1 and TL2 are Microsoft's (bitnet.cpp).
Q2_0 is llama.cpp's, with groups of 64. PrismML's fork, which wrote the Ternary-Bonsai files, used the same number for
groups of 128 before it introduced PQ2_0, and Tencent's files use it for STQ1_0 (43 in its pull request to llama.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

MAGIC = b"GGUF"
ALIGNMENT = 32
"""Alignment of tensor data in bytes if ``general.alignment`` is missing."""
MAX_DIMS = 4
I2S_TAIL = 32
"""Bytes after the codes of an I2_S tensor; the first 4 are its f32 scale."""


class GGMLType(IntEnum):
    """How a tensor's elements are stored."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    I2_S = 36
    TL1 = 38
    TL2 = 39
    Q1_0 = 41
    Q2_0 = 42
    Q2_0_G128 = -42  # also 42 in files: only the sizes of the tensors tell the two apart
    STQ1_0 = 43  # or 42
    PQ2_0 = 142
    PTQ1_0 = 143


BLOCKS: Mapping[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
    GGMLType.Q2_0_G128: (128, 34),
    GGMLType.STQ1_0: (256, 42),
    GGMLType.PQ2_0: (128, 34),
    GGMLType.PTQ1_0: (128, 28),
}
"""Elements and bytes of a block, for every type except Microsoft's, whose sizes are not sums of blocks."""


class ValueType(IntEnum):
    """How a metadata value is stored."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: Mapping[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}
"""The numpy type of each fixed-size value type."""

MetadataValue: TypeAlias = "str | bool | int | float | np.generic | npt.NDArray[Any] | list[Any]"
"""Arrays of numbers are numpy arrays; arrays of strings or arrays are lists. Readers return Python numbers; numpy
scalars can be written and keep their type."""


def number_in_files(dtype: GGMLType) -> int:
    """The number of a type in files."""
    return GGMLType.Q2_0 if dtype is GGMLType.Q2_0_G128 else dtype


def tensor_bytes(dtype: GGMLType, shape: Sequence[int]) -> int:
    """Bytes of a tensor with this shape (rows first, as in numpy).

    Raises:
        ValueError: Rows are not a whole number of blocks; the message names the required multiple.
    """
    if dtype is GGMLType.I2_S:
        count = prod(shape)
        if count % 4:
            raise ValueError(f"{count} elements; I2_S needs a multiple of 4")
        return count // 4 + I2S_TAIL
    if dtype in (GGMLType.TL1, GGMLType.TL2):
        if len(shape) != 2 or shape[1] < 256 or prod(shape) % 64:
            raise ValueError(f"the shape is {tuple(shape)}; {dtype.name} needs rows of 256 elements at least")
        return prod(shape) // 4 if dtype is GGMLType.TL1 else tl2_bytes((shape[0], shape[1]))
    elements, size = BLOCKS[dtype]
    row = shape[-1] if shape else 1
    if row % elements:
        raise ValueError(f"rows of {row} elements; {dtype.name} needs a multiple of {elements}")
    return prod(shape) // elements * size


def tl2_bytes(shape: tuple[int, int]) -> int:
    """Bytes of a TL2 matrix in bitnet.cpp: 5 bits for 3 weights, except in 256 of each row, with 4 bits for 2."""
    n, k = shape
    return (k - 256) * n // 3 * 5 // 8 + 256 * n // 2 * 4 // 8
