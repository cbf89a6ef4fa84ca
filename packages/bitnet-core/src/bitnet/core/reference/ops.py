"""The operations of ``kernels/README.md`` on numpy arrays: float64 inside, the contract's types outside."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import Activation, TernaryData

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]

_CHUNK = 1 << 21
"""Maximum elements of a weight matrix, or of attention scores, unpacked at a time: 8 or 16 MiB."""

GELU_SLOPE, GELU_CUBE = 2 * np.sqrt(2 / np.pi), 0.044715
"""Of GELU's form with tanh: ``tanh(z)``, ``2z = GELU_SLOPE · (g + GELU_CUBE · g³)``."""
MIN_ROW = 1e-30
"""A row of an ``i8`` cache whose largest magnitude is below this is stored as zeros."""

# The four weights of each byte, in the order of its two-bit fields: bits 7-6 first.
_UNPACKED = ((np.arange(256)[:, None] >> np.array([6, 4, 2, 0])) & 3).astype(np.float32) - 1


def rms_norm(x: npt.NDArray[np.floating], weight: F32 | None, eps: float) -> F64:
    """``y[M, K]`` of ``x[M, K]``; ``x`` itself without a weight."""
    y = x.astype(np.float64)
    if weight is None:
        return y
    y *= weight / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + eps)
    return y


def center(x: F32) -> F32:
    """``x[M, D]`` minus each row's mean."""
    y = x.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities of both signs
        y -= np.mean(y, axis=-1, keepdims=True)
    return y.astype(np.float32)


def absmax_int8(y: F64) -> tuple[I8, F32]:
    """Codes ``[M, K]`` and scales ``[M]``: ``y ≈ codes · scale``."""
    greatest = np.maximum(np.abs(y).max(axis=-1), 1e-5)
    codes = np.clip(np.rint(y * (127 / greatest)[:, None]), -128, 127)
    with np.errstate(invalid="ignore"):  # NaN has no code; it stays in the residual stream and reaches the logits
        return codes.astype(np.int8), (greatest / 127).astype(np.float32)


