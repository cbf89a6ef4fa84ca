"""Ternary weights as this backend's kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitnet.core.gpu import Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import ceil_div

THREADS = 256
"""Threads of a block of sign_codes."""


def ternary(ctx: Context, names: Sequence[str]) -> TernaryBuffer:
    """The named matrices stacked along N. If they have groups, their codes are two's complement of -1, 0 and 1."""
    w = ctx.ternary(names)

    def sign() -> list[Launch]:
        count = w.rows * w.row_bytes // 16
        spec = KernelSpec("sign_codes", "sign_codes", ())
        return [Launch(spec, (ceil_div(count, THREADS), 1, 1), (THREADS, 1, 1), (w.codes, np.int32(count)))]

    if w.group is not None:
        ctx.once(f"sign of {' '.join(names)}", sign)
    return w
