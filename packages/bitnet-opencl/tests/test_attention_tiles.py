"""Attention of many tokens by tiles, of heads too large for the conformance suite's small size."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.hal import Device
from bitnet.core.testing.attention import Heads, Paged, Part
from bitnet.core.testing.base import DeviceTests
from bitnet.opencl.backend import BACKEND


class TestAttentionTiles(DeviceTests):
    backend = BACKEND
    size = "small"

    @pytest.mark.parametrize("heads", [Heads(4, 1, 128, 16), Heads(7, 1, 64, 48), Heads(12, 4, 64)], ids=str)
    def test_attention_of_many_tokens(self, device: Device, rng: np.random.Generator, heads: Heads) -> None:
        """Ends of several sequences in one tile, positions beyond a work-group's at a time, heads that fill no tile."""
        past, new = rng.integers(60, 200, 2).tolist(), int(rng.integers(2, 40))
        parts = [Part(0, 70), Part(past[0], 5), Part(3, 1), Part(past[1], new)]
        most = max(part.past + part.new for part in parts)
        paged = Paged(device, rng, heads, length=most, seqs=len(parts), chunk=sum(part.new for part in parts))
        with paged.rig:
            paged.prefill(*(part.past for part in parts))
            paged.run(list(enumerate(parts)))
