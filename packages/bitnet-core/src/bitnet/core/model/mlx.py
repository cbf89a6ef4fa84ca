"""Reads MLX's quantised matrices: codes of 2 bits or 1, with a scale and a bias for each group of columns.

A weight is ``scale * code + bias``. Sixteen codes of 2 bits, or 32 of 1 bit, are in a little-endian ``uint32``, the
first in its lowest bits; scales and biases are ``[N, K / group]``. A code of 2 bits stands for -1, 0 or 1, so the bias
is minus the scale; a code of 1 bit for -1 or 1, so the bias is minus half the scale. Matrices of experts may be stacked
in front of the rows, and have one scale for each row instead (``row_alpha``). Source: ``mx.quantize`` and
``mx.dequantize`` in MLX's documentation; tested against what ``mx.dequantize`` makes of tensors of 2 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.blocks import FORMATS
from bitnet.core.gguf.quants import decode
from bitnet.core.gguf.ternary import pack_codes, transcode
from bitnet.core.hal import TernaryData, TernaryWeight
from bitnet.core.model.safetensors import Stored

BITS = {1: GGMLType.Q1_0, 2: GGMLType.Q2_0}
"""Bits of a code, and the type whose codes are packed alike."""
GROUPS = (32, 64, 128)
"""Numbers of columns that may share a scale in MLX."""
FLOATS = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}
"""Types of floats in safetensors."""


def ternary_matrix(words: Stored, scales: Stored | None, biases: Stored | None, columns: int) -> TernaryWeight:
    """A ternary matrix ``[N, columns]``: in every group of columns, the bias is minus the scale (half of it with codes
    of 1 bit), and no code is 3.

    Raises:
        ModelFileError: The tensors do not fit together, or have other bits. Groups that are not ternary, or whose
            scale float16 cannot represent, are found when the matrix is loaded; that error names row and columns.
    """
    words = _matrix(words)
    scales, biases = (None if part is None else _matrix(part) for part in (scales, biases))
    bits = _bits(words, columns)
    if bits not in BITS:
        found = "no matrix" if bits is None else f"{bits:g} bits a weight"
        raise words.error(f"U32 {words.shape} is {found}; ternary weights must be a matrix of 1 bit or 2 bits each.")
    kind = BITS[int(bits)]
    if scales is None or biases is None:
        raise words.error("has no matching scales and biases.")
    group = _check_groups(words, scales, biases, columns)

    def load() -> TernaryData:
        units, shifts = _floats(scales), _floats(biases)
        if kind is GGMLType.Q1_0:
            units /= 2
        data = words.bytes().reshape(words.shape[0], -1)
        shape = words.shape[0], columns
        packed = transcode(shape, lambda a, b: pack_codes(_codes(words, kind, data, units, shifts, a, b)))
        return TernaryData(packed, _halves(scales, units, group))

    binary = kind is GGMLType.Q1_0 and columns % 128 == 0
    return TernaryWeight((words.shape[0], columns), load, words.release, group, binary=binary)


def ternary_rows(words: Stored, alphas: Stored, columns: int) -> TernaryWeight:
    """A ternary matrix of codes of 2 bits, whose weights are ``alpha * (code - 1)`` with one alpha for each row, as in
    MLX's folders of Maple. All experts' matrices may be stacked in front of the rows.

    Raises:
        ModelFileError: The tensors do not fit together. A code of 3, and an alpha that float16 cannot represent, are
            found when the matrix is loaded.
    """
    if _bits(words, columns) != 2:
        raise words.error(f"U32 {words.shape} does not hold rows of {columns} codes of 2 bits each.")
    rows = words.shape[:-1]
    if alphas.shape not in (rows, (*rows, 1)) or alphas.dtype not in FLOATS:
        raise alphas.error(f"is {alphas.dtype} {alphas.shape}; a number for each row of {rows} is expected.")
    n = math.prod(rows)

    def load() -> TernaryData:
        units = _floats(alphas).reshape(n, 1)
        data = words.bytes().reshape(n, -1)
        packed = transcode((n, columns), lambda a, b: pack_codes(_codes(words, BITS[2], data, units, -units, a, b)))
        return TernaryData(packed, _halves(alphas, units, columns))

    return TernaryWeight((n, columns), load, words.release, columns)


def is_ternary(words: Stored, columns: int) -> bool:
    """Whether a packed matrix has the bits of a ternary one."""
    return _bits(words, columns) in BITS


def table(words: Stored, scales: Stored | None, biases: Stored | None, columns: int) -> TensorSource:
    """An embedding or a head of 4 or 8 bits a number, as f16.

    Raises:
        ModelFileError: The tensors do not fit together.
    """
    bits = _bits(words, columns)
    if bits not in (4, 8) or len(words.shape) != 2:
        raise words.error(f"U32 {words.shape} does not hold rows of {columns} numbers of 4 or 8 bits.")
    if scales is None or biases is None:
        raise words.error("has no matching scales and biases.")
    _check_groups(words, scales, biases, columns)

    def data() -> Iterator[npt.NDArray[np.float16]]:
        units, shifts, width = _floats(scales), _floats(biases), int(bits)
        packed = words.bytes().reshape(len(units), -1)
        for begin in range(0, len(units), 1024):
            part = packed[begin : begin + 1024]
            codes = part if width == 8 else np.stack([part & 15, part >> 4], axis=2)
            grouped = codes.reshape(len(part), units.shape[1], -1).astype(np.float32)
            values = grouped * units[begin : begin + 1024, :, None] + shifts[begin : begin + 1024, :, None]
            with np.errstate(over="ignore"):  # refused in the next line
                out = values.astype(np.float16).reshape(len(part), columns)
            if not np.isfinite(out).all():
                raise words.error("a value is not finite in float16.")
            yield out
        words.release()

    return TensorSource((words.shape[0], columns), GGMLType.F16, data)


def _check_groups(words: Stored, scales: Stored, biases: Stored, columns: int) -> int:
    """The columns that share a scale and a bias."""
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    group = columns // groups if groups else 0
    if scales.shape != (words.shape[0], groups) or group * groups != columns or group not in GROUPS:
        raise scales.error(f"has the shape {scales.shape}; one scale for each 32, 64 or 128 columns is expected.")
    if biases.shape != scales.shape or biases.dtype not in FLOATS or scales.dtype not in FLOATS:
        raise biases.error(f"is {biases.dtype} {biases.shape} beside scales of {scales.dtype} {scales.shape}.")
    return group


def _halves(scales: Stored, units: npt.NDArray[np.float32], group: int) -> npt.NDArray[np.float16]:
    """Scales as float16, which must represent them."""
    with np.errstate(over="ignore"):  # refused in the next lines
        halves = units.astype(np.float16)
    wrong = np.argwhere(halves != units)
    if wrong.size:
        row, at = map(int, wrong[0])
        raise scales.error(f"float16 cannot represent the scale {units[row, at]} of {_place(row, at, group)}.")
    return halves


def _matrix(tensor: Stored) -> Stored:
    """A tensor with all but its last dimension as rows."""
    if len(tensor.shape) != 3:
        return tensor
    return replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))


def _bits(words: Stored, columns: int) -> float | None:
    """Bits of a weight; None if a tensor has no rows."""
    return words.shape[-1] * 32 / columns if len(words.shape) > 1 else None


def _floats(tensor: Stored) -> npt.NDArray[np.float32]:
    out = np.empty(tensor.shape, np.float32)
    try:
        decode(FLOATS[tensor.dtype], tensor.bytes(), out)
    except ValueError as error:
        raise tensor.error(f"{error}.") from None
    return out


def _codes(
    words: Stored,
    kind: GGMLType,
    data: npt.NDArray[np.uint8],
    units: npt.NDArray[np.float32],
    biases: npt.NDArray[np.float32],
    begin: int,
    end: int,
) -> npt.NDArray[np.uint8]:
    """Codes (weight + 1) of some rows, whose weights of 1 are worth ``units``."""
    codes = FORMATS[kind].unpack(data[begin:end])
    unit, bias = units[begin:end], biases[begin:end]
    group = codes.shape[1] // unit.shape[1]
    grouped = codes.reshape(*unit.shape, group)
    zero = (unit == 0) & (bias == 0) | (bias == 0) & (grouped == 0).all(axis=2)
    grouped[zero] = 1
    wrong = np.argwhere((bias != -unit) & ~zero)
    if wrong.size:
        row, at = map(int, wrong[0])
        place, scale = _place(begin + row, at, group), unit[row, at] * (2 if kind is GGMLType.Q1_0 else 1)
        raise _not_ternary(words, f"the bias of {place} is {bias[row, at]}, its scale {scale}")
    wrong = np.argwhere(grouped == 3)
    if wrong.size:
        row, at, column = map(int, wrong[0])
        raise _not_ternary(words, f"column {at * group + column} of row {begin + row} has the code 3, a weight of 2")
    return codes


def _not_ternary(words: Stored, why: str) -> ModelFileError:
    return words.error(f"is not ternary: {why}.")


def _place(row: int, at: int, group: int) -> str:
    return f"columns {at * group} to {at * group + group - 1} of row {row}"
