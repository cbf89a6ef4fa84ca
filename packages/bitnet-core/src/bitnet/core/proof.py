"""Whether a device computes, found out by running a kernel on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bitnet.core.hal import DeviceInfo


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether a device computes: ``error`` says what it did instead; ``time`` in seconds, opening included."""

    passed: bool
    time: float
    error: str = ""


def prove(info: DeviceInfo) -> Proof:
    """Multiply a fresh random ternary matrix on a device, and compare with exact integers."""
    import numpy as np

    from bitnet.core.arrays import TernaryMatrix
    from bitnet.core.registry import computing, open_device

    rng = np.random.default_rng()
    x = rng.integers(-128, 128, (1, 384), np.int8)  # one token: a device compiles other kernels for more
    codes = rng.integers(-1, 2, (48, 384), np.int8)
    exact = x.astype(np.int64) @ codes.T.astype(np.int64)
    begin = time.perf_counter()
    error = ""
    try:
        device = open_device(info)
        try:
            with computing(info), TernaryMatrix(codes, device=device, rows=len(x)) as matrix:
                wrong = np.count_nonzero(matrix(x) != exact)
        finally:
            device.close()
        if wrong:
            error = f"{wrong} of {exact.size} products are wrong"
    except Exception as failure:  # whatever a device does, the others are still to be tried
        error = " ".join(str(failure).split()) or type(failure).__name__
    return Proof(not error, time.perf_counter() - begin, error)
