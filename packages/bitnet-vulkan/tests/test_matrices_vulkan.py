"""The product on cooperative matrices, as far as it can be tested where no device has them.

Its source is run with the matrices' type and functions exchanged for plain ones that do what their specification
says: places, masks, tiles and the order of barriers are those of the kernel. That it is valid SPIR-V is tested with the
other modules; which of a device's products is chosen, here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import Limits, TernaryMatmul
from bitnet.core.testing.rig import Rig, assert_same_bits, random_ternary, tensor, ternary, tokens
from bitnet.vulkan import pipelines
from bitnet.vulkan.backend import BACKEND
from bitnet.vulkan.compiler import KERNELS
from bitnet.vulkan.device import VulkanDriver
from bitnet.vulkan.driver import Instance
from bitnet.vulkan.hardware import best_tile, inspect
from bitnet.vulkan.modules import COMMON, Module, module
from bitnet.vulkan.ops import VulkanOps

PLAIN = """
struct Sums { int e[16]; };
struct Part { uint at, pitch; };
Sums zero() {
    Sums s;
    for (int i = 0; i < 16; i++) s.e[i] = 0;
    return s;
}
int byte_of(uint at, uint k) { return bitfieldExtract(int(tile[at + k / 16][k / 4 % 4]), int(8 * (k % 4)), 8); }
Sums coopMatMulAdd(Part a, Part b, Sums s) {
    for (uint i = 0; i < TM * TN / 32; i++) {
        uint m = (LANE % 32 + 32 * i) / TN, n = (LANE % 32 + 32 * i) % TN;
        for (uint k = 0; k < TK; k++) s.e[i] += byte_of(a.at + m * a.pitch, k) * byte_of(b.at + n * b.pitch, k);
    }
    return s;
}
void store_sums(Sums s, uint at, uint pitch) {
    for (uint i = 0; i < TM * TN / 32; i++) {
        uint m = (LANE % 32 + 32 * i) / TN, n = (LANE % 32 + 32 * i) % TN;
        tile[at + m * pitch + n / 4][n % 4] = uint(s.e[i]);
    }
}
#define coopMatLoad(part, memory, place, stride, layout_) part = Part(place, stride)
#define coopMatStore(sums, memory, place, stride, layout_) store_sums(sums, place, stride)
"""
TYPES = {
    "coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0)": "zero()",
    "coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>": "Sums",
    "coopmat<int8_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB>": "Part",
    "coopmat<int8_t, gl_ScopeSubgroup, TM, TK, gl_MatrixUseA>": "Part",
    "gl_SubgroupInvocationID": "(LANE % 32)",
    "gl_SubgroupID": "uint(LANE / 32)",
    "gl_SubgroupSize": "32",
    "subgroupBarrier()": "barrier()",
    "subgroupMemoryBarrierShared()": "memoryBarrierShared()",
    "uvec4 x_at(": PLAIN + "\nuvec4 x_at(",
}


def plain(folder: Path, file: str, entry: str, features: Any) -> Module:
    """A kernel's module; that of the product with plain types."""
    made = module(folder, file, entry, features)
    if entry != "ternary_mma":  # of one token, which is recorded first, and not run
        return made
    common = (folder / COMMON).read_text(encoding="utf-8")
    source = made.text.removeprefix(common)
    for given, exchanged in TYPES.items():
        assert given in source
        source = source.replace(given, exchanged)
    assert "coopmat<" not in source
    return replace(made, text=common + source, macros=(("ENTRY_ternary_mma", 1), ("SUBGROUPS", 0), ("DOT", 0)))


@pytest.fixture
def hardware(require_device: Callable[[str, str | None], None]) -> Any:
    result = BACKEND.probe()
    require_device("vulkan:0", None if result.devices else f"vulkan is {result.status.value}: {result.reason}")
    return result.devices[0]


@pytest.mark.parametrize(
    ("tile", "count", "rows", "columns", "add"),
    [
        ((16, 16, 32), 9, 130, 144, False),
        ((16, 16, 32), 65, 128, 256, True),
        ((16, 16, 32), 200, 300, 400, False),
        ((16, 16, 32), 130, 516, 16, True),
        ((16, 8, 32), 65, 128, 256, True),
        ((8, 16, 64), 70, 140, 272, False),
        ((16, 16, 16), 33, 131, 160, True),
    ],
)
def test_the_product_is_exact(
    hardware: Any,
    monkeypatch: pytest.MonkeyPatch,
    tile: tuple[int, int, int],
    count: int,
    rows: int,
    columns: int,
    add: bool,
) -> None:
    rng = np.random.default_rng()
    monkeypatch.setattr(pipelines, "module", plain)
    monkeypatch.setattr("bitnet.vulkan.ops.ENOUGH_GROUPS", 4)  # so that both sizes of work-group are met
    instance = Instance("vulkan")
    real = inspect(instance, instance.physical_devices()[int(hardware.index)], int(hardware.index))
    assert real is not None
    if real.group < 256 or real.shared < 28 << 10:
        pytest.skip("the device's work-groups are too small for the kernel")
    driver = VulkanDriver(real, "vulkan:0")
    device = GpuDevice(hardware, driver, VulkanOps(replace(real, int8_tile=tile, subgroup=32)).lowering())
    x = rng.integers(-128, 128, (count, columns), np.int8)
    scale, w = rng.random(count, np.float32), random_ternary(rng, rows, columns)
    before = rng.standard_normal((count, rows), np.float32)
    specs = tensor("x", "i8", "M", columns), tensor("s", "f32", "M"), tensor("out", "f32", "M", rows)
    try:
        op = TernaryMatmul("x", "s", ("w",), "out", add=add)
        with Rig(device, [op], specs, {"w": ternary(w, 0.37)}, limits=Limits(max_tokens=256)) as rig:
            inputs = {"x": x, "s": scale, **({"out": before} if add else {})}
            out = rig.run(tokens(count), inputs, ["out"])["out"]
            assert rig.executable.kernels == ("ternary_mma_vulkan",)
    finally:
        device.close()
    sums = (x.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32)
    exact = sums * (scale[:, None] * np.float32(0.37))
    assert_same_bits("the product", out, before + exact if add else exact)


def kind(m: int, n: int, k: int, types: tuple[int, int, int, int] = (3, 3, 5, 5), **other: int) -> SimpleNamespace:
    a, b, c, result = types
    sizes = {"MSize": m, "NSize": n, "KSize": k, "AType": a, "BType": b, "CType": c, "ResultType": result}
    return SimpleNamespace(**{"scope": 3, "saturatingAccumulation": 0, **sizes, **other})


def test_which_product_is_taken() -> None:
    """The largest of int8 with int32 sums in a subgroup that the kernel's tiles can be cut into."""
    f16 = kind(16, 16, 16, (0, 0, 1, 1))
    saturating, of_a_group = kind(16, 16, 64, saturatingAccumulation=1), kind(16, 16, 64, scope=2)
    unsigned, too_large = kind(16, 16, 64, (7, 7, 9, 9)), kind(32, 32, 32)
    refused = [f16, saturating, of_a_group, unsigned, too_large, kind(12, 16, 32)]
    assert best_tile(refused) is None
    assert best_tile([*refused, kind(16, 8, 32), kind(16, 16, 32), kind(8, 8, 16)]) == (16, 16, 32)


def test_the_kernel_is_in_the_sources() -> None:
    assert module(KERNELS, "ternary_mma", "ternary_mma", {}).macros[1:] == (("COOPMAT", 1), ("SUBGROUPS", 1))
