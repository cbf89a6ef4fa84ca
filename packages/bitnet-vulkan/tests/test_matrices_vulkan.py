"""The product on cooperative matrices, as far as it can be tested where no device has them.

Its source is run with the matrices' type and functions exchanged for plain ones that do what their specification
says: places, masks, tiles and the order of barriers are those of the kernel. That it is valid SPIR-V is tested with the
other modules; which of a device's products is chosen, here.

Long, because the plain functions, in GLSL, that stand for those of the matrices serve all of its tests.
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
from bitnet.core.hal import (
    DenseMatmul,
    Limits,
    Op,
    Program,
    Sample,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    TernaryMatmul,
    run,
)
from bitnet.core.testing.attention import Heads, Paged, Part
from bitnet.core.testing.linear import Grouped, check_groups, uneven
from bitnet.core.testing.rig import (
    Rig,
    assert_products,
    assert_same_bits,
    dense,
    random_ternary,
    tensor,
    ternary,
    tokens,
)
from bitnet.vulkan import pipelines
from bitnet.vulkan.backend import BACKEND
from bitnet.vulkan.compiler import KERNELS, built, ways
from bitnet.vulkan.device import VulkanDriver
from bitnet.vulkan.driver import Instance
from bitnet.vulkan.hardware import best_tile, has_f16_product, inspect
from bitnet.vulkan.modules import COMMON, Module, module
from bitnet.vulkan.ops import VulkanOps

PLACES = """
struct Sums { TYPE e[16]; };
Sums filled(TYPE value) {
    Sums s;
    for (int i = 0; i < 16; i++) s.e[i] = value;
    return s;
}
#define EACH_OF_SUMS for (uint i = 0, m = LANE % 32 / TN, n = LANE % 32 % TN; i < TM * TN / 32; \\
    i++, m = (LANE % 32 + 32 * i) / TN, n = (LANE % 32 + 32 * i) % TN)
"""
INTEGERS = (
    """
#define TYPE int
#define gl_CooperativeMatrixLayoutRowMajor 0
#define gl_CooperativeMatrixLayoutColumnMajor 1
"""
    + PLACES
    + """
struct Part { uint at, pitch; };
int byte_of(uint at, uint k) { return bitfieldExtract(int(tile[at + k / 16][k / 4 % 4]), int(8 * (k % 4)), 8); }
Sums coopMatMulAdd(Part a, Part b, Sums s) {
    EACH_OF_SUMS
        for (uint k = 0; k < TK; k++) s.e[i] += byte_of(a.at + m * a.pitch, k) * byte_of(b.at + n * b.pitch, k);
    return s;
}
void store_sums(Sums s, uint at, uint pitch) {
    EACH_OF_SUMS tile[at + m * pitch + n / 4][n % 4] = uint(s.e[i]);
}
#define coopMatLoad(part, memory, place, stride, layout_) part = Part(place, stride)
#define coopMatStore(sums, memory, place, stride, layout_) store_sums(sums, place, stride)
"""
)
FLOATS = (
    """
#define TYPE float
#define TM 16
#define TN 16
#define gl_CooperativeMatrixLayoutRowMajor 0
#define gl_CooperativeMatrixLayoutColumnMajor 1
"""
    + PLACES
    + """
