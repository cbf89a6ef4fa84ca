"""Tests of attention to a window of positions."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal import WINDOWS, Attention, Device, KVDtype, KVSpec, Limits
from bitnet.core.testing.attention import Heads, Paged, Part
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs
from bitnet.core.testing.rig import Rig, tensor

SHAPES = [
    (Heads(4, 2, 64, 16, "f32"), 1),
    (Heads(4, 2, 64, 16), 16),
    (Heads(16, 4, 128), 37),
    (Heads(7, 1, 32, 16, "f32"), 130),
    (Heads(4, 1, 48, dtype="f32"), 200),
    (Heads(6, 2, 100, 16, "i8"), 50),
]


class WindowTests(DeviceTests):
    @needs(WINDOWS)
    @pytest.mark.parametrize(("heads", "window"), SHAPES, ids=str)
    def test_window(self, device: Device, rng: np.random.Generator, heads: Heads, window: int) -> None:
        """Prompts in chunks across the window, decoding beyond it, and several sequences in a step."""
        paged = Paged(device, rng, heads, length=2 * window + 90, seqs=3, chunk=96, window=window)
        with paged.rig:
            first, second = window + int(rng.integers(1, 60)), int(rng.integers(1, window + 1))
            paged.prefill(first, second)
            for _ in range(3):
                paged.run([(1, Part(second, 1)), (0, Part(first, 1))])
                first, second = first + 1, second + 1
            paged.run([(0, Part(first, 9)), (2, Part(0, int(rng.integers(1, 40)))), (1, Part(second, 30))])

    @needs(WINDOWS)
    @pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
    def test_positions_behind_the_window_may_hold_anything(
        self, device: Device, rng: np.random.Generator, dtype: KVDtype
    ) -> None:
        """Blocks behind it are given to nobody, and hold NaN."""
        window, block = 40, 16
        paged = Paged(device, rng, Heads(8, 2, 64, block, dtype), length=400, seqs=2, chunk=80, window=window)
        with paged.rig:
            length = 200 + int(rng.integers(0, 40))
            paged.prefill(length)
            unused = paged.tables[1][-1]
            for new in (1, 1, 30, 1):
                gone = (length + 1 - window) // block
                paged.tables[0][:gone] = [unused] * gone
                paged.run([(0, Part(length, new))])
                length += new

    @needs(WINDOWS)
    @pytest.mark.parametrize("window", [None, 40], ids=str)
    def test_each_layer_has_its_block_table(self, device: Device, rng: np.random.Generator, window: int | None) -> None:
        """The operations take the last of three tables; the first two name the blocks of one sequence."""
        paged = Paged(device, rng, Heads(8, 2, 64, 16), length=150, seqs=3, chunk=60, window=window, tables=3)
        with paged.rig:
            paged.prefill(70, 33, 5)
            paged.run([(s, Part(past, 1)) for s, past in enumerate((70, 33, 5))])
            paged.run([(2, Part(6, 20)), (1, Part(34, 1))])

    @needs(WINDOWS)
    def test_a_long_window(self, device: Device, rng: np.random.Generator) -> None:
        """Devices that cut a long sequence into parts cut it where the window begins."""
        paged = Paged(device, rng, Heads(2, 1, 32, 32, "f32"), length=2300, seqs=1, chunk=256, window=1100)
        with paged.rig:
            for at in range(0, 2048, 256):
                paged.fill(0, Part(at, 256))
            for length in (2048, 2049):
                paged.run([(0, Part(length, 1))])
            paged.run([(0, Part(2050, 20))])

    def test_a_device_without_windows_refuses(self, device: Device) -> None:
        specs = [tensor("qkv", "f32", "M", 48), tensor("out", "f32", "M", 16)]
        capable = WINDOWS in device.info.features
        ops = [Attention("qkv", "out", 0, 1, 1, 16, window=0 if capable else 4)]
        refusal = (InvalidInputError, "its window is 0") if capable else (UnsupportedProgramError, "sliding windows")
        with pytest.raises(refusal[0], match=refusal[1]):
            Rig(device, ops, specs, limits=Limits(1), kv=KVSpec(1, 1, 16, 1))
