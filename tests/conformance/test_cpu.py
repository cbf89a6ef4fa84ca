"""The conformance suite on every level of the CPU device that this processor runs, numpy among them."""

from __future__ import annotations

import numpy as np

from bitnet.core.cpu.backend import BACKEND
from bitnet.core.hal import Device, KVSpec, Limits, RopeAppend, TernaryMatmul
from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.rig import Rig, dense, tensor, ternary


class TestCpu(ConformanceSuite):
    backend = BACKEND

    def test_nothing_is_refused(self, device: Device) -> None:
        """Elsewhere the suite lets a device refuse these."""
        weight, norm = ternary(np.ones((4, 64), np.int8), np.ones((4, 2), np.float16)), dense(np.ones(4, np.float32))
        specs = [tensor("x", "i8", "M", 64), tensor("s", "f32", "M"), tensor("out", "f32", "M", 4)]
        Rig(device, [TernaryMatmul("x", "s", ("w",), "out")], specs, {"w": weight}, limits=Limits(1)).executable.close()
        rope = RopeAppend("qkv", 0, 1, 1, 4, "t", "t", q_norm="n", k_norm="n", eps=1e-6)
        weights = {"t": dense(np.ones((32, 2), np.float32)), "n": norm}
        kv = KVSpec(1, 1, 4, 1)
        specs = [tensor("qkv", "f32", "M", 12)]
        Rig(device, [rope], specs, weights, limits=Limits(1), kv=kv).executable.close()