struct Left { float e[128]; };  // the rows of this invocation's sums
struct Right { uint at, pitch; int columns; };
float half_of(uint at, uint k) { return unpackHalf2x16(pool[at + k / 8][k / 2 % 4])[k % 2]; }
Sums coopMatMulAdd(Left a, Right b, Sums s) {
    EACH_OF_SUMS
        for (uint k = 0; k < 16; k++)
            s.e[i] += a.e[i * 16 + k] *
                (b.columns == 1 ? half_of(b.at + n * b.pitch, k) : half_of(b.at + k * b.pitch, n));
    return s;
}
Sums times(Sums a, Sums b) {
    for (int i = 0; i < 8; i++) a.e[i] *= b.e[i];
    return a;
}
Sums plus(Sums a, Sums b) {
    for (int i = 0; i < 8; i++) a.e[i] += b.e[i];
    return a;
}
void load_pool(out Left part, uint at, uint pitch, int columns) {
    EACH_OF_SUMS
        for (uint k = 0; k < 16; k++) part.e[i * 16 + k] = half_of(at + m * pitch, k);
}
void load_pool(out Right part, uint at, uint pitch, int columns) { part = Right(at, pitch, columns); }
void load_pool(out Sums part, uint at, uint pitch, int columns) {
    EACH_OF_SUMS part.e[i] = uintBitsToFloat(pool[at + m * pitch + n / 4][n % 4]);
}
void store_sums(Sums s, uint at, uint pitch) {
    EACH_OF_SUMS pool[at + m * pitch + n / 4][n % 4] = floatBitsToUint(s.e[i]);
}
#define coopMatLoad(part, memory, place, stride, layout_) load_##memory(part, place, stride, layout_)
#define coopMatStore(sums, memory, place, stride, layout_) store_sums(sums, place, stride)
"""
)
GROUPS = """
#define gl_CooperativeMatrixLayoutRowMajor 0
#define gl_CooperativeMatrixLayoutColumnMajor 1
struct Part { uint at, pitch; };
struct Sums { int e[16]; };
struct Totals { float e[16]; };
#define EACH_OF_SUMS for (uint i = 0, m = LANE % 32 / TN, n = LANE % 32 % TN; i < TM * TN / 32; \\
    i++, m = (LANE % 32 + 32 * i) / TN, n = (LANE % 32 + 32 * i) % TN)
Sums no_sums() {
    Sums s;
    for (int i = 0; i < 16; i++) s.e[i] = 0;
    return s;
}
Totals no_totals() {
    Totals s;
    for (int i = 0; i < 16; i++) s.e[i] = 0.0;
    return s;
}
Totals floats_of(Sums s) {
    Totals f;
    for (int i = 0; i < 16; i++) f.e[i] = float(s.e[i]);
    return f;
}
Totals times(Totals a, Totals b) {
    precise Totals c;
    for (int i = 0; i < 16; i++) c.e[i] = a.e[i] * b.e[i];
    return c;
}
Totals plus(Totals a, Totals b) {
    precise Totals c;
    for (int i = 0; i < 16; i++) c.e[i] = a.e[i] + b.e[i];
    return c;
}
int byte_of(uint at, uint k) { return bitfieldExtract(int(tile[at + k / 16][k / 4 % 4]), int(8 * (k % 4)), 8); }
Sums coopMatMulAdd(Part a, Part b, Sums s) {
    EACH_OF_SUMS
        for (uint k = 0; k < TK; k++) s.e[i] += byte_of(a.at + m * a.pitch, k) * byte_of(b.at + n * b.pitch, k);
    return s;
}
void load_tile(out Part part, uint at, uint pitch) { part = Part(at, pitch); }
void load_units(out Totals part, uint at, uint pitch) { EACH_OF_SUMS part.e[i] = units[at + m * pitch + n / 4][n % 4]; }
void store_terms(Totals s, uint at, uint pitch) { EACH_OF_SUMS terms[at + m * pitch + n / 4][n % 4] = s.e[i]; }
void store_tile(Totals s, uint at, uint pitch) {
    EACH_OF_SUMS tile[at + m * pitch + n / 4][n % 4] = floatBitsToUint(s.e[i]);
}
#define coopMatLoad(part, memory, place, stride, layout_) load_##memory(part, place, stride)
#define coopMatStore(sums, memory, place, stride, layout_) store_##memory(sums, place, stride)
"""
SUBGROUP = {
    "gl_SubgroupID": "uint(LANE / 32)",
}
HALVES = {
    "SUMS(0.0)": "filled(0.0)",
    "TOTAL(a, b) ((a) + (b))": "TOTAL(a, b) plus(a, b)",
    "coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>": "Sums",
    "coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>": "Left",
    "coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>": "Right",
}
TYPES = {
    "ternary_mma": {
        **SUBGROUP,
        "SUMS(0)": "filled(0)",
        "coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>": "Sums",
        "coopmat<int8_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB>": "Part",
        "coopmat<int8_t, gl_ScopeSubgroup, TM, TK, gl_MatrixUseA>": "Part",
        "uvec4 x_at(": INTEGERS + "\nuvec4 x_at(",
    },
    "ternary_groups_mma": {
        **SUBGROUP,
        "coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>": "Sums",
        "coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>": "Totals",
        "SUMS(0)": "no_sums()",
        "TOTALS(0.0)": "no_totals()",
        "FLOATS_OF(sums) TOTALS(sums)": "FLOATS_OF(sums) floats_of(sums)",
        "PRODUCT(a, b) ((a) * (b))": "PRODUCT(a, b) times(a, b)",
        "TOTAL(a, b) ((a) + (b))": "TOTAL(a, b) plus(a, b)",
        "coopmat<int8_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB>": "Part",
        "coopmat<int8_t, gl_ScopeSubgroup, TM, TK, gl_MatrixUseA>": "Part",
        "uvec4 x_at(": GROUPS + "\nuvec4 x_at(",
    },
    "dense_mma": {**SUBGROUP, **HALVES, "KERNEL(dense_mma)": FLOATS + "KERNEL(dense_mma)"},
    "head_choose": {**SUBGROUP, **HALVES, "uvec2 scored(uint count) {": FLOATS + "uvec2 scored(uint count) {"},
    "attention_mma": {
        **SUBGROUP,
        **HALVES,
        "gl_SubgroupInvocationID": "(LANE % 32)",
        "subgroupBarrier()": "barrier()",
        "subgroupMemoryBarrierShared()": "memoryBarrierShared()",
        "PRODUCT(a, b) ((a) * (b))": "PRODUCT(a, b) times(a, b)",
        "subgroupShuffleXor(largest, 1)": "neighbours(largest)",
        "subgroupShuffleXor(total, 1)": "neighbours(total)",
        "KERNEL(attention_mma)": FLOATS
        + """
