"""The operations of recurrent layers in float64, with the contract's bounds, computed independently of any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


def sigmoid(x: F64) -> F64:
    return np.asarray(0.5 + 0.5 * np.tanh(x / 2))


def silu(x: F64) -> F64:
    small = np.exp(-abs(x))  # no cancellation where x is far below zero
    return np.asarray(x * np.where(x > 0, 1, small) / (1 + small))


def hadamard(y: Array, block: int) -> F64:
    """Each block times the matrix ``(-1)^(number of bits that i and j share) / sqrt(block)``."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    blocks = np.asarray(y, np.float64).reshape(len(y), -1, block)
    out: F64 = (blocks @ matrix / np.sqrt(block)).reshape(y.shape)
    return out


def causal_conv(x: Array, weight: Array, before: F64) -> tuple[F64, F64, F64]:
    """The result, its bound, and the new state."""
    taps, rows = weight.shape[1], np.concatenate([before, np.asarray(x, np.float64)])
    windows = np.lib.stride_tricks.sliding_window_view(rows, taps, axis=0)  # [n, C, taps]
    wide = weight.astype(np.float64)
    sums, sizes = np.einsum("nct,ct->nc", windows, wide), np.einsum("nct,ct->nc", abs(windows), abs(wide))
    return silu(sums), 2e-6 * sizes + 1e-37, rows[len(x) :]


def delta_gates(x: Array, named: Mapping[str, Array], eps: float) -> tuple[F64, F64]:
    """The result and its bound."""
    rows = np.asarray(x, np.float64)
    w, alpha, beta, bias, rate = (named[n].astype(np.float64) for n in ("w", "alpha", "beta", "bias", "rate"))
    y = w * rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps)
    steps = np.log1p(np.exp(-abs(y @ alpha.T + bias))) + np.maximum(y @ alpha.T + bias, 0)
    off = 2e-6 * (1 + abs(bias) + abs(y) @ abs(alpha).T)
    result = np.concatenate([rate * steps, sigmoid(y @ beta.T)], axis=1)
    return result, np.concatenate([abs(rate) * off, 2e-6 * (1 + abs(y) @ abs(beta).T)], axis=1)


def delta_rule(qkv: Array, gates: Array, state: F64, k_heads: int, eps: float, *, tiled: bool) -> tuple[F64, F64, F64]:
    """The result, its bound, and the new state: each step as a matrix by which the state is multiplied."""
    heads, d_k, d_v = state.shape
    wide, both = np.asarray(qkv, np.float64), np.asarray(gates, np.float64)
    out, bound, states = np.empty((len(qkv), heads, d_v)), np.empty((len(qkv), heads, d_v)), state.copy()
    for h in range(heads):
        g = h % k_heads if tiled else h * k_heads // heads
        q, k = wide[:, g * d_k :][:, :d_k], wide[:, (k_heads + g) * d_k :][:, :d_k]
        v = wide[:, 2 * k_heads * d_k + h * d_v :][:, :d_v]
        q = q / np.sqrt((q**2).sum(axis=1, keepdims=True) + eps) * d_k**-0.5
        k = k / np.sqrt((k**2).sum(axis=1, keepdims=True) + eps)
        s = states[h]
        for m in range(len(qkv)):
            decay, strength = np.exp(both[m, h]), both[m, heads + h]
            s = decay * (np.eye(d_k) - strength * np.outer(k[m], k[m])) @ s + strength * np.outer(k[m], v[m])
            out[m, h], bound[m, h] = q[m] @ s, 1e-5 * (abs(q[m]) @ abs(s)).max() + 1e-37
        states[h] = s
    return out.reshape(len(qkv), -1), bound.reshape(len(qkv), -1), states


def gated(x: Array, gate: Array, weight: Array | None, eps: float, activation: Literal["silu", "sigmoid"]) -> F64:
    rows, gates = np.asarray(x, np.float64), np.asarray(gate, np.float64)
    if weight is not None:
        heads = rows.reshape(len(rows), -1, len(weight))
        heads = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + eps) * weight.astype(np.float64)
        rows = heads.reshape(rows.shape)
    out: F64 = rows * {"silu": silu, "sigmoid": sigmoid}[activation](gates)
    return out
