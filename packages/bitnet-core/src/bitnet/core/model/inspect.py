"""Inspects a GGUF file: the contents of its ternary tensors, and whether their layout is plausible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf import GGMLType, GGUFFile, TensorInfo
from bitnet.core.gguf.ternary import (
    BLOCK_TYPES,
    LOOKUP_TYPES,
    I2SLayout,
    check_ternary,
    i2s_codes,
    i2s_scale,
    load_ternary,
)
from bitnet.core.gguf.types import BLOCKS, I2S_TAIL

ROWS = 1024
"""Maximum rows of a tensor used to compare columns."""
CODES_OF_BYTES = (np.arange(256)[:, None, None] >> np.array([0, 2, 4, 6])[:, None] & 3 == np.arange(4)).sum(axis=1)
"""How often each code is in each byte, ``[256, 4]``."""
CHUNK = 1 << 20
MAX_ZERO, MIN_ZERO, MAX_SKEWED = 0.9, 0.1, 0.1
"""Bounds for trained weights: the share of zeros, and the difference of +1 and -1 as a share of the rest."""
CLEARER = 1.5
"""Factor by which columns must differ more under another layout to raise a warning."""
SURE = 6.0
"""Minimum significant correlation of columns with a norm's weights, in standard deviations for unstructured weights."""
NORMS = {
    "attn_q": "attn_norm",
    "attn_k": "attn_norm",
    "attn_v": "attn_norm",
    "attn_output": "attn_sub_norm",
    "ffn_gate": "ffn_norm",
    "ffn_up": "ffn_norm",
    "ffn_down": "ffn_sub_norm",
}
"""The norm whose output a matrix multiplies."""


@dataclass(frozen=True, slots=True)
class CodeStatistics:
    """Shares of each weight in a ternary tensor; ``unused`` is the share of the unused code 3.

    ``scale`` is the value of a weight of +1. If groups have different scales, it is the median of their magnitudes, and
    ``group`` is the number of columns per group.
    """

    minus: float
    zero: float
    plus: float
    unused: float
    scale: float
    group: int | None = None


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A tensor; for a ternary one also statistics of its weights and warnings about them."""

    info: TensorInfo
    statistics: CodeStatistics | None = None
    warnings: tuple[str, ...] = ()


def inspect_tensors(file: GGUFFile, layout: I2SLayout = "official") -> Iterator[TensorReport]:
    """Report on every tensor, in file order; all ternary weights are read.

    Args:
        layout: The layout assumed for I2_S tensors. Files do not record it; a warning says if the weights suggest
            another.
    """
    for info in file.tensors.values():
        if info.type not in (GGMLType.I2_S, *BLOCK_TYPES, *LOOKUP_TYPES) or len(info.shape) not in (2, 3):
            yield TensorReport(info)
            continue
        try:
            yield _report(file, info, layout)
        except ValueError as error:
            yield TensorReport(info, None, (f"{error}.",))
        file.release(info)


def _report(file: GGUFFile, info: TensorInfo, layout: I2SLayout) -> TensorReport:
    shape = (prod(info.shape[:-1]), info.shape[-1])  # matrices of several experts are stacked
    check_ternary(info.type, shape, layout)
    data = file.data(info)
    if info.type is GGMLType.I2_S:
        # Every layout has four codes in a byte, so the bytes of the file are counted, without any padding.
        codes, scale, several = data[:-I2S_TAIL], i2s_scale(data), False
        padding = 0
    else:
        codes, scales = load_ternary(info.type, shape, data, layout, master=False, grouped=True)
        used = np.sort(scales[scales != 0])
        several, scale = bool(used.size and used[0] != used[-1]), float(np.median(abs(used))) if used.size else 0.0
        padding = shape[0] * (codes.shape[1] * 4 - shape[1])
    scale *= _scale_apart(file, info)
    counts = _count(codes) - np.array([0, padding, 0, 0])
    minus, zero, plus, unused = (float(share) for share in counts / counts.sum())
    statistics = CodeStatistics(minus, zero, plus, unused, scale, BLOCKS[info.type][0] if several else None)
    warnings = [*_odd(statistics, binary=info.type is GGMLType.Q1_0)]
    if info.type is GGMLType.I2_S:
        zeros = _zeros(data, shape, layout)
        warnings += _layout_doubts(data, shape, layout, zeros)
        warnings += _order_doubts(file, info, layout, zeros)
    return TensorReport(info, statistics, tuple(warnings))


def _scale_apart(file: GGUFFile, info: TensorInfo) -> float:
    """The scale of a tensor that is stored in a separate tensor; 1 if there is none."""
    base = info.name.removesuffix(".weight")
    for name in (f"{base}.scale", f"{base}.weight_scale"):
        apart = file.tensors.get(name)
        if apart is not None and apart.type is GGMLType.F32 and apart.nbytes == 4:
            return float(file.data(apart).view("<f4")[0])
    return 1.0


def _count(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Count the codes 0 to 3 in packed bytes."""
    flat = packed.reshape(-1)
    histogram = np.zeros(256, np.int64)
    for begin in range(0, flat.size, CHUNK):  # bincount makes an int64 of every byte
        histogram += np.bincount(flat[begin : begin + CHUNK], minlength=256)
    counts: npt.NDArray[np.int64] = histogram @ CODES_OF_BYTES
    return counts


