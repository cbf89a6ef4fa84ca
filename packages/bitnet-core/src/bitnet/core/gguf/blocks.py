"""Ternary block formats: each block holds codes (weight + 1) and an f16 scale, the value of a weight of +1.

Layouts and their sources are in ``docs/formats.md``: TQ1_0, TQ2_0, Q2_0 and Q1_0 are llama.cpp's (``ggml-common.h``,
``ggml-quants.c``), Q2_0 in groups of 128, PQ2_0 and PTQ1_0 are those of PrismML's fork, STQ1_0 is Tencent's
(pull request 22836 of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf.types import BLOCKS, GGMLType

Bytes: TypeAlias = npt.NDArray[np.uint8]
Digits: TypeAlias = tuple[tuple[int, int], ...]
"""Layout of base-3 digits: stages of (number of bytes, digits per byte)."""

TQ1_DIGITS: Digits = ((32, 5), (16, 5), (4, 4))
SHIFTS = np.array([0, 2, 4, 6], np.uint8)
PTQ1_DIGITS: Digits = ((16, 5), (8, 5), (2, 4))


class BlockFormat(NamedTuple):
    """How a type stores its codes in a block.

    Attributes:
        scale_at: Byte offset of the f16 scale; the other bytes hold the codes.
        unpack: Unpacks these bytes, ``uint8[blocks, bytes]``, into codes ``uint8[blocks, elements]``.
        pack: The reverse; raises ValueError if the type cannot hold the codes.
        repack: Turns these bytes into the packing that devices accept, 128 codes in each row of ``uint8[n, 32]``.
            None: the codes must be unpacked first.
    """

    scale_at: int
    unpack: Callable[[Bytes], Bytes]
    pack: Callable[[Bytes], Bytes]
    repack: Callable[[Bytes], Bytes] | None = None


def ternary_codes(dtype: GGMLType, blocks: Bytes) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """Codes ``uint8[blocks, elements]`` and scales ``f16[blocks]`` of whole blocks, ``uint8[blocks, bytes]``."""
    return FORMATS[dtype].unpack(code_bytes(dtype, blocks)), block_scales(dtype, blocks)


def code_bytes(dtype: GGMLType, blocks: Bytes) -> Bytes:
    """The bytes of whole blocks that hold their codes, without the scale's."""
    at = FORMATS[dtype].scale_at
    return blocks[:, 2:] if at == 0 else blocks[:, :at]


@cache
def code_places(dtype: GGMLType) -> tuple[int, Bytes, Bytes] | None:
    """The base of a type's digits, the byte of a block that has each column's, and the factor that moves it to the top,
    as in :class:`~bitnet.core.hal.CodeBlocks`. None: its codes are no digits of single bytes."""
    form, size = FORMATS[dtype], BLOCKS[dtype][1] - 2
    values = np.arange(256, dtype=np.uint8)[:, None]
    codes = form.unpack(values.repeat(size, axis=1))
    for base, powers in ((2, range(8)), (3, range(5)), (4, range(4))):
        factors = np.array([base**power for power in powers], np.uint8)
        digits = (values * factors).astype(np.uint16) * base >> 8
        same = (codes[:, :, None] == (2 * digits if base == 2 else digits)[:, None]).all(axis=0)
        if same.any(axis=1).all():
            one_byte = np.diag(np.full(size, 255, np.uint8))
            place = (form.unpack(one_byte) != codes[0]).argmax(axis=0) + (2 if form.scale_at == 0 else 0)
            return base, place.astype(np.uint8), factors[same.argmax(axis=1)]
    return None


def packed_codes(dtype: GGMLType, blocks: Bytes) -> Bytes | None:
    """The codes of whole blocks as devices accept them, 128 in 32 bytes: ``uint8[n, 32]``.

    None if they must be unpacked: the type needs it, a block's scale is zero, or a code is 3.
    """
    repack = FORMATS[dtype].repack
    if repack is None or not block_scales(dtype, blocks).all():
        return None
    packed = np.ascontiguousarray(code_bytes(dtype, blocks))
    return None if dtype in TWO_BITS and has_threes(packed) else repack(packed)