def glu(gate_up: F32, activation: Activation, clamp: float | None = None) -> F64:
    """``act(gate) · up``, ``[M, F]`` of ``gate_up[M, 2F]``."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    if clamp is not None:
        gate, up = np.minimum(gate, np.float32(clamp)), np.clip(up, -np.float32(clamp), np.float32(clamp))
    if activation == "relu2":
        act = np.square(np.maximum(gate, 0))
    else:  # GELU with tanh is g · sigmoid(2z): (1 + tanh z) / 2 = sigmoid(2z)
        slope = gate if activation == "silu" else GELU_SLOPE * (gate + GELU_CUBE * gate**3)
        act = gate / (1 + np.exp(-np.maximum(slope, -700)))
    product: F64 = act * up
    return product


def ternary_matmul(x: I8, scale: F32, weight: TernaryData) -> F32:
    """``[M, N]``. Float32 sums are exact here, in any order: all partial sums are integers below 2²⁴."""
    columns = weight.codes.shape[1] * 4
    padded = np.zeros((len(x), columns), np.float32)
    padded[:, : x.shape[1]] = x
    # Byte g of a block of 128 holds weights g, g+32, g+64, g+96: reorder x once instead of every weight.
    padded = padded.reshape(len(x), -1, 4, 32).swapaxes(2, 3).reshape(len(x), columns)
    acc = np.empty((len(x), len(weight.codes)), np.float32)
    rows = max(1, _CHUNK // columns)
    for n in range(0, len(weight.codes), rows):
        chunk = _UNPACKED[weight.codes[n : n + rows]].reshape(-1, columns)
        np.matmul(padded, chunk.T, out=acc[:, n : n + rows])
    acc *= (scale * weight.scale)[:, None]
    return acc


def group_matmul(x: I8, scale: F32, weight: TernaryData, group: int) -> F32:
    """``ternary_matmul`` of a weight with a scale per ``group`` columns, summed as specified in
    ``kernels/README.md``."""
    out = np.empty((len(x), len(weight.codes)), np.float32)
    rows = max(1, _CHUNK // x.shape[1])
    for n in range(0, len(weight.codes), rows):
        codes, scales = weight.codes[n : n + rows], weight.scale[n : n + rows].astype(np.float32)
        chunk = _UNPACKED[codes].reshape(len(codes), -1, 32, 4).swapaxes(2, 3).reshape(len(codes), -1)
        total = np.zeros((len(x), len(codes)), np.float32)
        for s in range(x.shape[1] // group):
            columns = slice(s * group, (s + 1) * group)
            acc = x[:, columns].astype(np.float32) @ chunk[:, columns].T
            total += acc * scales[:, s]
        out[:, n : n + rows] = total * scale[:, None]
    return out


def table_rows(weight: TernaryData, rows: npt.NDArray[np.int32], width: int) -> F32:
    """Rows of a ternary table with scales of groups, ``[len(rows), width]``: each code's value times its group's
    scale."""
    codes, scales = weight.codes[rows], weight.scale[rows].astype(np.float32)
    values = _UNPACKED[codes].reshape(len(rows), -1, 32, 4).swapaxes(2, 3).reshape(len(rows), -1)[:, :width]
    scaled: F32 = (values.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(len(rows), width)
    return scaled


def table_matmul(x: F32, weight: TernaryData) -> F32:
    """``dense_matmul`` of a ternary table with scales of groups."""
    out = np.empty((len(x), len(weight.codes)), np.float32)
    step = max(1, _CHUNK // x.shape[1])
    for n in range(0, out.shape[1], step):
        rows = np.arange(n, min(n + step, out.shape[1]), dtype=np.int32)
        with np.errstate(invalid="ignore"):  # an infinity times 0
            out[:, n : n + step] = _products(x, table_rows(weight, rows, x.shape[1]))
    return out


def _products(x: F32, weight: npt.NDArray[np.floating[Any]]) -> F64:
    """``x · weightᵀ``; in float32 the roundings of a long row with a few large products would exceed the bound."""
    products: F64 = x.astype(np.float64) @ weight.T.astype(np.float64)
    return products


def dense_matmul(x: F32, weight: npt.NDArray[np.float32] | npt.NDArray[np.float16]) -> F32:
    """``[R, N]``."""
    out = np.empty((len(x), len(weight)), np.float32)
    rows = max(1, _CHUNK // weight.shape[1])
    for n in range(0, len(weight), rows):
        out[:, n : n + rows] = _products(x, weight[n : n + rows])
    return out


def rotate(x: F32, cos: F32, sin: F32, style: Literal["neox", "interleaved"]) -> F32:
    """Rotary embedding of ``x[M, heads, d]`` by the angle rows ``cos``, ``sin`` ``[M, d / 2]``."""
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    first, second = (np.s_[..., :half], np.s_[..., half:]) if style == "neox" else (np.s_[..., 0::2], np.s_[..., 1::2])
    a, b, cos, sin = x[first], x[second], cos[:, None, :], sin[:, None, :]
    with np.errstate(invalid="ignore"):  # an infinity times 0
        out[first] = a * cos - b * sin
        out[second] = b * cos + a * sin
    return out


def attention(
    q: F32, k: npt.NDArray[np.floating], v: npt.NDArray[np.floating], first: int, window: int | None = None
) -> F32:
    """Causal attention of ``q[n, H, d]``, at positions from ``first`` on, over ``k`` and ``v`` ``[first + n, G, d]``;
    shaped as ``q``. Positions behind the first query's window may hold anything."""
    hidden = 0 if window is None else max(0, first + 1 - window)
    k, v, first = k[hidden:], v[hidden:], first - hidden
    n, heads, d = q.shape
    groups = k.shape[1]
    queries = q.astype(np.float64).reshape(n, groups, heads // groups, d).transpose(1, 2, 0, 3) / np.sqrt(d)
    keys, values = k.astype(np.float64).transpose(1, 2, 0)[:, None], v.astype(np.float64).swapaxes(0, 1)[:, None]
    out = np.empty(queries.shape)
    step = max(1, _CHUNK // (heads * len(k)))
    for at in range(0, n, step):
        scores = queries[:, :, at : at + step] @ keys
        last = first + at + np.arange(scores.shape[2])
        scores[..., np.arange(len(k)) > last[:, None]] = -np.inf
        if window is not None:
            scores[..., np.arange(len(k)) <= last[:, None] - window] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, :, at : at + step] = weights @ values / weights.sum(axis=-1, keepdims=True)
    rows: F32 = out.transpose(2, 0, 1, 3).reshape(n, heads, d).astype(np.float32)
    return rows


def row_int8(x: F32) -> tuple[I8, F32]:
    """Codes ``[..., d]`` and scales ``[...]`` of rows of an ``i8`` cache; a row with a non-finite element has scale
    NaN."""
    greatest = np.abs(x.astype(np.float64)).max(axis=-1)
    sound = np.isfinite(greatest)
    inverse = np.where(sound & (greatest >= MIN_ROW), 127 / np.maximum(np.where(sound, greatest, 1), MIN_ROW), 0)
    codes = np.clip(np.rint(np.where(sound[..., None], x, 0) * inverse[..., None]), -127, 127)
    scale = np.where(sound, np.where(inverse > 0, greatest / 127, 0), np.nan)
    return codes.astype(np.int8), scale.astype(np.float32)


def absmean_ternary(x: F32) -> tuple[I8, np.float32]:
    """Codes in {-1, 0, 1} and the scale of the whole matrix."""
    scale = max(float(np.mean(np.abs(x), dtype=np.float64)), 1e-5)
    return np.clip(np.rint(x / scale), -1, 1).astype(np.int8), np.float32(scale)
