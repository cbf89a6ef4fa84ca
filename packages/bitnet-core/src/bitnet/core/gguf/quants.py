"""Decodes the block formats of ggml into float32.

Each decoder takes whole blocks, ``uint8[blocks, bytes]``, and returns ``float32[blocks, elements]``. Layouts:
``ggml-quants.c`` and ``ggml-common.h`` of llama.cpp; every decoder is tested against the ``gguf`` package's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf.blocks import FORMATS, ternary_codes, ternary_halves
from bitnet.core.gguf.types import BLOCKS, GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CHUNK = 1 << 20
"""Elements decoded at a time, to keep temporaries small compared to the tensor."""


def decode(
    dtype: GGMLType, data: Bytes, out: npt.NDArray[np.float32] | npt.NDArray[np.float16], factor: float = 1.0
) -> None:
    """Decode a tensor's bytes, times ``factor``, into ``out``, a C-contiguous array of its shape, in chunks.

    Raises:
        ValueError: A value is not finite, or too large for ``out``'s type.
    """
    elements, size = BLOCKS[dtype]
    decoder = DECODERS[dtype]
    flat = out.reshape(-1)
    limit = np.finfo(out.dtype).max
    step = CHUNK // elements
    blocks = data.reshape(-1, size)
    halves = out.dtype == np.float16 and factor == 1 and dtype in FORMATS  # scales with a sign: no arithmetic in f32
    for begin in range(0, len(blocks), step):
        bits = ternary_halves(dtype, blocks[begin : begin + step]) if halves else None
        if bits is not None:
            flat.view(np.uint16)[begin * elements : begin * elements + bits.size] = bits.reshape(-1)
            continue
        with np.errstate(invalid="ignore", over="ignore"):  # refused below
            chunk = decoder(blocks[begin : begin + step]).reshape(-1)
        if factor != 1:
            chunk = chunk * np.float32(factor)
        if not np.abs(chunk).max() <= limit:
            raise ValueError(f"a value is not finite, or too large for {out.dtype}")
        flat[begin * elements : begin * elements + chunk.size] = chunk


def _f16(blocks: Bytes, at: int) -> Floats:
    """The f16 number at byte ``at`` of every block."""
    numbers: Floats = blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)[:, 0]
    return numbers


def _nibbles(data: Bytes) -> Bytes:
    """Low nibbles, then high ones: ``[..., n]`` to ``[..., 2, n]``."""
    return np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-2)


def _scaled(weights: npt.NDArray[Any], scales: Floats) -> Floats:
    """Integers times the scale of their group, which is the last axis."""
    scaled: Floats = weights * scales[..., None]
    return scaled


def _float(dtype: str) -> Callable[[Bytes], Floats]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    bits = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return _scaled(blocks[:, 2:].view(np.int8), _f16(blocks, 0))


def _q4_0(blocks: Bytes) -> Floats:
    weights = _nibbles(blocks[:, 2:]).reshape(-1, 32).view(np.int8) - np.int8(8)
    return _scaled(weights, _f16(blocks, 0))


def _q4_k(blocks: Bytes) -> Floats:
    # Eight groups of 32 share a block; scale and minimum of each are 6-bit numbers, packed into 12 bytes.
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([low & np.uint8(63), high & np.uint8(15) | low >> np.uint8(6) << np.uint8(4)], axis=1)
    minimum = np.concatenate(
        [middle & np.uint8(63), high >> np.uint8(4) | middle >> np.uint8(6) << np.uint8(4)], axis=1
    )
    weights = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scales = _f16(blocks, 0)[:, None] * scale
    minimums = _f16(blocks, 2)[:, None] * minimum
    out = _scaled(weights, scales)
    out -= minimums[:, :, None]
    return out.reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128: 64 bytes of low 4 bits and 32 bytes of high 2 bits, eight groups of 16 with a scale each.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    weights = (low | (high & np.uint8(3)) << np.uint8(4)).view(np.int8) - np.int8(32)
    scales = _f16(blocks, 208)[:, None] * blocks[:, 192:208].view(np.int8)
    return _scaled(weights.reshape(-1, 16, 16), scales).reshape(-1, 256)


def _ternary(dtype: GGMLType) -> Callable[[Bytes], Floats]:
    def decoder(blocks: Bytes) -> Floats:
        codes, scales = ternary_codes(dtype, blocks)
        return _scaled(codes.view(np.int8) - np.int8(1), scales.astype(np.float32))

    return decoder


DECODERS: Mapping[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.F32: _float("<f4"),
    GGMLType.F16: _float("<f2"),
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q6_K: _q6_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q4_0: _q4_0,
    **{dtype: _ternary(dtype) for dtype in FORMATS},
}
"""Every type that can be decoded block by block; I2_S is in :mod:`bitnet.core.gguf.ternary`."""
