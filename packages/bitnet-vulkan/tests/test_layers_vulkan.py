"""A layer of a step of one token as one dispatch: on NVIDIA's driver as it is, elsewhere with a single work-group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest

from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import KVDtype, Limits, SequenceStep, Step, StepLayout, run
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.whole_model import END_TO_END, errors_of_logits
from bitnet.vulkan import pipelines
from bitnet.vulkan.backend import BACKEND
from bitnet.vulkan.device import VulkanDriver
from bitnet.vulkan.driver import Instance
from bitnet.vulkan.hardware import Hardware, inspect
from bitnet.vulkan.layers import GROUP, MIN_LANES
from bitnet.vulkan.modules import Module, module
from bitnet.vulkan.ops import VulkanOps

Twins: TypeAlias = list[GpuDevice]
LIMITS = Limits(max_tokens=32, max_seqs=2, max_rows=2, max_blocks=40)


def able(hardware: Hardware) -> bool:
    """Whether a work-group of the kernel runs there, be it alone."""
    return bool(hardware.macros["DOT"]) and hardware.group >= GROUP and hardware.subgroup >= MIN_LANES


@pytest.fixture
def opened(require_device: Callable[[str, str | None], None]) -> Any:
    """A device that does layers in one dispatch, its twin that does not, and one without subgroups."""
    result = BACKEND.probe()
    require_device("vulkan:0", None if result.devices else f"vulkan is {result.status.value}: {result.reason}")
    instance, devices = Instance("vulkan"), []
    for info in result.devices:
        hardware = inspect(instance, instance.physical_devices()[int(info.index)], int(info.index))
        assert hardware is not None
        if able(hardware):
            changes: list[dict[str, Any]] = [{"processors": hardware.processors or 1}, {"processors": 0}]
            for change in (*changes, {"processors": 0, "subgroup": 0}):
                changed = replace(hardware, **change)
                device = GpuDevice(info, VulkanDriver(changed, info.name), VulkanOps(changed).lowering())
                devices.append(device)
            break
    else:
        require_device("vulkan:0", "no device takes the kernel's work-groups")
    yield devices
    for device in devices:
        device.close()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


QWEN3: dict[str, Any] = {"head_dim": 32, "activation": "silu", "sub_norms": False, "head_norms": True}
SHAPES: list[tuple[dict[str, Any], Literal["f32", "f16"]]] = [
    ({"heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 528}, "f16"),
    ({"heads": 6, "kv_heads": 2, "head_dim": 32, "style": "interleaved", "activation": "silu"}, "f32"),
    ({"heads": 3, "kv_heads": 3, "head_dim": 32, "sub_norms": False, "ffn": 260}, "f16"),
]
shapes = pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=["wide", "f32", "plain"])


@shapes
def test_models(opened: Twins, rng: np.random.Generator, shape: dict[str, Any], dtype: Literal["f32", "f16"]) -> None:
    errors = errors_of_logits(opened[0], TinyModel(rng, layers=2, **shape), dtype)
    assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"


@shapes
def test_over_many_positions(
    opened: Twins, rng: np.random.Generator, shape: dict[str, Any], dtype: Literal["f32", "f16"]
) -> None:
    """A context of several parts: the logits of five dispatches a layer; and it is one."""
    model = TinyModel(rng, layers=3, **shape)
    made, text, blocks = model.program(LIMITS, 40, dtype), rng.choice(model.calm(), 170), list(range(40))
    found = []
    for device, dispatches in zip(opened[:2], (3, 3 * 5), strict=True):
        executable = device.compile(made)
        logits = []
        for at in (*range(0, 160, 32), *range(160, 170)):
            ids = text[at : at + 32] if at < 160 else text[at : at + 1]
            step = SequenceStep(ids.astype(np.int32), at + len(ids), blocks, [len(ids) - 1])
            run(executable, Step(StepLayout(LIMITS), [step], block_size=BLOCK))
            logits.append(executable.read("logits", 1)[0])
        assert ("decode_layer_vulkan" in executable.kernels) == (dispatches == 3)
        assert executable.stats().dispatches == dispatches + 5
        executable.close()
        found.append(np.stack(logits[5:]))
    assert np.max(abs(found[0] - found[1]) / abs(found[1]).max(axis=1, keepdims=True)) <= END_TO_END


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_two_sequences_whose_heads_are_normed(
    opened: Twins, rng: np.random.Generator, dtype: KVDtype, style: Literal["neox", "interleaved"]
) -> None:
    """Attention normalises and rotates heads, of each of several tokens, and appends to the cache."""
    model = TinyModel(rng, layers=2, heads=6, kv_heads=2, style=style, **QWEN3)
    texts = rng.choice(model.calm(), (2, 12)).astype(np.int32)
    exact = [model.logits(text, dtype) for text in texts]
    for device in opened[1:]:
        executable, layout = device.compile(model.program(LIMITS, 2, dtype)), StepLayout(LIMITS)
        for at in range(texts.shape[1]):
            parts = [SequenceStep(text[at : at + 1], at + 1, [1 - i], [0]) for i, text in enumerate(texts)]
            run(executable, Step(layout, parts, block_size=BLOCK))
            for found, rows in zip(executable.read("logits", 2), exact, strict=True):
                assert np.max(abs(found - rows[at])) <= END_TO_END * np.max(abs(rows[at]))
        assert not {"rope_append_vulkan", "head_norms_vulkan"} & {*executable.kernels}
        executable.close()


@pytest.mark.nightly
def test_a_sum_for_a_mean_is_caught(opened: Twins, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that attention normalises by another number."""
    made: list[Module] = []

    def wrong(*given: Any) -> Module:
        right = module(*given)
        if right.entry != "attention_decode":
            return right
        made.append(replace(right, text=right.text.replace("squares / float(DIM)", "squares")))
        return made[-1]

    monkeypatch.setattr(pipelines, "module", wrong)
    model = TinyModel(rng, layers=1, heads=12, kv_heads=4, ffn=640, group=128, **QWEN3)
    errors = errors_of_logits(opened[1], model, "f16")
    assert any("squares + head_eps" in wronged.text for wronged in made)
    assert not np.max(errors) <= END_TO_END
