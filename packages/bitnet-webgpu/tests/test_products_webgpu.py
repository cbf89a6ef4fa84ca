"""Products of weights with scales of groups, and fused steps of several sequences, with each choice of a workgroup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu import GpuDevice
from bitnet.core.gpu.ops.group_products import GroupProducts
from bitnet.core.hal import (
    Limits,
    OpenOptions,
    ProbeStatus,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing.linear import Grouped, check_groups, check_quantised
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.whole_model import END_TO_END
from bitnet.webgpu import ops, products
from bitnet.webgpu.backend import BACKEND

pytest.importorskip("wgpu")


@pytest.fixture(scope="module")
def opened() -> Iterator[GpuDevice | None]:
    result = BACKEND.probe()
    device = BACKEND.open(result.devices[0], OpenOptions()) if result.status is ProbeStatus.OK else None
    assert device is None or isinstance(device, GpuDevice)
    yield device
    if device:
        device.close()


@pytest.fixture
def device(opened: GpuDevice | None, require_device: Callable[[str, str | None], None]) -> GpuDevice:
    require_device("webgpu:0", None if opened else "there is no WebGPU device")
    assert opened
    return opened


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def refuse(*_: object) -> None:
    raise AssertionError("a plain kernel was chosen")


@pytest.mark.parametrize("case", [
    Grouped(1, (35,), 128, 64),
    Grouped(2, (7, 33), 320, 64, add=True),
    Grouped(3, (70,), 384, 128),
    Grouped(5, (65, 1), 768, 256),
    Grouped(8, (33,), 2304, 128, add=True),
    Grouped(7, (40,), 1120, 32),
    Grouped(9, (66,), 1216, 64),
    Grouped(19, (131,), 640, 128, add=True),
    Grouped(32, (31,), 768, 256),
])  # fmt: skip
def test_few_tokens(
    device: GpuDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: Grouped
) -> None:
    """Rows and columns that fill no workgroup, and tokens of several of them."""
    monkeypatch.setattr(GroupProducts, "lower", refuse)
    check_groups(device, rng, case)


@pytest.mark.parametrize("tile", [*products.LARGE_TILES, products.SMALL_TILES[1]], ids=str)
@pytest.mark.parametrize("case", [
    Grouped(33, (130,), 320, 64, add=True),
    Grouped(65, (3, 140), 384, 128),
    Grouped(70, (129,), 768, 256, add=True),
    Grouped(64, (128,), 224, 32),
])  # fmt: skip
def test_many_tokens(
    device: GpuDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tile: products.Tile, case: Grouped
) -> None:
    monkeypatch.setattr(GroupProducts, "lower", refuse)
    monkeypatch.setattr(products, "LARGE_TILES", ())
    monkeypatch.setattr(products, "SMALL_TILES", (tile, tile))
    check_groups(device, rng, case)


@pytest.mark.parametrize("case", [
    Grouped(1, (37,), 128, 64, add=True),
    Grouped(1, (33,), 320, 64),
    Grouped(1, (70,), 2176, 128, add=True),
    Grouped(1, (17,), 4352, 256),
    Grouped(1, (9,), 9216, 64, add=True),
])  # fmt: skip
def test_one_token_that_is_quantised(device: GpuDevice, rng: np.random.Generator, case: Grouped) -> None:
    assert check_quantised(device, rng, case) == ("ternary_groups_decode_webgpu",)


MODELS: dict[str, dict[str, Any]] = {
    "bitnet": {},
    "groups": {"sub_norms": False, "activation": "silu", "ffn": 256, "group": 64, "head_norms": True},
    "interleaved": {"style": "interleaved", "heads": 6, "kv_heads": 3, "head_dim": 20, "ffn": 260},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "parts"])
def test_several_sequences_of_one_token(
    device: GpuDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, split: bool
) -> None:
    """Sequences of different lengths: their tokens are rotated in attention, whose parts their quantisation merges."""
    monkeypatch.setattr(ops, "SPLIT_CONTEXT", 16 if split else 4096)
    limits, lengths = Limits(64, 3, 3, 8), (47, 1, 30)
    model = TinyModel(rng, **MODELS[kind])
    texts = [rng.choice(model.calm(), n + 3).astype(np.int32) for n in lengths]
    tables = [[4, 1, 6, 0], [2], [7, 3, 5]]
    # Embedding; norm, qkv, attention, norm, o, norm, gate and up, activation, down; norm, head, draw, advance.
    dispatches = 1 + 2 * (9 + model.head_norms) + 4
    executable, layout = device.compile(model.program(limits, 8)), StepLayout(limits)
    try:
        prompts = (SequenceStep(t[:n], n, b) for t, n, b in zip(texts, lengths, tables, strict=True))
        for prompt in prompts:
            run(executable, Step(layout, [prompt], block_size=BLOCK))
        for at in range(3):
            fed = [
                SequenceStep(t[n + at : n + at + 1], n + at + 1, b, [0])
                for t, n, b in zip(texts, lengths, tables, strict=True)
            ]
            run(executable, Step(layout, fed, block_size=BLOCK))
            assert executable.stats().dispatches == dispatches
            exact = np.stack([model.logits(t, "f16")[n + at] for t, n in zip(texts, lengths, strict=True)])
            errors = abs(executable.read("logits", 3) - exact).max(axis=1) / abs(exact).max(axis=1)
            assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"
    finally:
        executable.close()