void load_factors(out Sums part, uint at, uint pitch, int columns) {
    EACH_OF_SUMS part.e[i] = factors[at + m * pitch + n / 4][n % 4];
}
shared float beside[256];
float neighbours(float value) {
    barrier();
    beside[LANE] = value;
    barrier();
    return beside[LANE ^ 1];
}
KERNEL(attention_mma)""",
    },
}


def plain(folder: Path, file: str, entry: str, features: Any) -> Module:
    """A kernel's module; that of a kernel on matrices with plain types."""
    made = module(folder, file, entry, features)
    if entry not in TYPES or not features.get("MATRICES", 1):  # as of one token, which is recorded first, and not run
        return made
    common = (folder / COMMON).read_text(encoding="utf-8")
    source = made.text.removeprefix(common)
    for given, exchanged in TYPES[entry].items():
        assert given in source
        source = source.replace(given, exchanged)
    assert "coopmat<" not in source
    macros = ((f"ENTRY_{entry}", 1), ("SUBGROUPS", 0), ("DOT", 0), ("MATRICES", 1))
    return replace(made, text=common.replace("COOPMAT || MATRICES", "COOPMAT") + source, macros=macros)


@pytest.fixture
def hardware(require_device: Callable[[str, str | None], None]) -> Any:
    result = BACKEND.probe()
    require_device("vulkan:0", None if result.devices else f"vulkan is {result.status.value}: {result.reason}")
    compilers = [way for way in ways().found if way.spirv is not built]
    require_device("vulkan:0", None if compilers else "there is no compiler for the exchanged source")
    return result.devices[0]


def opened(info: Any, memory: int, **able: Any) -> GpuDevice:
    """The device, taken to have subgroups of 32 and what else is said."""
    real = inspect(instance := Instance("vulkan"), instance.physical_devices()[int(info.index)], int(info.index))
    assert real is not None
    if real.group < 256 or real.shared < memory:
        pytest.skip("the device's work-groups are too small for the kernel")
    change = {"int8_tile": None, "f16_product": False, "subgroup": 32, **able}
    driver = VulkanDriver(real, info.name)
    return GpuDevice(info, driver, VulkanOps(replace(real, **change)).lowering())


