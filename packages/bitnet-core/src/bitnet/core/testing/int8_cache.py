"""Tests of int8 KV caches: conversion of values to codes and scales, and non-finite rows."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.hal import KV_I8, Device
from bitnet.core.testing import oracle
from bitnet.core.testing.attention import BOUND, Heads, Paged, Part
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs
from bitnet.core.testing.rig import Array, not_yet

HEADS = [Heads(2, 2, 64, 16, "i8"), Heads(3, 1, 100, 16, "i8", "interleaved"), Heads(4, 2, 128, 32, "i8")]


def rows_of(rng: np.random.Generator, kind: str, count: int, d: int) -> Array:
    """Rows ``[count, d]`` whose codes are checked."""
    if kind == "ties":  # a scale of 1: the codes are the elements, and ties are rounded to the even code
        rows = rng.integers(-253, 254, (count, d)) / 2
        rows[np.arange(count), rng.integers(0, d, count)] = 127 * rng.choice([-1, 1], count)
    elif kind == "single":
        rows = np.zeros((count, d))
        rows[np.arange(count), rng.integers(0, d, count)] = rng.standard_normal(count)
    else:
        rows = rng.standard_normal((count, d)) * {"usual": 1.0, "small": 1e-3, "large": 1e4}.get(kind, 1.0)
    if kind == "nothing":
        rows = rows * np.array([0, 1e-36])[np.arange(count) % 2, None]
    return rows.astype(np.float32)


class Int8CacheTests(DeviceTests):
    @needs(KV_I8)
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    @pytest.mark.parametrize("kind", ["usual", "small", "large", "ties", "single", "nothing"])
    def test_codes_of_values(self, device: Device, rng: np.random.Generator, heads: Heads, kind: str) -> None:
        """Attention over a single position gives its values as they are stored, close enough to tell the codes."""
        h, g, d = heads[:3]
        with not_yet():
            paged = Paged(device, rng, heads, length=1, seqs=4, chunk=33, turning=False)
        values = rows_of(rng, kind, 4 * g, d).reshape(4, g, d)
        qkv = paged.random(4)
        qkv[:, (h + g) * d :] = values.reshape(4, -1)
        with paged.rig:
            out = paged.run([(s, Part(0, 1)) for s in range(4)], qkv).reshape(4, h, d).astype(np.float64)
        quotient, scale = (np.repeat(a, h // g, axis=1) for a in oracle.int8_rows(values))
        if kind == "nothing":
            assert (out == 0).all(), "rows of zeros, or as good as that, gave something else"
            return
        codes, right = np.rint(out / scale[..., None]), np.rint(quotient)
        either = (kind != "ties") & (abs(quotient - np.floor(quotient) - 0.5) < oracle.CODE_SLACK["v"])
        wrong = (codes != right) & ~(either & (abs(codes - quotient) < 1))
        assert not wrong.any(), f"{wrong.sum()} codes are wrong: {codes[wrong][:4]} of {quotient[wrong][:4]}"
        error = abs(out - right * scale[..., None])[~either]
        assert (error <= BOUND["i8"] * 127 * scale.max()).all()

    @needs(KV_I8)
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_codes_of_keys(self, device: Device, rng: np.random.Generator, heads: Heads) -> None:
        """Two keys that are stored as the same codes share the attention, whatever q is; one code off, they do not."""
        h, g, d = heads[:3]
        with not_yet():
            paged = Paged(device, rng, heads, length=3, seqs=1, chunk=33, turning=False)
        qkv = paged.random(3).reshape(3, h + 2 * g, d)
        qkv[0, h : h + g] = rows_of(rng, "ties", g, d)
        qkv[1, h : h + g] = np.rint(qkv[0, h : h + g])  # to even, as the contract has it
        qkv[2, h : h + g] = 0
        qkv[:, h + g :] = np.array([3, 1, 2])[:, None, None]
        qkv[2, :h] = 8 * d**0.5 * rng.choice([-1, 1], (h, d))
        dots = np.einsum("hd,hd->h", qkv[2, :h], np.repeat(qkv[1, h : h + g], h // g, axis=0))
        qkv[2, :h] *= np.sign(dots)[:, None]  # the third key has no part in it
        with paged.rig:
            paged.run([(0, Part(0, 2))], qkv[:2].reshape(2, -1))
            out = paged.run([(0, Part(2, 1))], qkv[2:].reshape(1, -1))
        assert (abs(out - 2) <= 0.2).all(), f"codes of equal keys are not equal: {out.reshape(h, d)[:, 0]}"

    @needs(KV_I8)
    @pytest.mark.parametrize("size", [1e-3, 1.0, 2e4])
    def test_sizes_of_rows(self, device: Device, rng: np.random.Generator, size: float) -> None:
        """Keys and values as large and as small as normal f16 numbers are; those of one head differ a lot."""
        heads = Heads(4, 2, 64, 16, "i8")
        h, g, d = heads[:3]
        with not_yet():
            paged = Paged(device, rng, heads, length=90, seqs=2, chunk=64)
        with paged.rig:
            later = [(0, Part(60, 20)), (1, Part(0, 5))], [(0, Part(80, 1)), (1, Part(5, 1))]
            for parts in ([(0, Part(0, 60))], *later):
                m = sum(part.new for _, part in parts)
                qkv = paged.random(m)
                qkv[:, : h * d] /= size
                qkv[:, h * d : (h + g) * d] *= size
                own = rng.uniform(0.1, 1, (m, g)) * np.where(rng.random((m, g)) < 0.1, 1e-2, 1)
                qkv[:, (h + g) * d :] *= np.repeat(size / 4 * own, d, axis=1).astype(np.float32)
                paged.run(parts, qkv)

    @needs(KV_I8)
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "minus-inf"])
    @pytest.mark.parametrize("which", ["key", "value"])
    def test_a_row_that_is_not_finite(self, device: Device, rng: np.random.Generator, which: str, value: float) -> None:
        """Attention that reads the row gives NaN; heads, tokens and sequences that do not read it are right."""
        heads = Heads(4, 2, 64, 16, "i8")
        h, g, d = heads[:3]
        with not_yet():
            paged = Paged(device, rng, heads, length=40, seqs=2, chunk=33, turning=False)
        ours = slice(h // g, h)  # the heads of the second key/value head
        with paged.rig:
            paged.run([(0, Part(0, 7)), (1, Part(0, 3))])
            for at, bad in ((7, True), (8, False)):
                qkv = paged.random(2)
                if bad:
                    qkv[0, (h + g * (which == "value") + 1) * d + int(rng.integers(d))] = value
                step = paged.step([(0, Part(at, 1)), (1, Part(at - 4, 1))])
                out = paged.rig.run(step, {"qkv": qkv}, ["qkv", "out"])["out"].reshape(2, h, d)
                assert np.isnan(out[0, ours]).all(), "a number that is not finite was hidden"
                assert np.isfinite(out[0, : h // g]).all()
                assert np.isfinite(out[1]).all()
