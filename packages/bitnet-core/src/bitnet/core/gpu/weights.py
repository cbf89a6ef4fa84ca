"""Uploads weights to a device: ternary matrices stacked into one, dense ones unchanged.

``alloc`` keeps track of its buffers, so that nothing leaks if a load or an upload fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError
from bitnet.core.gpu.drivers.interface import Buffer
from bitnet.core.hal import DenseWeight, TernaryWeight, Weight
from bitnet.core.hal.check import loaded_dense, loaded_ternary

BLOCK_WEIGHTS = 128
BLOCK_BYTES = 32
Alloc: TypeAlias = Callable[[int], Buffer]
Upload: TypeAlias = Callable[..., None]
"""As those of :class:`~bitnet.core.gpu.Driver`."""
Adopt: TypeAlias = Callable[[npt.NDArray[Any]], "Buffer | None"]
"""As in :class:`~bitnet.core.gpu.drivers.interface.Adopter`; always returns None for other drivers."""


@dataclass(frozen=True, slots=True)
class TernaryBuffer:
    """Ternary matrices on the device, stacked along N.

    Attributes:
        codes: ``uint8[rows, row_bytes]`` in the packing of :class:`~bitnet.core.hal.TernaryData`. At each of its four
            bit pairs, a 4-byte word holds four neighbouring codes, as a 4-way int8 dot product needs them.
        scales: ``f32[rows]``, the value of +1 in each row; ``f16[rows, cols / group]`` if there are groups, and a zero
            where these are odd in number, so that kernels may read the last one in a word of 4 bytes.
        rows: Total N of all matrices.
        cols: K, unpadded.
        row_bytes: ``ceil(K / 128) * 32``.
        group: Columns that share a scale; None: one scale per matrix.
    """

    codes: Buffer
    scales: Buffer
    rows: int
    cols: int
    row_bytes: int
    group: int | None = None


@dataclass(frozen=True, slots=True)
class DenseBuffer:
    """A dense weight on the device, C-contiguous in its own ``dtype`` (``f16`` or ``f32``)."""

    data: Buffer
    shape: tuple[int, ...]
    dtype: str


def put_ternary(
    alloc: Alloc, upload: Upload, adopt: Adopt, weights: Mapping[str, Weight], names: Sequence[str]
) -> TernaryBuffer:
    """Upload the named ternary matrices, which have the same K, one by one, and release their host pages.

    The codes of a single matrix are used in place if the device can read them there.
    """
    parts = [weight for name in names if isinstance(weight := weights[name], TernaryWeight)]
    if len(parts) != len(names) or len({part.shape[1] for part in parts}) != 1:
        raise InvalidInputError("a ternary product needs ternary weights with the same number of columns.")
    cols, group = parts[0].shape[1], parts[0].group
    row_bytes = -(-cols // BLOCK_WEIGHTS) * BLOCK_BYTES
    rows = sum(part.shape[0] for part in parts)
    codes: Buffer | None = None
    scales = np.empty(rows, np.float32) if group is None else np.empty((rows, cols // group), np.float16)
    padded = np.zeros(-(-scales.nbytes // 4) * 4, np.uint8)
    at = 0
    for name, part in zip(names, parts, strict=True):
        data = loaded_ternary(name, part)
        array = np.ascontiguousarray(data.codes)
        adopted = adopt(array) if len(parts) == 1 else None
        if codes is None:
            codes = alloc(rows * row_bytes) if adopted is None else adopted
        scales[at : at + part.shape[0]] = data.scale
        if adopted is None:
            upload(codes, array, at * row_bytes)
            part.release()
        at += part.shape[0]
    assert codes is not None
    padded[: scales.nbytes] = scales.reshape(-1).view(np.uint8)
    scale_buffer = alloc(padded.nbytes)
    upload(scale_buffer, padded)
    return TernaryBuffer(codes, scale_buffer, rows, cols, row_bytes, group)


def put_dense(alloc: Alloc, upload: Upload, adopt: Adopt, weights: Mapping[str, Weight], name: str) -> DenseBuffer:
    """Upload a dense weight and release its host pages, unless the device can read it in place."""
    weight = weights[name]
    if not isinstance(weight, DenseWeight):
        raise InvalidInputError("the program needs a dense weight here but names a ternary one.")
    array = loaded_dense(name, weight)
    buffer = adopt(array)
    if buffer is None:
        buffer = alloc(array.nbytes)
        upload(buffer, array)
        weight.release()
    return DenseBuffer(buffer, weight.shape, weight.dtype)