@pytest.mark.parametrize(
    ("tile", "count", "rows", "columns", "add"),
    [
        ((16, 16, 32), 2, 30, 1040, True),
        ((16, 16, 32), 9, 130, 144, False),
        ((16, 16, 32), 17, 130, 400, True),
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
    monkeypatch.setattr("bitnet.vulkan.matrices.ENOUGH_MATRICES", 4)  # so that all sizes of work-groups are met
    device = opened(hardware, 32 << 10, int8_tile=tile)
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


@pytest.mark.parametrize(
    ("tile", "product"),
    [
        ((16, 16, 32), Grouped(9, (37,), 1152, 128, add=True)),
        ((16, 16, 32), Grouped(12, (70,), 1344, 64)),
        ((16, 16, 32), Grouped(16, (33,), 768, 256, add=True)),
        ((16, 16, 32), Grouped(11, (40,), 480, 32)),
        ((16, 16, 32), Grouped(30, (70, 9), 896, 128)),
        ((16, 16, 32), Grouped(70, (140,), 320, 64, add=True)),
        ((16, 16, 32), Grouped(130, (264,), 384, 128)),
        ((16, 16, 32), Grouped(200, (300,), 400, 400)),
        ((16, 8, 32), Grouped(65, (130,), 512, 256)),
        ((8, 16, 64), Grouped(70, (140,), 640, 128)),
        ((16, 16, 16), Grouped(33, (131,), 160, 32, add=True)),
    ],
    ids=str,
)
def test_the_product_of_groups_is_exact(
    hardware: Any, monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int, int], product: Grouped
) -> None:
    monkeypatch.setattr(pipelines, "module", plain)
    monkeypatch.setattr("bitnet.vulkan.matrices.ENOUGH_MATRICES", 4)
    device = opened(hardware, 32 << 10, int8_tile=tile, shared=48 << 10)
    try:
        check_groups(device, np.random.default_rng(), product)
    finally:
        device.close()


@pytest.mark.parametrize(
    ("old", "new", "product"),
    [
        (" * SETS + set % SETS;", " * SETS;", Grouped(40, (70,), 320, 64)),
        ("if (WK > 1) {\n            barrier();", "if (WK > 1) {", Grouped(9, (37,), 640, 128)),
        ("if (round * WK * SETS + g < COUNT) sum", "if (g == 0) sum", Grouped(9, (37,), 640, 128)),
        (
            "m < STEP_TOKENS && n < rows) store(m, n, uint",
            "n < rows) store(m, n, uint",
            Grouped(40, (70,), 256, 128, add=True),
        ),
    ],
    ids=["scale", "barrier", "terms", "tokens"],
)
def test_a_defect_of_the_product_of_groups_is_caught(
    hardware: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str, product: Grouped
) -> None:
    def wrong(*given: Any) -> Module:
        made = plain(*given)
        if made.entry != "ternary_groups_mma":
            return made
        assert old in made.text
        return replace(made, text=made.text.replace(old, new))

    monkeypatch.setattr(pipelines, "module", wrong)
    monkeypatch.setattr("bitnet.vulkan.matrices.ENOUGH_MATRICES", 4)
    device = opened(hardware, 32 << 10, int8_tile=(16, 16, 32), shared=48 << 10)
    try:
        with pytest.raises(AssertionError):
            check_groups(device, np.random.default_rng(), product)
    finally:
        device.close()


@pytest.mark.parametrize(
    ("heads", "parts"),
    [
        (Heads(4, 2, 32, 16), ((0, Part(0, 100)), (1, Part(0, 1)))),
        (Heads(2, 1, 32, 32), ((1, Part(0, 5)), (0, Part(0, 64)), (2, Part(0, 70)))),
        *((Heads(2, 1, dim, 16), ((0, Part(0, 70)),)) for dim in (16, 48, 80)),
    ],
)
def test_attention_is_within_its_bound(
    hardware: Any, monkeypatch: pytest.MonkeyPatch, heads: Heads, parts: tuple[tuple[int, Part], ...]
) -> None:
    """Tiles that end within a chunk and behind it, of several sequences, and a later step over what is in the cache."""
    monkeypatch.setattr(pipelines, "module", plain)
    device = opened(hardware, 32 << 10, f16_product=True, shared=46 << 10)
    try:
        paged = Paged(device, np.random.default_rng(), heads, length=200, seqs=3, chunk=150)
        with paged.rig:
            paged.run(parts)
            assert "attention_mma_vulkan" in paged.rig.executable.kernels
            paged.run([(s, Part(part.new, 33)) for s, part in parts])
    finally:
        device.close()


@pytest.mark.parametrize(("count", "rows", "columns"), [(2, 130, 64), (19, 300, 144), (70, 129, 80)])
def test_the_head_is_within_its_bound(
    hardware: Any, monkeypatch: pytest.MonkeyPatch, count: int, rows: int, columns: int
) -> None:
    """Rows of which each has its own magnitude."""
    rng = np.random.default_rng()
    monkeypatch.setattr(pipelines, "module", plain)
    device = opened(hardware, 32 << 10, f16_product=True, shared=46 << 10)
    x, weight = uneven(rng, count, columns), rng.standard_normal((rows, columns)).astype(np.float16)
    specs = [tensor("x", "f32", "R", columns), tensor("out", "f32", "R", rows)]
    limits = Limits(count, max_rows=count)
    try:
        with Rig(device, [DenseMatmul("x", "w", "out")], specs, {"w": dense(weight)}, limits=limits) as rig:
            out = rig.run(tokens(count, range(count)), {"x": x}, ["out"])["out"]
            assert "dense_mma_vulkan" in rig.executable.kernels
    finally:
        device.close()
    assert_products("out", out, x, weight)


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_tokens_without_logits(hardware: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """They are those of the logits, where twins of rows differ by little and where many rows are in doubt."""
    rng = np.random.default_rng()
    monkeypatch.setattr(pipelines, "module", plain)
    monkeypatch.setattr(
        "bitnet.vulkan.head.SCORE_LANES", 8
    )  # at most a subgroup of the device, which is no matrix unit's
    device = opened(hardware, 32 << 10, f16_product=True, shared=46 << 10)
    vocabulary, width = 2300, 320
    w = rng.standard_normal((vocabulary, width)).astype(np.float16) / 50
    w[1::2] = w[::2]
    w[1::2, rng.integers(width)] += np.float16(1e-4)
    specs = [tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
    ops: list[Op] = [DenseMatmul("x", "w", "logits"), Sample("logits", "out")]
    limits = Limits(rows, rows, rows)
    try:
        executable = device.compile(Program(ops, {s.name: s for s in specs}, {"w": dense(w)}, limits, name="head"))
        for temperature in (0.0, 0.0, 1.0, 0.7):
            x = rng.standard_normal((rows, width)).astype(np.float32)
            x[0] = w[7] * 3  # a clear winner; the others are in doubt with hundreds
            sampling = SamplingParams(temperature, seed=int(rng.integers(1 << 30)))
            steps = [SequenceStep([0], at + 1, rows=[0], sampling=sampling) for at in range(rows)]
            executable.write("x", x)
            said = [
                run(executable, Step(StepLayout(limits), steps, logits=logits))[0].tolist() for logits in (False, True)
            ]
            assert said[0] == said[1]
        assert {"head_choose_vulkan", "dense_mma_vulkan"} <= {*executable.kernels}
    finally:
        device.close()


def kind(m: int, n: int, k: int, types: tuple[int, int, int, int] = (3, 3, 5, 5), **other: int) -> SimpleNamespace:
    """A ``VkCooperativeMatrixPropertiesKHR``."""
    a, b, c, result = types
    sizes = {"MSize": m, "NSize": n, "KSize": k, "AType": a, "BType": b, "CType": c, "ResultType": result}
    return SimpleNamespace(**sizes | {"saturatingAccumulation": 0, "scope": 3} | other)


def test_which_product_is_taken() -> None:
    """The largest of int8 with int32 sums in a subgroup that the kernel's tiles can be cut into."""
    f16 = kind(16, 16, 16, (0, 0, 0, 0))
    saturating, of_a_group = kind(16, 16, 64, saturatingAccumulation=1), kind(16, 16, 64, scope=2)
    unsigned, too_large = kind(16, 16, 64, (7, 7, 9, 9)), kind(32, 32, 32)
    refused = [f16, saturating, of_a_group, unsigned, too_large, kind(12, 16, 32)]
    assert best_tile(refused) is None
    assert best_tile([*refused, kind(16, 8, 32), kind(16, 16, 32), kind(8, 8, 16)]) == (16, 16, 32)
    assert not has_f16_product([*refused, kind(16, 16, 16), kind(16, 16, 8, (0, 0, 1, 1))])
    assert has_f16_product([*refused, kind(16, 16, 16, (0, 0, 1, 1))])


def test_the_kernel_is_in_the_sources() -> None:
    assert module(KERNELS, "ternary_mma", "ternary_mma", {}).macros[1:] == (("COOPMAT", 1), ("SUBGROUPS", 1))
