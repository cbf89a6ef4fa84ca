"""Matrices of floats as sums of ternary ones, for the only products that devices compute for every token of a step.

An element is ``s · (t₀ + 3 t₁ + 9 t₂ + 27 t₃ + 81 t₄)`` with t in {-1, 0, +1} and one s for 32 columns of a row, so it
is rounded by at most 1/242 of the greatest of them: nearly as fine as Q8_0's 1/254. Five ternary products with the
scales s, 3 s, … 81 s add up to its product. They read ten bits for each element.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf.ternary import pack_ternary
from bitnet.core.hal import TernaryData, TernaryWeight

PLANES = 5
"""Ternary matrices of a sum."""
GROUP = 32
"""Columns that share a scale; all of a row, if its length is no multiple."""

F32 = npt.NDArray[np.float32]


def ternary_planes(
    shape: tuple[int, int], rows: Callable[[int, int], F32], release: Callable[[], None]
) -> list[TernaryWeight]:
    """The ternary matrices whose sum is a matrix of floats, that of the smallest scales first.

    Args:
        rows: Loads the rows from a first one to before a last one, ``float32[rows, K]``.
        release: Releases the mapped pages of the matrix.
    """
    group = GROUP if shape[1] % GROUP == 0 else shape[1]

    def plane(digit: int) -> TernaryWeight:
        def load(first: int, last: int) -> TernaryData:
            return _plane(rows(first, last), group, digit)

        return TernaryWeight(shape, lambda: load(0, shape[0]), release, group, load)

    return [plane(digit) for digit in range(PLANES)]


def _plane(matrix: F32, group: int, digit: int) -> TernaryData:
    """One ternary matrix of the sum."""
    n, k = matrix.shape
    groups = matrix.reshape(n, k // group, group)
    scale = np.abs(groups).max(axis=2) / np.float32(3**PLANES // 2)
    left = np.rint(groups / np.where(scale == 0, 1, scale)[:, :, None]).astype(np.int16)
    for _ in range(digit + 1):
        digits = (left + 1) % 3 - 1
        left = (left - digits) // 3
    with np.errstate(over="ignore"):
        halves = (scale * np.float32(3**digit)).astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError(f"a value of {np.abs(matrix).max():g} is too large for scales in float16")
    return TernaryData(pack_ternary(digits.reshape(n, k).astype(np.int8)), halves)
