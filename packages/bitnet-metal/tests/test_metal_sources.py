"""Metal takes the sources, as far as can be told without Apple's compiler; and faults put in on purpose are found."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from metal_check import parameter_problems, problems
from metal_compile import CompileError, check_spaces, preprocessed
from metal_steps import INCLUDED, KERNELS, OWN, source

FILES = sorted(path.stem for path in KERNELS.glob("*.metal"))
BASE = {
    "WG": 64, "WEIGHT_F16": 1, "KV_F16": 1, "DIM": 64, "BLOCK": 16, "NORM": 1, "RELU2": 1, "COLS": 320, "ROW_BYTES": 96,
    "TOKENS": 2, "INPUT": 0, "GLU": 1, "ADD": 0, "LANES": 32, "EACH": 2, "HEAD_GROUP": 4, "ROPE": 1, "NEOX": 1,
    "TX": 16, "TY": 16, "EACH_M": 2, "GROUP": 64, "HELD": 2, "TAPS": 4, "D_K": 20, "D_V": 36, "HEADS": 4, "K_HEADS": 2,
    "TILED": 1, "COLUMNS": 32, "PARTS": 8, "HEAD": 64, "SILU": 1, "UNTILE": 2, "SIGNS": 1, "ROWS": 1,
    "EXPERTS": 40, "NORMS_LAST": 1, "GELU": 0,
}  # fmt: skip
OTHER = {
    "WEIGHT_F16": 0,
    "KV_F16": 0,
    "NORM": 0,
    "RELU2": 0,
    "NORMS_LAST": 0,
    "GELU": 1,
    "TOKENS": 1,
    "INPUT": 2,
    "GLU": 0,
    "ADD": 1,
    "LANES": 16,
    "ROPE": 0,
    "TILED": 0,
    "SILU": 0,
    "UNTILE": 0,
    "SIGNS": 0,
    "ROWS": 0,
}


def defines(file: str, changed: Mapping[str, int]) -> list[str]:
    """Constants for a file, without those that it defines itself."""
    own = set(re.findall(r"^#define (\w+)", source(file), re.MULTILINE)) - {"WG", "EACH"}
    return [f"{name}={value}" for name, value in {**BASE, **changed}.items() if name not in own]


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_wrong_as_written(file: str) -> None:
    assert problems((KERNELS / f"{file}.metal").read_text(encoding="utf-8")) == []


@pytest.mark.nightly(unless_changed=OWN)
@pytest.mark.parametrize("changed", [{}, OTHER])
@pytest.mark.parametrize("file", [file for file in FILES if file not in INCLUDED])
def test_kernels_compile_with_address_spaces(file: str, changed: Mapping[str, int]) -> None:
    constants = defines(file, changed)
    check_spaces(source(file), constants)
    assert parameter_problems(preprocessed(source(file), constants)) == []


GOOD = """#include <metal_stdlib>
using namespace metal;
constant float table[2] = {1.0f, 2.0f};
struct Pair {
    float a, b;
};
inline float twice(thread const Pair &p, device const float *x) { return 2.0f * p.a * x[0] + table[1]; }
[[kernel, max_total_threads_per_threadgroup(64)]] void one(device const float *x [[buffer(0)]],
    device float *out [[buffer(1)]], constant int &n [[buffer(2)]], uint3 group [[threadgroup_position_in_grid]],
    uint item [[thread_index_in_threadgroup]]) {
    threadgroup float shared[64];
    Pair p = {x[item], 0.5f};
    shared[item] = twice(p, x) * float(n);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[group.x * 64u + item] = precise::exp(shared[63u - item]);
}
"""
BODY = "    Pair p = {x[item], 0.5f};\n"
HEAD = "inline float twice"
WRITTEN = {
    "exceptions": (BODY, BODY + "    try { p.a = 1.0f; } catch (int e) {}\n"),
    "memory": (BODY, BODY + "    thread float *more = new float[4];\n"),
    "virtual": ("    float a, b;", "    float a, b;\n    virtual float c();"),
    "rtti": (BODY, BODY + "    bool same = typeid(p) == typeid(p);\n"),
    "goto": (BODY, BODY + "    goto end;\n"),
    "double": (BODY, BODY + "    double d = p.a;\n"),
    "long-long": (BODY, BODY + "    long long d = 1;\n"),
    "std": (BODY, BODY + "    p.a = std::fabs(p.a);\n"),
    "static": (BODY, BODY + "    static int count = 0;\n"),
    "thread-local": (BODY, BODY + "    thread_local int count = 0;\n"),
    "lambda": (BODY, BODY + "    auto f = [&](float v) { return v; };\n"),
    "function-pointer": (BODY, BODY + "    float (*f)(float) = 0;\n"),
    "include": ("#include <metal_stdlib>", "#include <cmath>"),
    "assembly": (BODY, BODY + '    asm("nop");\n'),
    "variadic": (HEAD, "inline int many(int first, ...) { return first; }\n" + HEAD),
    "characters": (BODY, BODY + "    wchar_t c = 0;\n"),
    "bit-fields": ("    float a, b;", "    float a, b;\n    uint c : 3;"),
    "literal": ("2.0f * p.a", "2.0 * p.a"),
    "c-library": (BODY, BODY + '    printf("%f", p.a);\n'),
    "main": (HEAD, "inline void main() {}\n" + HEAD),
    "fast": ("precise::exp", "fast::exp"),
    "precise": ("precise::exp", "exp"),
    "matrix-size": (BODY, BODY + "    simdgroup_float16x16 m;\n"),
    "matrix-origin": (BODY, BODY + "    simdgroup_load(m, shared, 8, ulong2(8, 0));\n"),
    "newer": (BODY, BODY + "    bfloat4 m;\n"),
    "old-kernel": ("[[kernel, max_total_threads_per_threadgroup(64)]] void one", "kernel void one"),
    "kernel-threads": ("[[kernel, max_total_threads_per_threadgroup(64)]]", "[[kernel]]"),
    "kernel-type": ("]] void one", "]] int one"),
    "address-space": ("device const float *x) {", "const float *x) {"),
    "shared-set": ("shared[64];", "shared[64] = {0.0f};"),
    "shared-outside": ("{ return 2.0f", "{\n    threadgroup float own[2];\n    return 2.0f"),
    "global": (HEAD, "float state = 0.0f;\n" + HEAD),
    "recursion": ("{ return 2.0f", "{ return twice(p, x) + 2.0f"),
    "kernel-called": (BODY, BODY + "    one(x, out, n, group, item);\n"),
}
"""Rule, and what of a good source is put in place of what to break it."""
PARAMETERS = {
    "attribute: n has none": ("&n [[buffer(2)]]", "&n"),
    "attribute: item has color": ("item [[thread_index_in_threadgroup]]", "item [[color]]"),
    "buffer: n is no pointer": ("constant int &n", "int n"),
    "buffer: x is no pointer or reference to device": ("device const float *x [[", "threadgroup const float *x [["),
    "buffer: the numbers": ("[[buffer(2)]]", "[[buffer(1)]]"),
    "buffer: the numbers of its buffers are [0, 1, 7]": ("[[buffer(2)]]", "[[buffer(7)]]"),
    "index: item is uint": ("uint item", "int item"),
    "position: all positions": ("uint item [[", "uint2 threads [[threads_per_threadgroup]], uint item [["),
    "threadgroup: n is no pointer": ("constant int &n [[buffer(2)]]", "constant int &n [[threadgroup(0)]]"),
}
COMPILED = {
    "space to another": ("twice(p, x)", "twice(p, shared)"),
    "space lost": (BODY, BODY + "    thread float *y = out;\n"),
    "cast between spaces": (BODY, BODY + "    threadgroup float *y = out + 1;\n"),
    "write to const device": (BODY, BODY + "    x[0] = 1.0f;\n"),
    "write to constant": (BODY, BODY + "    table[0] = 1.0f;\n"),
    "C++17": (BODY, BODY + "    if constexpr (true) p.a = 0.0f;\n"),
    "structured binding": (BODY, BODY + "    auto [a, b] = p;\n"),
    "as_type of another size": (BODY, BODY + "    uint2 u = as_type<uint2>(p.a);\n"),
    "mixed min": (BODY, BODY + "    int m = min(n, item);\n"),
    "unknown function": (BODY, BODY + "    p.a = tgamma(p.a);\n"),
}


def broken(change: tuple[str, str]) -> str:
    assert change[0] in GOOD
    return GOOD.replace(*change, 1)


@pytest.mark.nightly(unless_changed=OWN)
def test_a_good_source_passes() -> None:
    assert problems(GOOD) == []
    check_spaces(GOOD)
    assert parameter_problems(preprocessed(GOOD)) == []


@pytest.mark.parametrize("rule", WRITTEN)
def test_faults_are_found_as_written(rule: str) -> None:
    found = problems(broken(WRITTEN[rule]))
    assert any(f": {rule}: " in line for line in found), found


@pytest.mark.nightly(unless_changed=OWN)
@pytest.mark.parametrize("what", PARAMETERS)
def test_faults_of_parameters_are_found(what: str) -> None:
    from metal_compile import translated

    found = parameter_problems(translated(broken(PARAMETERS[what])))
    assert any(f"one: {what}" in line for line in found), found


@pytest.mark.nightly(unless_changed=OWN)
@pytest.mark.parametrize("what", COMPILED)
def test_faults_are_found_by_the_compiler(what: str) -> None:
    with pytest.raises(CompileError):
        check_spaces(broken(COMPILED[what]))


def test_comments_and_preprocessor_lines_are_no_faults() -> None:
    assert problems("// new, delete; 1.0\n/* goto\n std::x */\n#define A(x) ((x) * 2)\n" + GOOD) == []
