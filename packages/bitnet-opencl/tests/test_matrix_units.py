"""What kernels for matrix units take beyond the conformance suite's reach; a device without them runs its others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu.clc import nvidia_layers
from bitnet.core.hal import DenseMatmul, Device, Limits, SequenceStep, Step, StepLayout, run
from bitnet.core.testing import needs, oracle
from bitnet.core.testing.attention import BOUND, Heads, Paged
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.linear import Grouped, check_groups, uneven
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.rig import Rig, assert_products, assert_rel, dense, tensor, tokens
from bitnet.core.testing.whole_model import END_TO_END, LIMITS, errors_of_logits
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
        executable = device.compile(paged.rig.program)
        paged.rig.executable = executable
        paged._fill_with_nan(paged.tables[0])
        with paged.rig:
            at = 0
            for count in (64, 64, 2, 1, 1, 1):
                qkv = paged.random(count)
                executable.write("qkv", qkv)
                executable.write("out", np.full((64, h * d), np.nan, np.float32))
                step = SequenceStep(np.zeros(count, np.int32), at + count, paged.tables[0])
                run(executable, paged.rig.step([step]))
                out = executable.read("out", count)
                q, k, v = np.split(qkv.reshape(count, h + 2 * g, d), [h, h + g], axis=1)
                for i in range(count):
                    turned = [oracle.rotate(x[i], paged.cos[at + i], paged.sin[at + i], heads.style) for x in (q, k)]
                    paged.cache.put(0, at + i, turned[1], v[i])
                    exact = paged.cache.attend(0, at + i, turned[0]).reshape(1, -1)
                    assert_rel("attention", out[i : i + 1], exact, BOUND[heads.dtype])
                at += count

    @pytest.mark.parametrize(("style", "tile"), [("neox", 16), ("interleaved", 2)], ids=["whole", "split"])
    def test_a_model_of_such_heads(
        self, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, style: str, tile: int
    ) -> None:
        """Layers as one launch, attention whole and split, rows of 256 for the head, products by tiles that gate."""
        monkeypatch.setattr(nvidia_layers, "TILE", tile)
        shape = {"heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 528, "vocab": 333, "style": style}
        errors = errors_of_logits(device, TinyModel(rng, **shape), "f16")  # type: ignore[arg-type]
        assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"

    @pytest.mark.parametrize(
        "product",
        [
            Grouped(1, (37,), 384, 128),
            Grouped(1, (41, 9), 1792, 64, add=True),
            Grouped(1, (215,), 1280, 128),
            Grouped(1, (20,), 17408, 128, add=True),
            Grouped(3, (23,), 1280, 256),
            Grouped(5, (70,), 896, 128, add=True),
            Grouped(8, (50,), 2112, 32),
            Grouped(8, (33,), 9216, 128),
            Grouped(13, (150,), 320, 64, add=True),
            Grouped(35, (70,), 768, 256),
            Grouped(70, (33,), 640, 128),
            Grouped(20, (40,), 1536, 512),
        ],
        ids=str,
    )
    def test_products_of_groups(self, device: Device, rng: np.random.Generator, product: Grouped) -> None:
        """Rows, tokens and columns that fill no tile or step, with one warp a tile and with several."""
        check_groups(device, rng, product)

    def test_a_model_of_groups(self, device: Device, rng: np.random.Generator) -> None:
        """Products that norm their input, gate and add, and attention that norms heads."""
        shape: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 576, "vocab": 333}
        model = TinyModel(rng, **shape, sub_norms=False, activation="silu", group=64, head_norms=True)
        errors = errors_of_logits(device, model, "f16")
        assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"

    @needs("ptx-mma")
    def test_a_layer_of_groups_is_five_launches(self, device: Device, rng: np.random.Generator) -> None:
        """Embedding, norm, head, choice and the step's end are the other five."""
        shape: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 512, "layers": 3}
        model = TinyModel(rng, **shape, sub_norms=False, activation="silu", group=64, head_norms=True)
        executable = device.compile(model.program(LIMITS, 8, "f16"))
        try:
            step = SequenceStep(np.array([5], np.int32), 1, list(range(8)), [0])
            run(executable, Step(StepLayout(LIMITS), [step], block_size=BLOCK))
            assert "ternary_groups_mma_opencl" in executable.kernels
            assert executable.stats().dispatches == 3 * 5 + 5
        finally:
            executable.close()

    @pytest.mark.parametrize("shape", [(1, 70, 512), (11, 300, 264), (70, 40, 88)], ids=str)
    def test_heads_of_models(self, device: Device, rng: np.random.Generator, shape: tuple[int, int, int]) -> None:
        """One row, and more rows than fit a tile; their elements differ much in size."""
        m, n, k = shape
        x, weight = uneven(rng, m, k), rng.standard_normal((n, k)).astype(np.float16)
        specs = [tensor("x", "f32", "R", k), tensor("out", "f32", "R", n)]
        limits = Limits(m + 2, max_rows=m + 2)
        with Rig(device, [DenseMatmul("x", "w", "out")], specs, {"w": dense(weight)}, limits=limits) as rig:
            out = rig.run(tokens(m, range(m)), {"x": x}, ["out"])["out"]
        assert_products("out", out, x, weight)

    @needs("ptx-mma")
    def test_a_layer_is_one_launch(self, device: Device, rng: np.random.Generator) -> None:
        """Embedding, norm, head, choice and the step's end are the other five."""
        executable = device.compile(
            TinyModel(rng, heads=4, kv_heads=1, head_dim=64, layers=3).program(LIMITS, 8, "f16")
        )
        try:
            step = SequenceStep(np.array([5], np.int32), 1, list(range(8)), [0])
            run(executable, Step(StepLayout(LIMITS), [step], block_size=BLOCK))
            assert "layer_mma_opencl" in executable.kernels
            assert executable.stats().dispatches == 3 + 5
        finally:
            executable.close()