def _odd(statistics: CodeStatistics, *, binary: bool) -> Iterator[str]:
    s = statistics
    if s.unused:
        yield f"{s.unused:.2%} of its codes are 3, which is unused: it is corrupt, or of another encoding."
    if not binary and not MIN_ZERO <= s.zero <= MAX_ZERO:
        yield f"{s.zero:.0%} of its weights are zero; trained ones have between {MIN_ZERO:.0%} and {MAX_ZERO:.0%}."
    signed = s.plus + s.minus
    if signed and abs(s.plus - s.minus) > MAX_SKEWED * signed:
        yield f"{s.plus:.0%} of its weights are +1 and {s.minus:.0%} are -1; trained ones are nearly balanced."


def _layout_doubts(
    data: npt.NDArray[np.uint8], shape: tuple[int, int], layout: I2SLayout, zeros: npt.NDArray[np.float64]
) -> Iterator[str]:
    """Warn if columns differ more from each other when read with the other kind of layout.

    Trained weights have more zeros in some columns than in others. If the layout is wrong, each apparent column mixes
    parts of many columns, and all look alike. ``official`` and ``arm`` differ only in the order of columns within a
    block; :func:`_order_doubts` tells them apart. ``zeros`` are the columns' shares of zeros when read with ``layout``.
    """
    other: I2SLayout = "official" if layout == "columns" else "columns"
    try:
        check_ternary(GGMLType.I2_S, shape, other)
    except ValueError:
        return
    taken = _column_spread(zeros, len(_rows(shape[0], layout)))
    rival = _column_spread(_zeros(data, shape, other), len(_rows(shape[0], other)))
    if rival > CLEARER * taken:
        yield f"its columns differ {rival / taken:.1f} times as much when read with the I2_S layout '{other}'."


def _order_doubts(file: GGUFFile, info: TensorInfo, layout: I2SLayout, zeros: npt.NDArray[np.float64]) -> Iterator[str]:
    """Warn if columns seem to be in the order of the other layout, which differs only in that order.

    In trained models, the number of zeros in a column correlates with the weight of the preceding norm.
    """
    block, _, name = info.name.removesuffix(".weight").rpartition(".")
    norm = file.tensors.get(f"{block}.{NORMS.get(name, '')}.weight")
    shape = (info.shape[0], info.shape[1])
    if layout == "columns" or norm is None or norm.shape != shape[1:] or norm.type is not GGMLType.F32:
        return
    other: I2SLayout = "arm" if layout == "official" else "official"
    with np.errstate(invalid="ignore"):  # a NaN that signals
        gains = np.abs(file.data(norm).view("<f4").astype(np.float64))
    taken, rival = _correlations(np.stack([zeros, _zeros(file.data(info), shape, other)]), gains)
    if rival > max(SURE, CLEARER * taken):
        yield (
            f"the zeros of its columns correlate {f'{rival / taken:.1f} times as much ' if taken else ''}with "
            f"{norm.name!r} when read with the I2_S layout '{other}'."
        )


def _correlations(rows: npt.NDArray[np.float64], gains: npt.NDArray[np.float64]) -> list[float]:
    """The magnitude of each row's correlation, in standard deviations of the correlation of independent numbers."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # np.corrcoef and mean() are slower for small tensors.
        x = rows - np.add.reduce(rows, axis=1, keepdims=True) / len(gains)
        y = gains - np.add.reduce(gains) / len(gains)
        found = abs(x @ y) / np.sqrt(np.einsum("ij,ij->i", x, x) * (y @ y)) * len(gains) ** 0.5
    return [value if isfinite(value) else 0.0 for value in found.tolist()]


def _column_spread(shares: npt.NDArray[np.float64], rows: int) -> float:
    """Variance of the columns' shares of zeros, relative to the variance for independent weights in so many rows."""
    p = float(np.add.reduce(shares)) / len(shares)
    return float(shares.var()) * rows / (p * (1 - p)) if 0 < p < 1 else 1.0


def _rows(n: int, layout: I2SLayout) -> range:
    """The rows of a tensor that are sampled."""
    begin = max(n - ROWS, 0) // 2 // 128 * 128
    end = min(begin + ROWS, n)
    return range(begin, end if layout != "columns" else end // 4 * 4)


def _zeros(data: npt.NDArray[np.uint8], shape: tuple[int, int], layout: I2SLayout) -> npt.NDArray[np.float64]:
    """The share of zeros in each column."""
    rows = _rows(shape[0], layout)
    zero = i2s_codes(data, shape[1], rows.start, rows.stop, layout) == 1
    shares: npt.NDArray[np.float64] = np.add.reduce(zero, axis=0, dtype=np.int64) / len(zero)
    return shares
