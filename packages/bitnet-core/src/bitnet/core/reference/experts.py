"""The operations of mixtures of experts on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import TernaryData
from bitnet.core.reference.ops import F32, F64, I8

I32 = npt.NDArray[np.int32]


def route(y: F64, router: F32, top: int) -> tuple[I32, F32]:
    """The greatest ``top`` logits ``y[M, K] · router[E, K]``, lower experts first among equal ones: their experts and
    the softmax over them, ``[M, top]``."""
    with np.errstate(invalid="ignore"):  # an infinity times 0
        logits = np.einsum("mk,ek->me", y, router.astype(np.float64))  # not matmul: equal rows give equal logits
        greatest = np.where(np.isnan(logits), np.inf, logits)  # so that a share tells of it
        ids = np.argsort(-greatest, axis=1, kind="stable")[:, :top]
        chosen = np.take_along_axis(logits, ids, axis=1)
        powers = np.exp(chosen - chosen[:, :1])
    return ids.astype(np.int32), (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def expert_rows(weight: TernaryData, experts: int, expert: int) -> TernaryData:
    """The rows of one expert of a stacked matrix."""
    rows = slice(expert * (len(weight.codes) // experts), (expert + 1) * (len(weight.codes) // experts))
    return TernaryData(weight.codes[rows], weight.scale if weight.scale.ndim == 1 else weight.scale[rows])


def expert_matmul(x: I8, scale: F32, ids: I32, product: Callable[[I8, F32, int], F32]) -> F32:
    """``[M, top, N]``: the row ``x[m, j]`` with ``scale[m, j]`` times the matrix of expert ``ids[m, j]``.

    Args:
        product: Multiplies rows by an expert's matrices: ``product(x, scale, expert)``, ``[rows, N]``.
    """
    out: npt.NDArray[Any] = np.empty(0)
    for expert in np.unique(ids):
        at = np.nonzero(ids == expert)
        rows = product(x[at], scale[at], int(expert))
        if not out.size:
            out = np.empty((*ids.shape, rows.shape[1]), np.float32)
        out[at] = rows
    return out


def mixed(parts: F32, shares: F32) -> F32:
    """``[M, N]``: the results of a token's experts ``[M, top, N]`` times their shares, added one after the other."""
    total = np.zeros((parts.shape[0], parts.shape[2]), np.float32)
    for j in range(parts.shape[1]):
        total = total + parts[:, j] * shares[:, j, None]
    return total