def ternary_halves(dtype: GGMLType, blocks: Bytes) -> npt.NDArray[np.uint16] | None:
    """The weights of whole blocks, ``[blocks, elements]``, as the bits of f16.

    None if a code is 3 or a scale is not finite.
    """
    codes, scales = ternary_codes(dtype, blocks)
    if (codes == 3).any() or not np.isfinite(scales).all():
        return None
    bits = scales.view("<u2")[:, None]
    halves: npt.NDArray[np.uint16] = np.multiply(codes != 1, bits & np.uint16(0x7FFF), dtype=np.uint16)
    halves |= bits & np.uint16(0x8000) ^ np.left_shift(codes == 0, 15, dtype=np.uint16)
    return halves


def has_threes(packed: Bytes) -> bool:
    """Whether one of the two-bit codes, four to a byte, is 3; the bytes are a multiple of 8."""
    words = np.ascontiguousarray(packed).view("<u8")
    high = words >> np.uint64(1)
    high &= words
    high &= np.uint64(0x5555555555555555)
    return bool(high.any())


def block_scales(dtype: GGMLType, data: Bytes) -> npt.NDArray[np.float16]:
    """The ``f16[blocks]`` scales of a tensor's bytes."""
    at, size = FORMATS[dtype].scale_at, BLOCKS[dtype][1]
    scales: npt.NDArray[np.float16] = data.reshape(-1).view("<f2")[at // 2 :: size // 2].copy()
    return scales


def encode_blocks(dtype: GGMLType, codes: Bytes, scales: npt.NDArray[np.float16]) -> Bytes:
    """Blocks ``uint8[blocks, bytes]`` of codes ``uint8[blocks, elements]`` in {0, 1, 2} and scales ``f16[blocks]``.

    Raises:
        ValueError: The type cannot hold these codes; the message says why.
    """
    if dtype in (GGMLType.STQ1_0, GGMLType.Q1_0):  # they can express a block of zeros only by a scale of 0
        empty = (codes == 1).all(axis=1)
        codes, scales = codes.copy(), np.where(empty, np.float16(0), scales)
        codes[empty] = FORMATS[dtype].unpack(np.zeros((1, BLOCKS[dtype][1] - 2), np.uint8))
    parts = [scales.astype("<f2").reshape(-1, 1).view(np.uint8), FORMATS[dtype].pack(codes)]
    return np.concatenate(parts if FORMATS[dtype].scale_at == 0 else parts[::-1], axis=1)


def _unpack_neighbours(packed: Bytes) -> Bytes:
    """Four neighbouring codes in a byte, the first in its lowest bits."""
    codes = np.empty((*packed.shape, 4), np.uint8)
    for i, shift in enumerate(SHIFTS):  # four long loops; broadcasting would do many loops of length four
        np.right_shift(packed, shift, out=codes[..., i])
    codes &= 3
    return codes.reshape(len(packed), -1)


def _exchange(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64], shift: int, mask: int) -> None:
    """Exchange the bits of ``mask`` in ``b`` with those of ``a`` that are ``shift`` higher."""
    both = a >> np.uint64(shift)
    both ^= b
    both &= np.uint64(mask)
    np.bitwise_xor(b, both, out=b)
    both <<= np.uint64(shift)
    np.bitwise_xor(a, both, out=a)


def _repack_neighbours(packed: Bytes) -> Bytes:
    """Each byte of a quarter has codes of four bytes of the result: their codes are transposed, 4 by 4."""
    packed = packed.reshape(-1, 32)
    first, second, third, fourth = np.ascontiguousarray(packed.reshape(-1, 4, 8).view("<u8")[..., 0].T)
    for low, high in ((fourth, second), (third, first)):
        _exchange(low, high, 4, 0x0F0F0F0F0F0F0F0F)
    for low, high in ((fourth, third), (second, first)):
        _exchange(low, high, 2, 0x3333333333333333)
    out = np.empty((len(packed), 8, 4), np.uint8)
    for i, words in enumerate((fourth, third, second, first)):
        out[..., i] = words.view(np.uint8).reshape(-1, 8)
    return out.reshape(-1, 32)


def _pack_neighbours(codes: Bytes) -> Bytes:
    return _join(codes.reshape(len(codes), -1, 4), 2)


