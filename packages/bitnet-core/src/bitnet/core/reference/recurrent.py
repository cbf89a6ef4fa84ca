"""The operations of recurrent layers in ``kernels/README.md``, and the Hadamard transform, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def silu(x: npt.NDArray[np.floating]) -> F64:
    wide = x.astype(np.float64)
    return wide * sigmoid(wide)


def sigmoid(x: npt.NDArray[np.floating]) -> F64:
    """No exponential overflows: a gate far below zero gives zero."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x.astype(np.float64), -700, None))))


def hadamard(y: npt.NDArray[np.floating], block: int) -> F64:
    """The normalised Walsh-Hadamard transform of each ``block`` elements of the rows of ``y[M, K]``."""
    out = np.array(y, np.float64)
    half = 1
    with np.errstate(invalid="ignore"):  # infinities of both signs
        while half < block:
            pairs = out.reshape(len(y), out.shape[1] // (2 * half), 2, half)
            pairs[:] = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
            half *= 2
    out /= np.sqrt(block)
    return out


def causal_conv(x: F32, weight: F32, before: F32) -> tuple[F32, F32]:
    """``silu`` of the convolution of ``x[n, C]`` after the rows ``before[taps - 1, C]``, and the last such rows."""
    taps, rows = weight.shape[1], np.concatenate([before, x])
    total = sum(rows[j : j + len(x)].astype(np.float64) * weight[:, j] for j in range(taps))
    return silu(np.asarray(total)).astype(np.float32), rows[len(x) :]


def delta_gates(y: F64, alpha: F32, beta: F32, bias: F32, rate: F32) -> F32:
    """Logarithms of decays, and strengths, ``[M, 2H]``, of normalised rows ``y[M, K]``."""
    decays = rate * np.logaddexp(0, y @ alpha.T.astype(np.float64) + bias)
    return np.concatenate([decays, sigmoid(y @ beta.T.astype(np.float64))], axis=1).astype(np.float32)


class Heads(NamedTuple):
    """Numbers and sizes of the heads of a delta rule."""

    keys: int
    tiled: bool
    values: int
    d_k: int
    d_v: int


def delta_rule(qkv: F32, gates: F32, state: F32, heads: Heads, eps: float) -> tuple[F32, F32]:
    """``out[n, H d_v]`` and the new state ``[H, d_k, d_v]``, token by token."""
    n, width = len(qkv), heads.keys * heads.d_k
    q, k = (qkv[:, i * width : (i + 1) * width].reshape(n, heads.keys, heads.d_k).astype(np.float64) for i in (0, 1))
    v = qkv[:, 2 * width :].reshape(n, heads.values, heads.d_v).astype(np.float64)
    ratio = heads.values // heads.keys
    own = np.arange(heads.values) % heads.keys if heads.tiled else np.arange(heads.values) // ratio
    q, k = ((x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps))[:, own] for x in (q, k))
    q = q / np.sqrt(heads.d_k)
    decays, strengths = np.exp(gates[:, : heads.values].astype(np.float64)), gates[:, heads.values :].astype(np.float64)
    s, out = state.astype(np.float64), np.empty((n, heads.values, heads.d_v))
    for m in range(n):
        s = s * decays[m, :, None, None]
        error = strengths[m, :, None] * (v[m] - np.einsum("hkv,hk->hv", s, k[m]))
        s = s + k[m, :, :, None] * error[:, None, :]
        out[m] = np.einsum("hkv,hk->hv", s, q[m])
    return out.reshape(n, -1).astype(np.float32), s.astype(np.float32)


def untiled(x: F64, k_heads: int, head_dim: int) -> F64:
    """Columns of ``x[M, W]`` with their heads no longer in turns by key head, but all heads of a key head together."""
    turns = x.reshape(len(x), -1, k_heads, head_dim)
    out: F64 = turns.swapaxes(1, 2).reshape(x.shape)
    return out
