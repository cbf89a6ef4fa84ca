"""Attention of many tokens on matrix units, where the conformance suite at small size has few tiles of it."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.hal import Device
from bitnet.core.testing import needs
from bitnet.core.testing.attention import Heads, Paged, Part
from bitnet.core.testing.base import DeviceTests
from bitnet.rocm.backend import BACKEND

HEADS = [
    Heads(2, 1, 64),
    Heads(2, 2, 128, 16),
    Heads(3, 1, 80, 16, style="interleaved"),
    Heads(1, 1, 32, 64),
]


class TestMatrixAttention(DeviceTests):
    backend = BACKEND
    size = "small"

    @needs("int8-matrix")
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_tiles(self, device: Device, rng: np.random.Generator, heads: Heads) -> None:
        """A tile that is full and one that is not, in a step; then a later part of it, beside another sequence."""
        paged = Paged(device, rng, heads, length=103, seqs=2, chunk=80)
        with paged.rig:
            paged.run([(0, Part(0, 70))])
            paged.run([(0, Part(70, 33)), (1, Part(0, 3))])
            assert "attention_prefill_matrix_rocm" in paged.rig.executable.kernels
