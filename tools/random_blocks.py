"""Ternary matrices of random codes in any block format of GGUF, made while they are written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.blocks import FORMATS, PTQ1_DIGITS, TQ1_DIGITS, TWO_BITS
from bitnet.core.gguf.types import BLOCKS

CHUNK = 1 << 22
_digits = np.arange(81)
FOUR = (_digits // 27 << 6 | _digits // 9 % 3 << 4 | _digits // 3 % 3 << 2 | _digits % 3).astype(np.uint8)
"""Bytes of four codes of 0, 1 or 2."""
TERNARY = {5: (np.arange(243) * 256 + 242) // 243, 4: (np.arange(0, 243, 3) * 256 + 242) // 243}
"""Bytes of five and of four digits of base 3, as TQ1_0 and PTQ1_0 have them."""
DIGITS = {GGMLType.TQ1_0: TQ1_DIGITS, GGMLType.PTQ1_0: PTQ1_DIGITS}


def random_blocks(
    rng: np.random.Generator,
    n: int,
    k: int,
    dtype: GGMLType,
    *,
    shape: tuple[int, ...] | None = None,
    rows: bool = False,
) -> TensorSource:
    """Codes drawn evenly; scales differ by half to either side, and keep the spread of what goes through.

    Args:
        shape: Of the tensor, if it is not ``(n, k)``.
        rows: Whether the blocks of a row share a scale.
    """
    elements, size = BLOCKS[dtype]
    blocks_of_chunk = CHUNK // elements
    of_rows = ((1.5 / k) ** 0.5 * rng.uniform(0.5, 1.5, n if rows else 0)).astype("<f2")

    def data() -> Iterator[npt.NDArray[np.uint8]]:
        for begin in range(0, n * k // elements, blocks_of_chunk):
            count = min(blocks_of_chunk, n * k // elements - begin)
            scales = ((1.5 / k) ** 0.5 * rng.uniform(0.5, 1.5, count)).astype("<f2")
            if rows:
                scales = of_rows[np.arange(begin, begin + count) // (k // elements)]
            parts = [scales.view(np.uint8).reshape(-1, 2), _codes(rng, count, size - 2, dtype)]
            yield np.concatenate(parts if FORMATS[dtype].scale_at == 0 else parts[::-1], axis=1)

    return TensorSource(shape or (n, k), dtype, data)


def _codes(rng: np.random.Generator, count: int, size: int, dtype: GGMLType) -> npt.NDArray[np.uint8]:
    """The bytes of ``count`` blocks that hold their codes."""
    if dtype is GGMLType.Q1_0:
        return rng.integers(0, 256, (count, size), dtype=np.uint8)
    if dtype in TWO_BITS:
        return FOUR[rng.integers(0, len(FOUR), (count, size), dtype=np.uint8)]
    stages = [
        TERNARY[digits].astype(np.uint8)[rng.integers(0, len(TERNARY[digits]), (count, width), dtype=np.uint8)]
        for width, digits in DIGITS[dtype]
    ]
    return np.concatenate(stages, axis=1)
