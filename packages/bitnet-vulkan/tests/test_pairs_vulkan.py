"""Products for few tokens and ternary heads by pairs of invocations: odd shapes on every device that has the
instructions, and defects of their kernels that these tests catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import DeviceInfo
from bitnet.core.testing.linear import Grouped, check_groups
from bitnet.core.testing.tables import Table, check_head
from bitnet.vulkan import pipelines
from bitnet.vulkan.backend import BACKEND
from bitnet.vulkan.device import VulkanDriver
from bitnet.vulkan.driver import Instance
from bitnet.vulkan.hardware import Hardware, inspect
from bitnet.vulkan.modules import Module, module
from bitnet.vulkan.ops import VulkanOps


def able(hardware: Hardware) -> bool:
    return bool(hardware.macros["DOT"]) and hardware.subgroup >= 2


@pytest.fixture(params=["whole", "small-groups", "small-bindings"])
def opened(request: pytest.FixtureRequest, require_device: Callable[[str, str | None], None]) -> Iterator[GpuDevice]:
    device = open_device(require_device, request.param)
    yield device
    device.close()


def open_device(require_device: Callable[[str, str | None], None], kind: str) -> GpuDevice:
    result = BACKEND.probe()
    require_device("vulkan:0", None if result.devices else f"vulkan is {result.status.value}: {result.reason}")
    instance = Instance("vulkan")

    def described(info: DeviceInfo) -> Hardware:
        hardware = inspect(instance, instance.physical_devices()[int(info.index)], int(info.index))
        assert hardware is not None
        return hardware

    found = next(((info, hardware) for info in result.devices if able(hardware := described(info))), None)
    require_device("vulkan:0", None if found else "no device has subgroups and packed dot products")
    assert found is not None
    info, hardware = found
    changes: dict[str, Any] = {"small-groups": {"group": 4 * hardware.subgroup, "shared": 16 << 10}}
    changes["small-bindings"] = {"largest_binding": 64 << 10, "alignment": 256}
    hardware = replace(hardware, **changes.get(kind, {}))
    return GpuDevice(info, VulkanDriver(hardware, info.name), VulkanOps(hardware).lowering())


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


PRODUCTS = [
    Grouped(2, (1,), 128, 128),
    Grouped(3, (67, 5), 384, 64, add=True),
    Grouped(5, (131,), 4224, 128),
    Grouped(7, (33,), 768, 256, add=True),
    Grouped(8, (301,), 1152, 128, add=True),
    Grouped(4, (40,), 12544, 256),
]
HEADS = [
    Table(1, 1, 128, 128),
    Table(1, 301, 1152, 128, spare=1),
    Table(1, 133, 384, 64),
    Table(1, 129, 768, 256),
    Table(1, 70, 640, 128, spare=2),
]


def check(device: GpuDevice, rng: np.random.Generator, case: Grouped | Table) -> None:
    if isinstance(case, Table):
        check_head(device, rng, case)
    else:
        check_groups(device, rng, case)


@pytest.mark.parametrize("case", [*PRODUCTS, *HEADS], ids=str)
def test_results(opened: GpuDevice, rng: np.random.Generator, case: Grouped | Table) -> None:
    check(opened, rng, case)


ADDED, WIDE, SETS = Grouped(3, (67,), 384, 128, add=True), Grouped(8, (40,), 12544, 128), Grouped(3, (67,), 384, 64)
DEFECTS: list[tuple[str, str, str, Grouped | Table]] = [
    ("ternary_groups_few", "<= last && n < rows) store", "<= last) store", Grouped(3, (67,), 384, 128)),
    ("ternary_groups_few", "m0 + t <= last && n", "n", Grouped(11, (67,), 384, 128, add=True)),
    ("ternary_groups_few", "row_of(1)) * COUNT + next * EACH) / 2", "row_of(1)) * COUNT) / 2", ADDED),
    ("ternary_groups_few", "row_of(0)) * COUNT + unit * EACH + set)", "row_of(0)) * COUNT + unit * EACH)", SETS),
    ("ternary_groups_few", "        barrier();\n#define", "#define", ADDED),
    ("ternary_groups_few", "if (from < UNITS) barrier();", "", WIDE),
    ("ternary_groups_few", "COUNT - begin * EACH)", "COUNT)", WIDE),
    ("digits_matmul", "n0 + PAIRS < rows)", "n0 + PAIRS + 1 < rows)", Table(1, 710, 384, 128)),
    ("digits_matmul", "/ GROUP + set]", "/ GROUP]", Table(1, 40, 384, 64)),
    ("digits_matmul", "scale_at(0, next) / 2]", "scale_at(0, 0) / 2]", Table(1, 40, 640, 128)),
    (
        "table_digits",
        "    }\n    barrier();\n    for (uint i = lane",
        "    }\n    for (uint i = lane",
        Table(1, 40, 640, 128),
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect[1].strip().replace(" ", "-"))
def test_a_defect_is_caught(
    defect: tuple[str, str, str, Grouped | Table],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    require_device: Callable[[str, str | None], None],
) -> None:
    kernel, old, new, case = defect
    replaced = []

    def wrong(*given: Any) -> Module:
        made = module(*given)
        if made.entry != kernel:
            return made
        assert old in made.text
        replaced.append(made.entry)
        return replace(made, text=made.text.replace(old, new))

    monkeypatch.setattr(pipelines, "module", wrong)
    monkeypatch.setattr("bitnet.vulkan.pairs.FEW_TOKENS", 16)
    device = open_device(require_device, "whole")
    try:
        with pytest.raises(AssertionError):
            check(device, rng, case)
    finally:
        device.close()
    assert replaced
