"""Re-encodes ternary matrices for a GGUF file, exactly or with an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource, i2s_bytes, unpack_ternary
from bitnet.core.gguf.blocks import encode_blocks
from bitnet.core.gguf.ternary import GROUP, pieces
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.hal import TernaryData, TernaryWeight

Codes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float16]


class TernarySource(NamedTuple):
    """A ternary matrix of a model to convert.

    Attributes:
        weight: The matrix; its ``load`` raises a :class:`ModelFileError` that names it.
        error: Makes an error that names the matrix.
        stacked: The tensor's shape where experts' matrices are stacked along the rows, ``(E, N, K)``; None: it is one.
    """

    weight: TernaryWeight
    error: Callable[[str], ModelFileError]
    stacked: tuple[int, ...] | None = None


def encoded(name: str, source: TernarySource, dtype: GGMLType) -> dict[str, TensorSource]:
    """The tensors that hold a matrix in a GGUF file.

    If the matrix has one scale and ``dtype`` has a scale per block, the scale is divided as :func:`divided` says: the
    blocks hold it but for a factor close to 1, which a tensor ``NAME.scale`` holds as f32. Nothing is rounded, and
    programs that do not read that tensor are off by less than a thousandth.

    Args:
        name: Name of the matrix, without ``.weight``.

    Raises:
        ModelFileError: ``dtype`` cannot hold a matrix of this shape. Other mismatches are found when the data are read.
    """
    (n, k), group = source.weight.shape, source.weight.group
    shape = source.stacked or (n, k)
    if dtype is GGMLType.I2_S:
        if n * k % GROUP:
            raise source.error(f"has the shape ({n}, {k}); I2_S needs a multiple of {GROUP} weights.")
        return {f"{name}.weight": TensorSource(shape, dtype, partial(_i2s, source))}
    if k % BLOCKS[dtype][0]:
        raise source.error(f"has rows of {k} weights; {dtype.name} needs a multiple of {BLOCKS[dtype][0]}.")
    if group is not None:
        return {f"{name}.weight": TensorSource(shape, dtype, partial(_blocks, source, dtype, None))}
    rest = np.empty(1, np.float32)  # set while the blocks, which come first in the file, are written
    return {
        f"{name}.weight": TensorSource(shape, dtype, partial(_blocks, source, dtype, rest)),
        f"{name}.scale": TensorSource((1,), GGMLType.F32, lambda: (rest,)),
    }


def divided(scale: np.float32) -> tuple[np.float16, np.float32]:
    """A float16 and a factor whose product, rounded to float32, is ``scale`` exactly.

    The float16 is the scale rounded away from zero, so the factor is from 0.999 to 1. A scale that float16 cannot hold
    to its full precision (zero, above 65,504 or below 2⁻¹⁴) becomes the factor, beside 1.
    """
    with np.errstate(over="ignore"):
        half = np.float16(scale)
        if abs(half) < abs(scale):
            half = np.nextafter(half, np.copysign(np.float16(np.inf), half))
    if not np.finfo(np.float16).tiny <= abs(half) < np.inf:
        return np.float16(1), scale
    return half, scale / np.float32(half)


def _i2s(source: TernarySource) -> Iterator[Codes]:
    data = source.weight.load()
    weights = unpack_ternary(data.codes, source.weight.shape[1])
    _check_codes(source, weights.view(np.uint8) + np.uint8(1))
    scale = data.scale.reshape(-1)
    if source.weight.group is not None:
        used = (weights.reshape(scale.size, -1) != 0).any(axis=1)
        scale = np.unique(scale[used]) if used.any() else scale[:1]
        if scale.size > 1:
            several = f"{scale.size} different scales, {scale.min()} to {scale.max()}"
            raise source.error(f"has {several}; I2_S holds one for the whole matrix. Use q2_0 (--type q2_0).")
    yield i2s_bytes(weights, float(scale[0]))
    source.weight.release()


def _blocks(source: TernarySource, dtype: GGMLType, rest: npt.NDArray[np.float32] | None) -> Iterator[Codes]:
    """The blocks, a few rows at a time; ``rest`` receives the factor beside the blocks of a matrix with one scale."""
    (n, k), size = source.weight.shape, BLOCKS[dtype][0]
    data = source.weight.load()
    common = np.float16(1)
    if rest is not None:
        common, rest[:] = divided(np.float32(data.scale[0]))
    for begin, end in pieces(n, k):
        codes = unpack_ternary(data.codes[begin:end], k).view(np.uint8) + np.uint8(1)
        _check_codes(source, codes)
        scales: Scales = np.full((end - begin, k // size), common)
        if rest is None:
            scales = _regrouped(source, dtype, codes, data, begin)
        try:
            yield encode_blocks(dtype, codes.reshape(-1, size), scales.reshape(-1))
        except ValueError as error:
            raise source.error(f"{error}.") from None
    source.weight.release()


def _check_codes(source: TernarySource, codes: Codes) -> None:
    if codes.max() > 2:
        raise source.error("holds the unused code 3. Another I2_S layout may fit.")


def _regrouped(source: TernarySource, dtype: GGMLType, codes: Codes, data: TernaryData, begin: int) -> Scales:
    """The scale of each block of some rows: its group's, or the common scale of its groups."""
    (rows, k), size = codes.shape, BLOCKS[dtype][0]
    scales: Scales = data.scale[begin : begin + rows]  # type: ignore[assignment]
    group = k // scales.shape[1]
    if group % size == 0:
        return scales.repeat(group // size, axis=1)
    each = scales.reshape(rows, k // size, size // group)
    used = (codes.reshape(rows, k // size, size // group, group) != 1).any(axis=3)
    first = np.take_along_axis(each, used.argmax(axis=2)[..., None], axis=2)
    wrong = np.argwhere((used & (each != first)).any(axis=2))
    if wrong.size:
        row, block = map(int, wrong[0])
        raise source.error(
            f"has scales from {each[row, block].min()} to {each[row, block].max()} in columns {block * size} to "
            f"{block * size + size - 1} of row {begin + row}; {dtype.name} holds one scale for these."
        )
    return first[..., 0]