def _unpack_quarters(packed: Bytes) -> Bytes:
    """128 codes in 32 bytes: byte ``m`` holds codes ``m, m+32, m+64, m+96``, the first in its lowest bits."""
    codes: Bytes = packed.reshape(-1, 2, 1, 32) >> SHIFTS.reshape(-1, 1) & np.uint8(3)
    return codes.reshape(len(packed), -1)


def _repack_quarters(packed: Bytes) -> Bytes:
    """The four codes of each byte, the last first."""
    packed = packed.reshape(-1, 32)
    pairs = packed >> np.uint8(4) | packed << np.uint8(4)
    reversed_pairs: Bytes = pairs >> np.uint8(2) & np.uint8(0x33) | (pairs & np.uint8(0x33)) << np.uint8(2)
    return reversed_pairs


def _pack_quarters(codes: Bytes) -> Bytes:
    return _join(codes.reshape(-1, 2, 4, 32), 2).reshape(len(codes), -1)


def _join(codes: Bytes, axis: int) -> Bytes:
    """The four codes along an axis as a byte, the first in its lowest bits."""
    first, *others = np.moveaxis(codes, axis, 0)
    packed: Bytes = first.copy()
    for other, shift in zip(others, SHIFTS[1:], strict=True):
        packed |= other << shift
    return packed


