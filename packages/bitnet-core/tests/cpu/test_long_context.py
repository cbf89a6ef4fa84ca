"""Attention over as many positions as models have."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.hal import Attention, KVSpec, Limits, Op, RopeAppend, SequenceStep, run
from bitnet.core.testing.attention import BOUND, identity
from bitnet.core.testing.rig import Rig, assert_rel, dense, tensor

POSITIONS, BLOCK, DIM = 1 << 17, 256, 8


@pytest.mark.parametrize("count", [1, 2])
def test_sums_of_a_long_context_keep_their_digits(library: ctypes.CDLL, count: int) -> None:
    """Nearly even weights of nearly even values: added one after the other, they lose digits in the same direction.

    One token is computed in parts, several are not.
    """
    rng = np.random.default_rng()
    qkv = rng.standard_normal((POSITIONS, 3 * DIM)).astype(np.float32)
    qkv[:, :DIM] *= 0.01
    qkv[:, 2 * DIM :] = 0.7 + 0.1 * qkv[:, 2 * DIM :]
    blocks, limits = list(range(POSITIONS // BLOCK)), Limits(BLOCK, 1, 1, POSITIONS // BLOCK)
    specs = [tensor("qkv", "f32", "M", 3 * DIM), tensor("out", "f32", "M", DIM)]
    tables = dict(zip(("cos", "sin"), map(dense, identity(POSITIONS, DIM)), strict=True))
    ops: list[Op] = [RopeAppend("qkv", 0, 1, 1, DIM, "cos", "sin", "neox"), Attention("qkv", "out", 0, 1, 1, DIM)]
    kv = KVSpec(1, 1, DIM, len(blocks), BLOCK, "f32")
    k, v = (qkv[:, at : at + DIM].astype(np.float64) for at in (DIM, 2 * DIM))
    last = qkv[-count:].copy()
    seen = np.arange(POSITIONS) <= np.arange(POSITIONS - count, POSITIONS)[:, None]
    weights = np.exp(last[:, :DIM].astype(np.float64) @ k.T / DIM**0.5) * seen
    exact = weights @ v / weights.sum(axis=1, keepdims=True)
    for level in native.levels(library):
        device = CpuDevice(BACKEND.probe().devices[0], library, level=level, threads=2)
        with Rig(device, ops, specs, tables, limits=limits, kv=kv) as rig:

            def feed(tokens: int, length: int, table: list[int], rig: Rig = rig) -> None:
                run(rig.executable, rig.step([SequenceStep(np.zeros(tokens, np.int32), length, table)]))

            for block in blocks:  # each as if it were a sequence of its own
                rig.executable.write("qkv", qkv[block * BLOCK : (block + 1) * BLOCK])
                feed(BLOCK, BLOCK, [block])
            rig.executable.write("qkv", last)
            feed(count, POSITIONS, blocks)
            assert_rel(level, rig.executable.read("out", count), exact, BOUND["f32"] / 4)
        device.close()
