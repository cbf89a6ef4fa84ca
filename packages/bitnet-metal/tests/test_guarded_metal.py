"""A Metal kernel changed so that it reads past the end of a buffer: the shim, which looks up each access, names it."""

from __future__ import annotations

import numpy as np
import pytest
from metal_shim import Library, ShimError, library
from metal_steps import OWN, Steps, poisoned, source

pytestmark = pytest.mark.nightly(unless_changed=OWN)
BOUNDS = 3
"""The shim's code for an access outside of a buffer."""
CLAMPED = "min(first_row + e, rows - 1)"
GROUP = 64


def product(kernels: Library) -> None:
    """Launch the product of two rows and a matrix of five, two of which a simdgroup takes at a time."""
    rng = np.random.default_rng()
    step, (rows, n, cols) = Steps(rng, [(1, 1), (1, 1)], rows=[0, 1]), (2, 5, 128)
    x, weight, out = rng.random((rows, cols), np.float32), rng.random((n, cols), np.float32), poisoned((rows, n))
    arguments = [step.words, x, weight, out, np.int32(cols), np.int32(n)]
    kernels.launch("dense_matmul", arguments, (2, rows, 1), GROUP)
    assert abs(out - x.astype(np.float64) @ weight.T.astype(np.float64)).max() < 1e-3


def test_a_row_past_the_last_is_named() -> None:
    text, defines = source("dense_matmul"), {"WG": GROUP, "WEIGHT_F16": 0, "EACH": 2, "TOKENS": 1}
    product(library(text, defines))
    assert CLAMPED in text
    with pytest.raises(ShimError, match=r"reads 16 bytes at 2560 of buffer\(2\), which has 2560") as failed:
        product(library(text.replace(CLAMPED, "first_row + e"), defines))
    assert failed.value.code == BOUNDS
