"""What kernels for matrix units take and the conformance suite does not reach; a device without them runs its others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bitnet.core.hal import Device, SequenceStep
from bitnet.core.testing import oracle
from bitnet.core.testing.attention import BOUND, Heads, Paged
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.model import TinyModel
from bitnet.core.testing.rig import assert_rel
from bitnet.core.testing.whole_model import END_TO_END, errors_of_logits
from bitnet.opencl.backend import BACKEND


class TestMatrixUnits(DeviceTests):
    backend = BACKEND
    size = "small"

    @pytest.mark.parametrize(
        "heads",
        [Heads(4, 1, 128, 16), Heads(7, 1, 64, style="interleaved"), Heads(4, 2, 256)],
        ids=["128", "64", "256"],
    )
    def test_decoding_with_the_rotation_inside(self, device: Device, rng: np.random.Generator, heads: Heads) -> None:
        """Rotation, new entry and attention in one launch, which a program that keeps all does not get."""
        past, (h, g, d) = 130, heads[:3]
        paged = Paged(device, rng, heads, length=past + 3, seqs=1, chunk=64)
        paged.rig.executable.close()
        executable = device.compile(replace(paged.rig.program, keep=False))
        paged.rig.executable = executable
        paged._fill_with_nan(paged.tables[0])
        with paged.rig:
            at = 0
            for count in (64, 64, 2, 1, 1, 1):
                qkv = paged.random(count)
                executable.write("qkv", qkv)
                executable.write("out", np.full((64, h * d), np.nan, np.float32))
                step = SequenceStep(np.zeros(count, np.int32), at + count, paged.tables[0])
                executable.run(paged.rig.step([step]))
                out = executable.read("out", count)
                q, k, v = np.split(qkv.reshape(count, h + 2 * g, d), [h, h + g], axis=1)
                for i in range(count):
                    turned = [oracle.rotate(x[i], paged.cos[at + i], paged.sin[at + i], heads.style) for x in (q, k)]
                    paged.cache.put(0, at + i, turned[1], v[i])
                    exact = paged.cache.attend(0, at + i, turned[0]).reshape(1, -1)
                    assert_rel("attention", out[i : i + 1], exact, BOUND[heads.dtype])
                at += count

    @pytest.mark.parametrize("style", ["neox", "interleaved"])
    def test_a_model_of_such_heads(self, device: Device, rng: np.random.Generator, style: str) -> None:
        """Rows of 256 for the head of one token, and products by tiles that gate."""
        shape = {"heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 528, "vocab": 333, "style": style}
        errors = errors_of_logits(device, TinyModel(rng, **shape), "f16")  # type: ignore[arg-type]
        assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"
