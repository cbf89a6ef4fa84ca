"""Ternary packings: the one that devices accept (I2_S rows), and transcoding of other encodings into it.

A packed row has ``ceil(K / 128) * 32`` bytes: each 128 weights take 32 bytes, and byte ``g`` holds weights
``g, g+32, g+64, g+96`` in bits 7-6, 5-4, 3-2, 1-0; code = weight + 1, and padding past K has code 1.
For K a multiple of 128, this is Microsoft's I2_S as x86 builds of bitnet.cpp write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf.blocks import (
    FORMATS,
    TWO_BITS,
    block_scales,
    code_bytes,
    has_threes,
    packed_codes,
    ternary_codes,
)
from bitnet.core.gguf.quants import DECODERS
from bitnet.core.gguf.tl_packing import check_tl_tiles, tl_rows
from bitnet.core.gguf.types import BLOCKS, I2S_TAIL, GGMLType
from bitnet.core.hal.operands import MAX_K
from bitnet.core.hal.program import TernaryData

GROUP = 128
"""Weights in a packed block of a row."""
SHIFTS = np.array([6, 4, 2, 0], np.uint8)[:, None]
"""Bits to the right of each of the four codes in a byte."""
PIECE = 1 << 21
"""Weights transcoded at a time; at least 128 rows."""

I2SLayout: TypeAlias = Literal["official", "arm", "columns"]
"""Layouts of an I2_S tensor. ``official``: as above, with blocks running across rows. ``arm``: 64 weights in 16 bytes,
as written by some ARM builds of bitnet.cpp. ``columns``: byte ``r K + c`` holds column ``c`` of rows ``4 r … 4 r + 3``
in bits 7-6 … 1-0, as written by x86 builds without ``ACT_PARALLEL``. Files do not record the layout."""
I2S_LAYOUTS: tuple[I2SLayout, ...] = get_args(I2SLayout)

BLOCK_TYPES = tuple(FORMATS)
"""Types with a scale in each block."""
LOOKUP_TYPES = (GGMLType.TL1, GGMLType.TL2)
"""Types ordered by a kernel's tiles, with the scale in a separate tensor."""
TERNARY_TYPES = (GGMLType.I2_S, *BLOCK_TYPES, *LOOKUP_TYPES, GGMLType.F32, GGMLType.F16, GGMLType.BF16)
"""Types that a ternary matrix may have in a file."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


def row_bytes(k: int) -> int:
    """Bytes of a packed row of ``k`` weights."""
    return -(-k // GROUP) * (GROUP // 4)


def pack_ternary(weights: npt.NDArray[np.int8]) -> Bytes:
    """Pack ``int8[N, K]`` weights in {-1, 0, +1} into ``uint8[N, ceil(K / 128) * 32]``."""
    return pack_codes((weights + 1).view(np.uint8))


def pack_codes(codes: Bytes) -> Bytes:
    """Pack ``uint8[N, K]`` codes (weight + 1)."""
    n, k = codes.shape
    if k % GROUP:
        padded = np.ones((n, row_bytes(k) * 4), np.uint8)
        padded[:, :k] = codes
        codes = padded
    return _pack(codes, GROUP // 4)


def unpack_ternary(packed: Bytes, k: int) -> npt.NDArray[np.int8]:
    """The ``int8[N, k]`` weights of packed rows; the unused code 3 becomes 2."""
    codes = _unpack(packed, GROUP // 4)[:, :k].view(np.int8)
    codes -= 1
    return codes


def _pack(codes: Bytes, width: int) -> Bytes:
    """Pack rows of codes: each ``4 * width`` codes into ``width`` bytes."""
    n = len(codes)
    quarters = codes.reshape(n, -1, 4, width)
    packed: Bytes = quarters[:, :, 0] << np.uint8(6)
    packed |= quarters[:, :, 1] << 4
    packed |= quarters[:, :, 2] << 2
    packed |= quarters[:, :, 3]
    return packed.reshape(n, -1)


def _unpack(packed: Bytes, width: int) -> Bytes:
    """The reverse of :func:`_pack`."""
    n = len(packed)
    groups = packed.reshape(n, -1, 1, width)
    codes: Bytes = groups >> SHIFTS
    codes &= 3
    return codes.reshape(n, -1)


def i2s_bytes(weights: npt.NDArray[np.int8], scale: float) -> Bytes:
    """The data of an I2_S tensor in a GGUF file, for ``int8[N, K]`` weights in {-1, 0, +1}.

    The blocks of 128 run across rows, so ``N * K`` must be a multiple of 128, but ``K`` need not be.

    Raises:
        ValueError: ``N * K`` is not a multiple of 128.
    """
    if weights.size % GROUP:
        raise ValueError(f"I2_S needs a multiple of {GROUP} weights; {weights.shape} has {weights.size}.")
    codes = (weights + 1).view(np.uint8).reshape(-1, GROUP)
    return np.concatenate([_pack(codes, GROUP // 4).reshape(-1), i2s_tail(scale)])


def i2s_tail(scale: float) -> Bytes:
    """The bytes after the codes of an I2_S tensor: its scale as f32, and zeros."""
    tail = np.zeros(I2S_TAIL, np.uint8)
    tail[:4] = np.array([scale], "<f4").view(np.uint8)
    return tail


def check_ternary(dtype: GGMLType, shape: tuple[int, int], layout: I2SLayout) -> None:
    """Check that :func:`load_ternary` can read such a tensor.

    Raises:
        ValueError: It cannot; the message says why.
    """
    if dtype not in TERNARY_TYPES:
        raise ValueError(f"{dtype.name} holds no ternary weights; {', '.join(t.name for t in TERNARY_TYPES)} can")
    n, k = shape
    if k > MAX_K:
        raise ValueError(f"rows of {k} columns; the limit is {MAX_K}")
    if dtype is GGMLType.I2_S and layout != "columns" and n * k % GROUP:
        raise ValueError(f"{n} rows of {k} weights; I2_S needs a multiple of {GROUP} in all")
    if dtype in LOOKUP_TYPES:
        check_tl_tiles(dtype, shape)
    if dtype is GGMLType.I2_S and layout == "columns" and n % 4:
        raise ValueError(f"{n} rows; the I2_S layout 'columns' needs a multiple of 4")


def load_ternary(
    dtype: GGMLType, shape: tuple[int, int], data: Bytes, layout: I2SLayout, *, master: bool, grouped: bool = False
) -> TernaryData:
    """Load a tensor in the packing for devices: a view if the file stores it like that, else transcoded in pieces.

    Args:
        master: Whether float tensors may be master weights, which are quantised absmean (BitNet b1.58, Ma et al. 2024).
            If false, they must already be ternary.
        grouped: Whether to keep the scale of each block of one of :data:`BLOCK_TYPES`.

    Raises:
        ValueError: The data is not a ternary matrix, or it has more than one scale and ``grouped`` is false.
    """
    n, k = shape
    if dtype is GGMLType.I2_S:
        scale = np.array([i2s_scale(data)], np.float32)
        if layout == "official" and k % GROUP == 0:
            return TernaryData(data[:-I2S_TAIL].reshape(n, k // 4), scale)
        return TernaryData(transcode(shape, lambda a, b: pack_codes(i2s_codes(data, k, a, b, layout))), scale)
    if dtype in LOOKUP_TYPES:
        packed = np.concatenate([pack_codes(codes) for codes in tl_rows(dtype, shape, data)])
        return TernaryData(packed, np.ones(1, np.float32))
    elements, size = BLOCKS[dtype]
    blocks = data.reshape(n, k // elements * size)
    if dtype in BLOCK_TYPES:
        raw = block_scales(dtype, data)
        scales = raw.reshape(n, -1) if grouped else np.array([_block_scale(raw)], np.float32)
        if not np.isfinite(scales).all():
            raise ValueError("a scale is not finite")
        return TernaryData(transcode(shape, lambda a, b: _packed_rows(dtype, blocks, k, a, b)), scales)
    unit, rounded = _float_scale(dtype, blocks, master)
    codes = transcode(shape, lambda a, b: pack_codes(_float_rows(dtype, blocks[a:b], unit, rounded)))
    return TernaryData(codes, np.array([unit], np.float32))


def transcode(shape: tuple[int, int], rows: Callable[[int, int], Bytes]) -> Bytes:
    """All rows of a matrix, which ``rows(begin, end)`` packs a piece at a time."""
    n, k = shape
    packed = np.empty((n, row_bytes(k)), np.uint8)
    for begin, end in pieces(n, k):
        packed[begin:end] = rows(begin, end)
    return packed


def pieces(n: int, k: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows to transcode at a time: multiples of 128, so that no block crosses from one piece to the next."""
    rows = max(PIECE // k // GROUP, 1) * GROUP
    return ((begin, min(begin + rows, n)) for begin in range(0, n, rows))


def i2s_scale(data: Bytes) -> float:
    """The scale of an I2_S tensor.

    Raises:
        ValueError: It is not finite.
    """
    return _finite(float(data[-I2S_TAIL:][:4].copy().view("<f4")[0]))


def _finite(scale: float) -> float:
    if not np.isfinite(scale):
        raise ValueError(f"its scale is {scale}")
    return scale


def i2s_codes(data: Bytes, k: int, begin: int, end: int, layout: I2SLayout) -> Bytes:
    """Codes ``uint8[end - begin, k]`` of rows of an I2_S tensor; ``begin`` must be a multiple of 128."""
    piece = data[begin * k // 4 : end * k // 4]
    if layout == "columns":
        return _unpack(piece.reshape(-1, k), k).reshape(-1, k)
    return _unpack(piece.reshape(1, -1), 32 if layout == "official" else 16).reshape(-1, k)


def _packed_rows(dtype: GGMLType, blocks: Bytes, k: int, begin: int, end: int) -> Bytes:
    piece = blocks[begin:end].reshape(-1, BLOCKS[dtype][1])
    packed = packed_codes(dtype, piece) if k % GROUP == 0 else None
    return pack_codes(_block_rows(dtype, blocks, k, begin, end)) if packed is None else packed.reshape(end - begin, -1)


def _block_rows(dtype: GGMLType, blocks: Bytes, k: int, begin: int, end: int) -> Bytes:
    codes, scales = ternary_codes(dtype, blocks[begin:end].reshape(-1, BLOCKS[dtype][1]))
    codes[scales == 0] = 1
    if dtype in TWO_BITS and (codes == 3).any():
        raise ValueError("its weights are not ternary: one has the code 3, which means 2")
    return codes.reshape(-1, k)


def holds_threes(dtype: GGMLType, data: Bytes) -> bool:
    """Whether a tensor of one of :data:`BLOCK_TYPES` holds the code 3, which is not ternary."""
    if dtype not in TWO_BITS:
        return False
    blocks = data.reshape(-1, BLOCKS[dtype][1])
    packed = code_bytes(dtype, blocks)
    pieces = (packed[at : at + PIECE // 64] for at in range(0, len(packed), PIECE // 64))
    return any(has_threes(piece) for piece in pieces)


def _block_scale(scales: npt.NDArray[np.float16]) -> float:
    """The scale shared by all blocks, ignoring blocks of zeros."""
    scales = np.unique(scales)
    scales = scales[scales != 0]
    if scales.size > 1:
        raise ValueError(
            f"its blocks have {scales.size} different scales, {scales.min()} to {scales.max()}; one is needed"
        )
    return _finite(float(scales[0])) if scales.size else 0.0


def _float_scale(dtype: GGMLType, rows: Bytes, master: bool) -> tuple[float, bool]:
    """The scale of a float tensor, and whether its weights must still be rounded to ternary."""
    total, ternary, magnitude = 0.0, True, 0.0
    for begin, end in pieces(len(rows), rows.shape[1] // BLOCKS[dtype][1]):
        values = np.abs(DECODERS[dtype](rows[begin:end]))
        with np.errstate(invalid="ignore"):  # a sum that is not finite is refused below
            total += float(values.sum(dtype=np.float64))
        if ternary:
            magnitude = magnitude or float(values.max())
            ternary = bool(((values == 0) | (values == magnitude)).all())
    if ternary:
        return _finite(magnitude), False
    if not master:
        raise ValueError("its weights are not ternary: they have more than one magnitude")
    return _finite(max(total / (rows.size // BLOCKS[dtype][1]), 1e-5)), True


def _float_rows(dtype: GGMLType, rows: Bytes, scale: float, rounded: bool) -> Bytes:
    values = DECODERS[dtype](rows)
    if rounded:
        values /= np.float32(scale)
        np.clip(np.rint(values, out=values), -1, 1, out=values)
    codes = np.sign(values).astype(np.int8)
    codes += 1
    return codes.view(np.uint8)
