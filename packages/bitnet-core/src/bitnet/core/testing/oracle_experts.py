"""The operations of mixtures of experts in float64, computed from ``kernels/README.md`` independently of any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.testing import oracle

F64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


class Routed(NamedTuple):
    """Exact logits ``[M, E]``, and how far a device's may be from them."""

    logits: F64
    bound: F64


def route(x: Array, weight: Array, eps: float, router: Array) -> Routed:
    y, rows = oracle.rms_norm(x, weight, eps), np.asarray(router, np.float64)
    logits = np.einsum("mk,ek->me", y, rows)  # equal rows give equal logits, as they may not by a product of matrices
    return Routed(logits, 2e-6 * (abs(y) @ abs(rows).T))


def shares(logits: F64, ids: Array) -> F64:
    """The softmax over the logits of the experts chosen, ``[M, top]``."""
    chosen = np.take_along_axis(logits, ids.astype(np.int64), axis=1)
    powers = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    out: F64 = powers / powers.sum(axis=1, keepdims=True)
    return out


class Matrices(NamedTuple):
    """Ternary matrices of all experts, ``codes[E, N, K]``, with one scale or those of groups ``[E, N, K / group]``."""

    codes: npt.NDArray[np.int8]
    scale: float | npt.NDArray[np.float16]


def products(x: Array, scale: Array, ids: Array, weights: Sequence[Matrices]) -> npt.NDArray[np.float32]:
    """``[M, top, ΣN]`` bit for bit: row ``x[m, j]`` with ``scale[m, j]`` by the matrices of expert ``ids[m, j]``."""
    out = np.empty((*ids.shape, sum(w.codes.shape[1] for w in weights)), np.float32)
    for e in np.unique(ids).tolist():
        (m, j), begin = np.nonzero(ids == e), 0
        for codes, scales in weights:
            if isinstance(scales, np.ndarray):
                part = oracle.group_matmul(x[m, j], scale[m, j], [(codes[e], scales[e])])
            else:
                part = oracle.ternary_matmul(x[m, j], scale[m, j], [(codes[e], scales)])
            out[m, j, begin : begin + part.shape[1]] = part
            begin += part.shape[1]
    return out


def added(before: Array, parts: Array, shares: Array) -> npt.NDArray[np.float32]:
    """``[M, N]`` bit for bit: ``before`` plus the sum of ``parts[M, top, N]`` times their shares, in their order."""
    total = np.zeros(before.shape, np.float32)
    for j in range(parts.shape[1]):
        total += parts[:, j] * shares[:, j, None].astype(np.float32)
    return np.asarray(before, np.float32) + total
