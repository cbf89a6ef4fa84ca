"""The shim computes what Metal would, and refuses what would be undefined on a GPU: faults put in on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_shim import ShimError, library
from metal_steps import OWN

pytestmark = pytest.mark.nightly(unless_changed=OWN)
HEAD = """#include <metal_stdlib>
using namespace metal;
"""
PLACE = (
    "uint3 group [[threadgroup_position_in_grid]], uint item [[thread_index_in_threadgroup]], "
    "uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]"
)
NO_KERNEL, ARGUMENTS, BOUNDS, MISALIGNED, BARRIER, RACE, ARITHMETIC = range(1, 8)


def launch(body: str, *arguments: Any, threads: int = 64, groups: int = 1, kernel: str = "f", extra: str = "") -> None:
    """Run ``body`` with ``x``, ``out`` and ``n`` at buffers 0, 1 and 2, and perhaps more parameters."""
    text = (
        f"{HEAD}[[kernel, max_total_threads_per_threadgroup(128)]] void f(device const float *x [[buffer(0)]],\n"
        f"device float *out [[buffer(1)]], constant int &n [[buffer(2)]], {extra}{PLACE}) {{\n{body}\n}}\n"
    )
    library(text).launch(kernel, arguments, (groups, 1, 1), threads)


def fails(code: int, body: str, *, words: str = "", n: int = 64, **how: Any) -> None:
    x, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(ShimError) as failed:
        launch(body, x, out, np.int32(n), **how)
    assert failed.value.code == code, failed.value
    assert words in str(failed.value)


FINE = "    out[item] = x[item];"


def test_faults_are_found() -> None:
    fails(BOUNDS, "    out[item] = x[item + 1];", words="thread 63: reads 4 bytes at 256 of buffer(0), which has 256")
    fails(BOUNDS, "    out[int(item) - 1] = 0.0f;", words="thread 0: writes 4 bytes at -4 of buffer(1)")
    fails(BOUNDS, "    ((device float4 *)out)[item / 4 + 1] = float4(0.0f);", words="writes 16 bytes")
    fails(
        BOUNDS,
        "    threadgroup float a[8], b[8];\n    a[0] = b[0] = 0.0f;\n    threadgroup float *p = a;\n    p[n] = 1.0f;",
        n=9,
    )
    fails(MISALIGNED, "    device const float4 *v = (device const float4 *)(x + 1);\n    out[item] = v[0].x;")
    fails(BARRIER, "    if (item < 40) threadgroup_barrier(mem_flags::mem_threadgroup);", words="40 of 64")
    fails(BARRIER, "    if (item >= 32) return;\n    threadgroup_barrier(mem_flags::mem_threadgroup);")
    fails(BARRIER, "    if (lane < 8) out[item] = simd_sum(x[item]);", words="only 8 of 32")
    fails(BARRIER, "    out[item] = lane < 8 ? simd_sum(x[item]) : simd_max(x[item]);")
    shared = "    threadgroup float s[64];\n    s[item] = x[item];\n"
    fails(RACE, shared + "    out[item] = s[63 - item];", words="without a barrier")
    fails(RACE, shared + "    simdgroup_barrier(mem_flags::mem_threadgroup);\n    out[item] = s[63 - item];")
    wait = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    fails(RACE, f"    threadgroup float s[1];\n    s[0] = x[item];\n{wait}    out[item] = s[0];", words="writes")
    late = wait + "    float v = s[63 - item];\n    s[item] = v;\n"
    fails(RACE, shared + late)
    fails(BOUNDS, "    int a[4] = {0, 1, 2, 3};\n    out[item] = float(a[n]);", n=4)
    fails(ARITHMETIC, "    out[item] = float(7 / (int(item) - n));", n=3)
    fails(ARITHMETIC, "    out[item] = float(1 << n);", n=32)
    fails(ARITHMETIC, "    out[item] = float(n + int(item));", n=2**31 - 1)
    fails(NO_KERNEL, FINE, kernel="g")
    fails(ARGUMENTS, FINE, threads=129)
    fails(ARGUMENTS, "    threadgroup float s[8193];\n    s[item] = 0.0f;", words="32768")
    x = np.zeros(64, np.float32)
    for bad in ((x, x), (x, None, np.int32(1)), (x, x, np.int8(1))):
        with pytest.raises(ShimError) as failed:
            launch(FINE, *bad)
        assert failed.value.code == ARGUMENTS


def test_what_has_a_barrier_is_no_fault() -> None:
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    body = "    threadgroup float s[64];\n    s[item] = x[item];\n"
    launch(
        body + "    simdgroup_barrier(mem_flags::mem_threadgroup);\n    out[item] = s[item ^ 31];", x, out, np.int32(1)
    )
    assert (out == x[np.arange(64) ^ 31]).all()
    launch(
        body + "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    out[item] = s[63 - item];",
        x,
        out,
        np.int32(1),
    )
    assert (out == x[::-1]).all()


def test_a_launch_after_a_fault_is_whole() -> None:
    fails(BARRIER, "    if (item < 40) threadgroup_barrier(mem_flags::mem_threadgroup);\n    out[item] = 0.0f;")
    test_what_has_a_barrier_is_no_fault()


def test_threadgroup_memory_is_poisoned() -> None:
    x, out = np.zeros(64, np.float32), np.zeros(128, np.float32)
    body = "    threadgroup float s[64];\n    out[group.x * 64 + item] = s[item];\n    s[item] = 1.0f;"
    launch(body, x, out, np.int32(1), groups=2)
    assert np.isnan(out).all()


def test_functions_of_a_simdgroup() -> None:
    x = np.random.default_rng().standard_normal(64).astype(np.float32)
    two = x.reshape(2, 32)
    lane = np.arange(32)
    for call, wanted in (
        ("simd_max(x[item])", np.repeat(two.max(axis=1), 32)),
        ("simd_min(x[item])", np.repeat(two.min(axis=1), 32)),
        ("simd_shuffle_xor(x[item], 5)", two[:, lane ^ 5].reshape(-1)),
        ("simd_shuffle(x[item], ushort(31 - lane))", two[:, ::-1].reshape(-1)),
        ("simd_broadcast(x[item], 3)", np.repeat(two[:, 3], 32)),
        ("float(simd_sum(int(item)))", np.repeat([496, 496 + 1024], 32)),
        ("simd_any(item == 40) ? 1.0f : 0.0f", np.repeat([0, 1], 32)),
        ("simd_all(item < 40) ? 1.0f : 0.0f", np.repeat([1, 0], 32)),
    ):
        out = np.full(64, np.nan, np.float32)
        launch(f"    out[item] = {call};", x, out, np.int32(1))
        assert (out == wanted).all(), call
    out = np.full(64, np.nan, np.float32)
    launch("    out[item] = simd_sum(x[item]);", x, out, np.int32(1))
    assert abs(out.reshape(2, 32) - two.astype(np.float64).sum(axis=1, keepdims=True)).max() < 1e-5


@pytest.mark.parametrize("kind", ["float", "half"])
def test_matrices_of_a_simdgroup(kind: str) -> None:
    rng = np.random.default_rng()
    a, b = rng.integers(-9, 10, (2, 8, 8)).astype(np.float32)
    wide = np.full((12, 20), np.nan, np.float32)
    wide[2:10, 5:13] = b.T
    body = f"""    threadgroup {kind} left[64];
    for (uint i = item; i < 64; i += 32) left[i] = {kind}(x[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_{kind}8x8 a;
    simdgroup_float8x8 b, c = make_filled_simdgroup_matrix<float, 8, 8>(3.0f);
    simdgroup_load(a, left, 8);
    simdgroup_load(b, x + 64 + 2 * 20 + 5, 20, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, out, 8);"""
    out = np.full((8, 8), np.nan, np.float32)
    launch(body, np.concatenate([a.reshape(-1), wide.reshape(-1)]), out, np.int32(1), threads=32)
    assert (out == a @ b + 3).all()


def test_vectors_halves_and_atomics() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    out = np.full(4, np.nan, np.float32)
    count = np.zeros(2, np.uint32)
    extra = "device const half *h [[buffer(3)]], device atomic_uint *count [[buffer(4)]], "
    body = """    threadgroup atomic_uint seen;
    if (item == 0) atomic_store_explicit(&seen, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&seen, item, memory_order_relaxed);
    atomic_fetch_max_explicit(&count[1], item, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (item != 0) return;
    atomic_fetch_add_explicit(&count[0], atomic_load_explicit(&seen, memory_order_relaxed), memory_order_relaxed);
    uint wrong = 0;
    for (int i = 0; i < n; i++) {
        bool number = float(h[i]) == float(h[i]);
        wrong += number && as_type<ushort>(half(float(h[i]))) != ushort(i) ? 1u : 0u;
    }
    out[0] = float(wrong);
    out[1] = float(as_type<uint>(char4(rint(float4(0.5f, 1.5f, -2.5f, 127.0f)))));
    out[2] = dot(float4(half4(1.0h, 2.0h, 3.0h, 4.0h)), float4(float2(1.0f, 2.0f), float2(3.0f)));
    out[3] = float(as_type<half2>(0x0C000400u).x) + float(mulhi(0x80000000u, 6u));"""
    launch(body, np.zeros(1, np.float32), out, np.int32(65536), bits, count, extra=extra)
    word = int(np.array([0, 2, -2, 127], np.int8).view(np.uint32)[0])
    assert out[0] == 0
    assert out[1] == np.float32(word)
    assert out[2] == 1 + 4 + 9 + 12
    assert out[3] == 2**-14 + 3
    assert count.tolist() == [2016, 63]


def test_atomics_are_ordered_among_themselves_only() -> None:
    """Threads that take places by what an atomic operation returns; one that reads the number as if it were plain."""
    x, out = np.zeros(64, np.float32), np.full(64, np.nan, np.float32)
    zero = """    threadgroup atomic_int places[2];
    if (item < 2) atomic_store_explicit(&places[item], 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
"""
    take = "out[atomic_fetch_add_explicit(&places[1], 1, memory_order_relaxed)] = float(item);\n"
    launch(zero + take, x, out, np.int32(1))
    assert np.sort(out).tolist() == [*range(64)]
    plain = f"{zero}    if (item < 40) {take}    else out[item] = float(((threadgroup int *)places)[1]);"
    fails(RACE, plain, words="thread 40: reads byte 4 of threadgroup memory `places`, which thread 39 writes")