def _unpack_digits(stages: Digits, packed: Bytes) -> Bytes:
    """Base-3 digits: a stage of ``b`` bytes holds code ``n b + m`` as digit ``n`` of byte ``m``.

    Read as a fraction of 256, a byte times 3^n, modulo 256, has digit n as its top digit.
    """
    parts, begin = [], 0
    for size, count in stages:
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count].reshape(1, -1, 1)
        fraction = packed[:, None, begin : begin + size] * powers
        parts.append(((fraction.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(packed), -1))
        begin += size
    return np.concatenate(parts, axis=1)


class _Run(NamedTuple):
    """Codes of a stage's bytes that go to neighbouring bytes of the packing, of which each takes some digits of one.

    Attributes:
        begin, size: The bytes of a block.
        row, byte: Where the first of them goes: row of 32 bytes, and byte of the row.
        packed: For each value of a byte, its digits where the packing has them.
    """

    begin: int
    size: int
    row: int
    byte: int
    packed: Bytes


@cache
def _runs(stages: Digits) -> tuple[int, Sequence[_Run]]:
    """Rows of 32 bytes for each block, and what they are made of."""
    values = np.arange(256, dtype=np.uint8)[:, None]
    tables: dict[tuple[int, int, int, int], Bytes] = {}
    begin = code = 0
    for size, count in stages:
        digits = _unpack_digits(((1, count),), values)
        for n in range(count):
            row, place = divmod(code, 128)
            table = tables.setdefault((begin, size, row, place % 32), np.zeros(256, np.uint8))
            table |= digits[:, n] << SHIFTS[3 - place // 32]
            code += size
        begin += size
    return code // 128, [_Run(*where, table) for where, table in tables.items()]


def _repack_digits(stages: Digits, packed: Bytes) -> Bytes:
    rows, runs = _runs(stages)
    out = np.zeros((len(packed), rows, 32), np.uint8)
    for run in runs:
        out[:, run.row, run.byte : run.byte + run.size] |= run.packed[packed[:, run.begin : run.begin + run.size]]
    return out.reshape(-1, 32)


def _pack_digits(stages: Digits, codes: Bytes) -> Bytes:
    """Digits as a byte: the number they form as a fraction of 3^5, in 256ths, rounded up."""
    parts, begin = [], 0
    for size, count in stages:
        digits = codes[:, begin : begin + size * count].reshape(-1, count, size).astype(np.uint16)
        powers = np.array([81, 27, 9, 3, 1], np.uint16)[:count].reshape(1, -1, 1)
        parts.append((((digits * powers).sum(axis=1, dtype=np.uint32) * 256 + 242) // 243).astype(np.uint8))
        begin += size * count
    return np.concatenate(parts, axis=1)


def _sparse_patterns() -> Bytes:
    """``uint8[32, 4]``: the codes of four weights, exactly one of them zero, for each of the 32 pattern numbers.

    Bits 3-2 say which weight is zero. The first of the other three is +1; bits 0 and 1 negate the second and third. Bit
    4 negates all.
    """
    patterns = np.empty((32, 4), np.uint8)
    for number in range(32):
        signs = [1, 1 - 2 * (number & 1), 1 - (number & 2)]
        signs.insert(number >> 2 & 3, 0)
        patterns[number] = 1 + np.array(signs) * (1 - 2 * (number >> 4))
    return patterns


PATTERNS = _sparse_patterns()
_NUMBERS = np.full(256, 255, np.uint8)
_NUMBERS[_join(PATTERNS, 1)] = np.arange(32)


def _unpack_sparse(packed: Bytes) -> Bytes:
    """64 numbers of :data:`PATTERNS`: 4 bits of each in 32 bytes, low half first, then bit 4 of each in 8 bytes.

    Number ``16 c + m`` encodes the weights ``64 c + m + 16 p``, p = 0 … 3.
    """
    low = np.stack([packed[:, :32] & np.uint8(15), packed[:, :32] >> np.uint8(4)], axis=2).reshape(len(packed), 64)
    numbers = low | np.unpackbits(packed[:, 32:], axis=1, bitorder="little") << np.uint8(4)
    codes: Bytes = PATTERNS[numbers].reshape(-1, 4, 16, 4).swapaxes(2, 3)
    return codes.reshape(len(packed), 256)


def _pack_sparse(codes: Bytes) -> Bytes:
    numbers = _NUMBERS[_join(codes.reshape(-1, 4, 4, 16), 2)].reshape(len(codes), 64)
    if (numbers == 255).any():
        raise ValueError("STQ1_0 needs exactly one zero among the weights m, m+16, m+32 and m+48 of each 64")
    halves = (numbers & np.uint8(15)).reshape(len(codes), 32, 2)
    signs = np.packbits(numbers >> np.uint8(4), axis=1, bitorder="little")
    return np.concatenate([halves[..., 0] | halves[..., 1] << 4, signs], axis=1)


def _unpack_signs(packed: Bytes) -> Bytes:
    """128 weights of 1 or -1, one a bit, the first in a byte's lowest bit."""
    codes: Bytes = np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(2)
    return codes


@cache
def _sign_codes() -> npt.NDArray[np.uint64]:
    """For each value of a byte, the codes of its eight weights, one a byte."""
    return _unpack_signs(np.arange(256, dtype=np.uint8)[:, None]).view("<u8")[:, 0]


def _repack_signs(packed: Bytes) -> Bytes:
    """Each quarter of a block has the same two bits of all 32 bytes."""
    quarters = _sign_codes()[packed].reshape(-1, 4, 4)
    out = np.zeros((len(packed), 4), np.uint64)
    for quarter, shift in enumerate(SHIFTS[::-1]):
        out |= quarters[:, quarter] << np.uint64(shift)
    return out.view(np.uint8)


def _pack_signs(codes: Bytes) -> Bytes:
    if (codes == 1).any():
        raise ValueError("Q1_0 has no zeros: its weights are 1 and -1")
    return np.packbits(codes >> np.uint8(1), axis=1, bitorder="little")


def _digits(scale_at: int, stages: Digits) -> BlockFormat:
    unpack, pack, repack = (partial(method, stages) for method in (_unpack_digits, _pack_digits, _repack_digits))
    return BlockFormat(scale_at, unpack, pack, repack)


_NEIGHBOURS = BlockFormat(0, _unpack_neighbours, _pack_neighbours, _repack_neighbours)
FORMATS: Mapping[GGMLType, BlockFormat] = {
    GGMLType.TQ1_0: _digits(52, TQ1_DIGITS),
    GGMLType.TQ2_0: BlockFormat(64, _unpack_quarters, _pack_quarters, _repack_quarters),
    GGMLType.Q2_0: _NEIGHBOURS,
    GGMLType.Q2_0_G128: _NEIGHBOURS,
    GGMLType.PQ2_0: _NEIGHBOURS,
    GGMLType.PTQ1_0: _digits(26, PTQ1_DIGITS),
    GGMLType.STQ1_0: BlockFormat(40, _unpack_sparse, _pack_sparse),
    GGMLType.Q1_0: BlockFormat(0, _unpack_signs, _pack_signs, _repack_signs),
}
"""Every type with a scale in each block."""
TWO_BITS = frozenset(t for t, form in FORMATS.items() if form.unpack in (_unpack_neighbours, _unpack_quarters))
"""Types with two-bit codes, which can hold the code 3 (a weight of 2)."""
