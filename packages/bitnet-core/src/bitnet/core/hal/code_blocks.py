"""Ternary blocks of files, as a device may read them in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class CodeBlocks(NamedTuple):
    """A ternary matrix as its file has it: rows of blocks, each of which has an f16 scale and codes as digits.

    The digit of column ``c`` of a block is ``(block[place[c]] * factor[c] mod 256) * base // 256``. It is the weight
    plus 1, or, in base 2, 0 for a weight of -1 and 1 for one of +1.

    Attributes:
        data: ``uint8[N, row bytes]``, mapped if possible.
        scale_at: Place of the scale in a block, little-endian.
        base: 2, 3 or 4.
        place, factor: ``uint8[columns of a block]``.
    """

    data: npt.NDArray[np.uint8]
    scale_at: int
    base: int
    place: npt.NDArray[np.uint8]
    factor: npt.NDArray[np.uint8]
