"""Each operation in float64 and int64, computed from ``kernels/README.md`` independently of any device.

The suite compares devices with these, never with the reference device, which is itself tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import Activation, KVDtype
from bitnet.core.hal.program import NUMPY_DTYPES

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]
I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Quantised(NamedTuple):
    """Exact results of absmax int8 quantisation: ``quotient[M, K]`` before rounding, and ``scale[M]``."""

    quotient: F64
    scale: F64


def rms_norm(x: Array, weight: Array | None, eps: float) -> F64:
    rows = np.asarray(x, np.float64)
    if weight is None:
        return rows
    mean_square = (rows**2).sum(axis=1) / rows.shape[1]
    out: F64 = rows / np.sqrt(mean_square + eps)[:, None] * np.asarray(weight, np.float64)
    return out


def add_bias(x: Array, bias: Array) -> F64:
    out: F64 = np.asarray(x, np.float64) + np.asarray(bias, np.float64)
    return out


def center(x: Array) -> F64:
    rows = np.asarray(x, np.float64)
    out: F64 = rows - rows.sum(axis=1, keepdims=True) / rows.shape[1]
    return out


def absmax(y: F64) -> Quantised:
    greatest = np.maximum(1e-5, abs(y).max(axis=1))
    return Quantised(127 * y / greatest[:, None], greatest / 127)


def glu(gate_up: Array, activation: Activation) -> F64:
    both = np.asarray(gate_up, np.float64)
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    small = np.exp(-abs(gate))  # no overflow, and no cancellation where the gate is far below zero
    relu2, silu = np.where(gate > 0, gate, 0.0) ** 2, gate * np.where(gate > 0, 1, small) / (1 + small)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    far = np.exp(-2 * abs(inner))  # likewise
    gelu = gate * np.where(inner > 0, 1, far) / (1 + far)
    out: F64 = {"relu2": relu2, "silu": silu, "gelu_tanh": gelu}[activation] * up
    return out


def ternary_matmul(codes: I8, scale: F32, weights: Sequence[tuple[I8, float]]) -> F32:
    """``[M, ΣN]`` bit for bit: integers summed exactly, and the two products each rounded once to float32."""
    parts = []
    for matrix, unit in weights:
        # float64 holds these integers exactly, and numpy multiplies float64 far faster than int64.
        acc = codes.astype(np.float64) @ matrix.astype(np.float64).T
        assert abs(acc).max(initial=0) <= 2**24
        both = np.float32(unit) * scale
        parts.append(acc.astype(np.float32) * both[:, None])
    return np.concatenate(parts, axis=1)


def group_matmul(codes: I8, scale: F32, weights: Sequence[tuple[I8, npt.NDArray[np.float16]]]) -> F32:
    """``[M, ΣN]`` bit for bit, for weights with a scale for each group of columns: each rounding to float32 in turn."""
    parts = []
    for matrix, units in weights:
        n, count = units.shape
        group = matrix.shape[1] // count
        x, w = codes.reshape(len(codes), count, group), matrix.reshape(n, count, group)
        acc = np.einsum("msk,nsk->smn", x.astype(np.float64), w.astype(np.float64), optimize=True)
        terms = acc.astype(np.float32) * units.T.astype(np.float32)[:, None, :]
        total = np.zeros((len(codes), n), np.float32)
        for term in terms:
            total = total + term
        parts.append(total * scale[:, None])
    return np.concatenate(parts, axis=1)


def rotate(x: Array, cos: Array, sin: Array, style: Literal["neox", "interleaved"]) -> F64:
    """``x[heads, d]`` rotated by one row of angles, as complex numbers."""
    rows = np.asarray(x, np.float64)
    half = rows.shape[1] // 2
    turn = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)
    out = np.empty_like(rows)
    if style == "neox":
        turned = (rows[:, :half] + 1j * rows[:, half:]) * turn
        out[:, :half], out[:, half:] = turned.real, turned.imag
    else:
        turned = (rows[:, ::2] + 1j * rows[:, 1::2]) * turn
        out[:, ::2], out[:, 1::2] = turned.real, turned.imag
    return out


class Rows(NamedTuple):
    """Rows of an ``i8`` cache: exact quotients ``[..., d]`` before they are rounded to codes, and scales ``[...]``."""

    quotient: F64
    scale: F64


MIN_ROW = 1e-30
"""A row of an ``i8`` cache whose greatest magnitude is below this is stored as zeros."""
CODE_SLACK = {"k": 5e-4, "v": 1e-4}
"""The least distance of a quotient from a rounding border at which only one code is right, in units of a code."""


def int8_rows(x: Array) -> Rows:
    rows = np.asarray(x, np.float64)
    greatest = abs(rows).max(axis=-1)
    zero, sound = greatest < MIN_ROW, np.isfinite(greatest)
    quotient = np.where((sound & ~zero)[..., None], rows, 0) * 127 / np.where(sound & ~zero, greatest, 1)[..., None]
    return Rows(quotient, np.where(sound, np.where(zero, 0, greatest / 127), np.nan))


class Cache:
    """The keys and values of one layer, by sequence, rounded to the type a device stores them in.

    Keys are stored rotated. A device's keys may be off by ``rotation`` times the largest element of the row before
    rounding, so near a tie they may round the other way. ``i8`` codes of keys and values within ``CODE_SLACK`` of a tie
    may be either.
    """

    rotation = 1e-6

    def __init__(self, dtype: KVDtype, positions: int, window: int | None = None) -> None:
        self._dtype, self._positions, self._window = dtype, positions, window or positions
        self._held: dict[int, F64] = {}
        self._doubt: dict[int, F64] = {}
        self._prefix: dict[int, tuple[int, int]] = {}

    def share(self, source: int, target: int, positions: int) -> None:
        """Let ``target`` share the first positions of ``source``, in their state when ``target`` gets its first own
        position."""
        self._prefix[target] = source, positions

    def put(self, sequence: int, position: int, k: Array, v: Array) -> None:
        """Store ``k`` and ``v`` ``[G, d]`` at a position."""
        if sequence not in self._held:
            self._held[sequence] = np.full((2, self._positions, *k.shape), np.nan)
            self._doubt[sequence] = np.full((2, self._positions, *k.shape), np.nan)
            if sequence in self._prefix:
                source, count = self._prefix[sequence]
                self._held[sequence][:, :count] = self._held[source][:, :count]
                self._doubt[sequence][:, :count] = self._doubt[source][:, :count]
        for i, (name, rows) in enumerate((("k", k), ("v", v))):
            self._held[sequence][i, position], self._doubt[sequence][i, position] = self._rounded(name, rows)

    def _rounded(self, name: str, rows: Array) -> tuple[F64, F64]:
        """Rows of keys or values as stored, and how far a device's elements may differ from them."""
        exact = np.asarray(rows, np.float64)
        if self._dtype == "i8":
            quotient, scale = int8_rows(exact)
            either = abs(quotient - np.floor(quotient) - 0.5) < CODE_SLACK[name]
            return np.rint(quotient) * scale[..., None], either * scale[..., None]
        if self._dtype == "f32" or name == "v":  # rounding adds nothing to the rotation's own error, or there is none
            return exact.astype(NUMPY_DTYPES[self._dtype]).astype(np.float64), np.zeros(exact.shape)
        off = self.rotation * abs(exact).max(axis=-1, keepdims=True)
        up, down = ((exact + sign * off).astype(NUMPY_DTYPES[self._dtype]).astype(np.float64) for sign in (1, -1))
        return exact.astype(NUMPY_DTYPES[self._dtype]).astype(np.float64), abs(up - down)

    def attend(self, sequence: int, position: int, q: Array) -> F64:
        """Attention of ``q[H, d]`` at a position over all positions of its window up to it: ``[H, d]``."""
        _, values = self._held[sequence][:, self._seen(position)]
        ratio = len(q) // values.shape[1]
        weights = self._weights(sequence, position, q)
        return np.stack([w @ values[:, head // ratio] for head, w in enumerate(weights)])

    def doubt(self, sequence: int, position: int, q: Array) -> F64:
        """How far a device's different roundings may move the result of :meth:`attend`, to first order."""
        _, values = self._held[sequence][:, self._seen(position)]
        (keys, other), ratio = self._doubt[sequence][:, self._seen(position)], len(q) // values.shape[1]
        moved = np.empty(q.shape)
        for head, weights in enumerate(self._weights(sequence, position, q)):
            group = head // ratio
            scores = keys[:, group] @ abs(np.asarray(q[head], np.float64)) / q.shape[1] ** 0.5
            moved[head] = (weights * scores) @ abs(values[:, group] - weights @ values[:, group])
            moved[head] += weights @ other[:, group]
        return moved

    def _seen(self, position: int) -> slice:
        return slice(max(0, position + 1 - self._window), position + 1)

    def _weights(self, sequence: int, position: int, q: Array) -> list[F64]:
        keys, _ = self._held[sequence][:, self._seen(position)]
        ratio = len(q) // keys.shape[1]
        scores = [keys[:, i // ratio] @ np.asarray(row, np.float64) / len(row) ** 0.5 for i, row in enumerate(q)]
        powers = [np.exp(row - row.max()) for row in scores]
        return [row / row.sum() for row in powers]


def absmean(x: Array) -> tuple[F64, float]:
    """Quotients before rounding, and the scale, of ``quantize``."""
    rows = np.asarray(x, np.float64)
    scale = max(1e-5, float(abs(rows).sum() / rows.size))
    return rows / scale, scale
