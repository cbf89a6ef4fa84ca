"""Ternary weights as this backend's kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu import Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.hal import ExpertMatmul

THREADS = 256
"""Threads of a block of sign_codes."""


@dataclass(frozen=True, slots=True)
class Matrix(TernaryBuffer):
    """Ternary matrices as kernels read them.

    Attributes:
        row_scales: Whether ``scales`` are ``f16[rows]``: groups that are whole rows. ``group`` is then None.
    """

    row_scales: bool = False

    @property
    def defines(self) -> dict[str, int]:
        """Preprocessor constants of kernels for matrices without groups."""
        return {"ROW_SCALES": 1} if self.row_scales else {}


def ternary(ctx: Context, names: Sequence[str]) -> Matrix:
    """The named matrices stacked along N. If they have groups of less than a row, their codes are two's complement of
    -1, 0 and 1."""
    w = _matrix(ctx, names)
    if w.group is not None:
        _sign(ctx, names, w)
    return w


def experts(ctx: Context, op: ExpertMatmul) -> list[Matrix]:
    """The matrices of a product with experts, as :meth:`~bitnet.core.gpu.Context.experts` stacks them. Their codes are
    two's complement of -1, 0 and 1."""
    stacked = [op.weights] if len(ctx.experts(op)) == 1 else [(name,) for name in op.weights]
    matrices = [_matrix(ctx, names) for names in stacked]
    for names, w in zip(stacked, matrices, strict=True):
        _sign(ctx, names, w)
    return matrices


def _matrix(ctx: Context, names: Sequence[str]) -> Matrix:
    w = ctx.ternary(names)
    whole = w.group == w.cols
    return Matrix(w.codes, w.scales, w.rows, w.cols, w.row_bytes, None if whole else w.group, whole)


def _sign(ctx: Context, names: Sequence[str], w: TernaryBuffer) -> None:

    def sign() -> list[Launch]:
        count = w.rows * w.row_bytes // 16
        spec = KernelSpec("sign_codes", "sign_codes", ())
        return [Launch(spec, (ceil_div(count, THREADS), 1, 1), (THREADS, 1, 1), (w.codes, np.int32(count)))]

    ctx.once(f"sign of {' '.join(names)}", sign)
