"""Transforms with their quantisation in one dispatch, and a hybrid model's products of one token: shapes that the
conformance suite is too small for, on devices with less, and defects of the kernels that these tests catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest

from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import Device
from bitnet.core.testing.hybrid_steps import check_hybrid
from bitnet.core.testing.linear import Grouped, check_groups
from bitnet.core.testing.recurrent import check_gated
from bitnet.core.testing.transforms import Blocks, check_glu, check_norm
from bitnet.vulkan import pipelines
from bitnet.vulkan.backend import BACKEND
from bitnet.vulkan.device import VulkanDriver
from bitnet.vulkan.driver import Instance
from bitnet.vulkan.hardware import Hardware, inspect
from bitnet.vulkan.modules import Module, module
from bitnet.vulkan.ops import VulkanOps

Check: TypeAlias = Callable[[Device, np.random.Generator], None]
CHANGES: dict[str, Callable[[Hardware], Hardware]] = {
    "whole": lambda hardware: hardware,
    "no-subgroups": lambda hardware: replace(hardware, subgroup=0),
    "small-groups": lambda hardware: replace(hardware, group=256),
}


def norm(m: int, blocks: int, block: int, *, normed: bool = True) -> Check:
    return partial(check_norm, case=Blocks(m, blocks, block), normed=normed)


def glu(m: int, blocks: int, block: int) -> Check:
    return partial(check_glu, case=Blocks(m, blocks, block), activation="silu")


def gated(m: int, heads: int, head: int, *, normed: bool = True) -> Check:
    return partial(check_gated, shape=(m, heads, head), activation="silu", normed=normed)


def product(*given: Any) -> Check:
    return partial(check_groups, case=Grouped(*given))


def hybrid(shape: str) -> Check:
    return partial(check_hybrid, shape=shape)


CASES: dict[str, Check] = {
    "a part of a group": norm(1, 3, 128),
    "two turns": norm(3, 9, 128),
    "small blocks": norm(2, 64, 4, normed=False),
    "an odd power of two": norm(3, 3, 512),
    "several turns": norm(2, 5, 1024, normed=False),
    "gates and ups": glu(2, 9, 128),
    "heads": gated(3, 12, 128),
    "short heads": gated(2, 12, 32),
    "gates without norms": gated(3, 6, 64, normed=False),
}


@pytest.fixture
def opened(
    request: pytest.FixtureRequest, require_device: Callable[[str, str | None], None]
) -> Iterator[Callable[[str], GpuDevice]]:
    result, devices = BACKEND.probe(), list[GpuDevice]()
    require_device("vulkan:0", None if result.devices else f"vulkan is {result.status.value}: {result.reason}")
    info, instance = result.devices[0], Instance("vulkan")

    def made(kind: str) -> GpuDevice:
        hardware = inspect(instance, instance.physical_devices()[int(info.index)], int(info.index))
        assert hardware is not None
        hardware = CHANGES[kind](hardware)
        devices.append(GpuDevice(info, VulkanDriver(hardware, info.name), VulkanOps(hardware).lowering()))
        return devices[-1]

    yield made
    for device in devices:
        device.close()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that have been compiled since."""
    found: set[str] = set()

    def noted(*given: Any) -> Module:
        made = module(*given)
        found.add(made.label)
        return made

    monkeypatch.setattr(pipelines, "module", noted)
    return found


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("case", CASES)
def test_one_dispatch_transforms(
    opened: Callable[[str], GpuDevice], rng: np.random.Generator, used: set[str], case: str, kind: str
) -> None:
    CASES[case](opened(kind), rng)
    assert any("transform_quant" in label for label in used)
    assert not any("hadamard" in label for label in used)


def test_one_token_takes_products_that_convolve(
    opened: Callable[[str], GpuDevice], rng: np.random.Generator, used: set[str]
) -> None:
    device = opened("whole")
    if not device._driver.hardware.subgroup >= 4:  # type: ignore[attr-defined]
        pytest.skip("products of one token need subgroups")
    hybrid("transformed")(device, rng)
    assert any("ternary_groups_decode" in label and "CONV" in label for label in used)


MODEL, WIDE, ROW = hybrid("transformed"), hybrid("wide"), product(1, (67,), 1152, 128)
TURNS, HEADS = norm(2, 5, 1024), gated(3, 12, 128)
LAST = "(to + TAPS - 2) * rows + n] = value"
DEFECTS: list[tuple[str, str, str, Check]] = [
    ("transform_quant", "barrier();\n                uint low", "uint low", TURNS),
    ("transform_quant", "y *= signs[at]", "y *= signs[lane]", TURNS),
    ("transform_quant", "squares += dot(y, y);", "squares += y.x * y.x;", TURNS),
    ("transform_quant", "inside = at < QUADS;", "inside = at < QUADS - 1;", TURNS),
    ("transform_quant", "kept[row + at] = y;", "kept[at] = y;", TURNS),
    ("transform_quant", "if (2 * apart < BLOCK)", "if (true)", norm(3, 3, 512)),
    ("transform_quant", "x[2 * row + QUADS + at]", "x[2 * row + at]", glu(2, 9, 128)),
    ("transform_quant", "y *= factors[lane / SPAN];", "y *= factors[0];", HEADS),
    ("transform_quant", "x[row + quad_at(at)]", "x[row + at]", HEADS),
    ("transform_quant", "dot(y, y);\n                barrier();", "dot(y, y);", HEADS),
    ("ternary_groups_decode", "for (; s < end; s++)", "for (; s < end - 1; s++)", ROW),
    ("ternary_groups_decode", "i / 8 * 2 + i % 2] = words", "i / 8 * 2] = words", ROW),
    ("ternary_groups_decode", "if (j > 0) state[(to + j - 1)", "if (j > 0) state[(to + j)", MODEL),
    (
        "ternary_groups_decode",
        "(to + TAPS - 2) * rows + n] = value",
        "(to + TAPS - 3) * rows + n] = value",
        MODEL,
    ),
    ("ternary_groups_decode", "taps[n * TAPS + TAPS - 1] * value", "taps[n * TAPS] * value", MODEL),
    ("attention_decode", "if (d < 2 * TURNED) pair", "pair", WIDE),
    ("attention_decode", "position * TURNED + min", "position * (DIM / 2) + min", WIDE),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect[1].strip().replace(" ", "-"))
def test_a_defect_is_caught(
    defect: tuple[str, str, str, Check],
    opened: Callable[[str], GpuDevice],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, old, new, check = defect
    replaced = []

    def wrong(*given: Any) -> Module:
        made = module(*given)
        if made.entry != kernel or old not in made.text:
            return made
        replaced.append(made.entry)
        return replace(made, text=made.text.replace(old, new))

    monkeypatch.setattr(pipelines, "module", wrong)
    draws = (check(opened("whole"), rng) for _ in range(4))  # attention of a random model may hardly see a wrong angle
    with pytest.raises(AssertionError):
        list(draws)
    assert replaced
