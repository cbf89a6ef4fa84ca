"""Every kernel compiles for every architecture, and its code object says what the lowering counts on.

Compiled by a real compiler (ziglang's clang, which is what ``libamd_comgr`` is made of); not run on hardware.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pytest

from bitnet.core.gpu import Bucket, Context, KernelSpec, Launch
from bitnet.core.gpu.clc import ClcOps
from bitnet.core.gpu.clc.amd import architecture
from bitnet.core.gpu.clc.amd_products import GROUPS as MATRIX_GROUPS
from bitnet.core.gpu.drivers.compiling import compile_all
from bitnet.core.gpu.ops import advance
from bitnet.core.gpu.plan import lower
from bitnet.core.hal import Adjustment, Limits, Logprobs, Program, StepLayout
from bitnet.core.model.program import build_program
from bitnet.core.testing.embedder_steps import gelu, in_columns, norms_last
from bitnet.core.testing.hybrid import GROUP as HYBRID_GROUP
from bitnet.core.testing.hybrid import hybrid_model
from bitnet.core.testing.model import TinyModel
from bitnet.rocm.compiler import SOURCES

CodeObject: TypeAlias = Callable[[KernelSpec, str], bytes]
OF_EACH_KIND = ("gfx900", "gfx90a", "gfx1030", "gfx1100", "gfx1201")
"""No dot products and wave 64, sdot4 and wave 64, sdot4 and wave 32, sudot4; the last has other barriers."""
OTHERS = (
    *("gfx906", "gfx908", "gfx942", "gfx950", "gfx1010"),
    *("gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1200"),
)
LIMITS = Limits(1024, 64, 64, 64)
FEW = (1, 2, 4, 8)
"""Tokens of the steps whose kernels must keep all they hold in registers."""
STEPS = (*((n, n) for n in FEW), (64, 64), (512, 0))
"""Tokens and rows of the steps."""
SHAPES = {
    "demo": {"heads": 6, "kv_heads": 2, "head_dim": 64, "ffn": 1024},
    "2b4t": {"heads": 20, "kv_heads": 5, "head_dim": 128, "ffn": 6912},
    "qwen3": {"heads": 4, "kv_heads": 2, "head_dim": 128, "ffn": 1024, "group": 64, "head_norms": True},
    "rest": {"heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "biased": True, "centered": True},
    "hybrid": {"group": HYBRID_GROUP},
    "embedder": {"heads": 4, "kv_heads": 2, "head_dim": 128, "ffn": 1024, "group": 64, "head_norms": True},
}
EMBEDDER = {"norm_values", "put_columns", "glu_norm_quant", "rope_append"}
RECURRENT = {"causal_conv", "delta_gates", "delta_rule", "hadamard", "transform_quant"}
OFTEN = [*((name, "demo") for name in OF_EACH_KIND), ("gfx90a", "2b4t"), ("gfx1100", "2b4t"), ("gfx1100", "qwen3")]
OFTEN += [("gfx900", "rest"), ("gfx90a", "embedder"), ("gfx1100", "embedder")]
SELDOM = [pair for pair in product((*OF_EACH_KIND, *OTHERS), SHAPES) if pair not in OFTEN]
LOCAL_BYTES = 65536
SIMDS = 4
"""SIMD units that share a work-group: those of a compute unit on gfx9, of two together from gfx10 on."""
REGISTERS = {"gfx900": 256, "gfx906": 256, "gfx908": 256, "gfx90a": 512, "gfx942": 512, "gfx950": 512}
"""Vector registers that a lane of a SIMD has, for all of its waves; 1,024 or more from gfx10 on."""
METADATA, NAME = 32, b"AMDGPU\0"
"""Type and name of the note that holds a code object's metadata (LLVM's "User Guide for AMDGPU Backend")."""


@dataclass(frozen=True)
class Memory:
    nbytes: int


class NoDevice:
    """What a context needs of a driver, less the device."""

    def alloc(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def upload(self, buffer: Memory, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        assert offset + array.nbytes <= buffer.nbytes


@cache
def program(shape: str) -> Program:
    if shape == "hybrid":
        config, weights = hybrid_model(np.random.default_rng(5))
        return build_program(config, weights, limits=LIMITS, num_blocks=64)
    model = TinyModel(np.random.default_rng(5), layers=1, vocab=300, **SHAPES[shape])  # type: ignore[arg-type]
    made = model.program(LIMITS, 64)
    return in_columns(gelu(norms_last(made))) if shape == "embedder" else made


def launches(
    name: str, shape: str, *, units: int = 96, steps: Sequence[tuple[int, int]] = STEPS
) -> Iterator[tuple[Launch, int]]:
    """What steps of some tokens and rows launch on a device of an architecture, each with the step's tokens."""
    kind = architecture(name)
    assert kind is not None
    lowering = ClcOps(kind.abilities(compute_units=units, group=1024, local_bytes=LOCAL_BYTES)).lowering()
    table = lowering.table
    context = Context(NoDevice(), program(shape), StepLayout(LIMITS))  # type: ignore[arg-type]
    for tokens, rows in steps:
        for launch in lower(context, Bucket(tokens, rows, 1024, apart=tokens == rows), table):
            yield launch, tokens
    for launch in lower(context, Bucket(1, 1, 1024, adjusted=True), table):
        yield launch, 1
    for kind_of_launch in (Logprobs, Adjustment):
        for launch in table[kind_of_launch](context, context.program.ops[-1], Bucket(1, 1, 1024, logprobs=True)) or []:
            yield launch, 1
    yield advance(context), 1


def unpacked(data: bytes, at: int = 0) -> tuple[Any, int]:
    """A value in MessagePack and where it ends; of the format only what a compiler writes into metadata."""

    def several(count: int, at: int) -> tuple[list[Any], int]:
        found = []
        for _ in range(count):
            value, at = unpacked(data, at)
            found.append(value)
        return found, at

    def mapping(count: int, at: int) -> tuple[dict[Any, Any], int]:
        flat, at = several(2 * count, at)
        return dict(zip(flat[::2], flat[1::2], strict=True)), at

    kind, at = data[at], at + 1
    if kind < 0x80:
        return kind, at
    if kind < 0x90:
        return mapping(kind & 15, at)
    if kind < 0xA0:
        return several(kind & 15, at)
    if kind < 0xC0:
        return data[at : at + (kind & 31)].decode(), at + (kind & 31)
    if kind in (0xC2, 0xC3):
        return kind == 0xC3, at
    form = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD9: "B", 0xDA: "H", 0xDC: "H", 0xDE: "H"}[kind]
    (number,) = struct.unpack_from(f">{form}", data, at)
    at += struct.calcsize(form)
    if kind < 0xD9:
        return number, at
    if kind < 0xDC:
        return data[at : at + number].decode(), at + number
    return several(number, at) if kind == 0xDC else mapping(number, at)


def metadata(code: bytes) -> Mapping[str, Any]:
    """Metadata of a code object's kernels, by their names."""
    (table,), (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    for i in range(count):
        _, kind, _, _, at, length = struct.unpack_from("<IIQQQQ", code, table + i * size)
        if kind != 7:  # SHT_NOTE
            continue
        name_size, _, note = struct.unpack_from("<III", code, at)
        if note == METADATA and code.startswith(NAME, at + 12):
            found, _ = unpacked(code[at + 12 + (name_size + 3) // 4 * 4 : at + length])
            return {kernel[".name"]: kernel for kernel in found["amdhsa.kernels"]}
    raise AssertionError("the code object has no metadata")


def sizes(launch: Launch) -> list[int]:
    """Bytes of each of the arguments that a launch gives."""
    return [8 if isinstance(arg, Memory) else 4 for arg in launch.args]


def check(name: str, shape: str, code_object: CodeObject) -> None:
    """Compile what a model's steps launch, and hold each kernel's metadata against the launch."""
    kind = architecture(name)
    assert kind is not None
    made: dict[KernelSpec, tuple[Launch, int]] = {}
    for launch, tokens in launches(name, shape):
        made[launch.kernel] = launch, min(tokens, made.get(launch.kernel, (launch, tokens))[1])
    units = {(spec.file, spec.defines): spec for spec in made}
    codes = compile_all(lambda unit: code_object(units[unit], name), list(units))
    many = "ternary_gemm" if kind.matrix == "none" else "amd/ternary_gemm_matrix"
    norms = EMBEDDER if shape == "embedder" else {"head_norms"}
    products = {"ternary_groups", *norms} if "group" in SHAPES[shape] else {"ternary_decode", many}
    products |= {many} if SHAPES[shape].get("group") in MATRIX_GROUPS and kind.matrix != "none" else set()
    prefill = "attention_prefill" if kind.matrix == "none" else "amd/attention_prefill_matrix"
    products |= {"add_bias", "center_rows"} if "biased" in SHAPES[shape] else set()
    products |= RECURRENT if shape == "hybrid" else set()
    assert products | {"attention_decode", prefill} <= {file for file, _ in units}
    for spec, (launch, tokens) in made.items():
        found, what = metadata(codes[spec.file, spec.defines])[spec.entry], f"{spec} for {name}"
        given = [arg for arg in found[".args"] if not arg[".value_kind"].startswith("hidden")]
        assert [arg[".size"] for arg in given] == sizes(launch), what
        assert found[".wavefront_size"] == kind.wave, what
        assert found[".group_segment_fixed_size"] + launch.shared <= LOCAL_BYTES, what
        assert found[".max_flat_workgroup_size"] >= np.prod(launch.block), what
        waves = -(-int(np.prod(launch.block)) // kind.wave)
        assert -(-waves // SIMDS) * found[".vgpr_count"] <= REGISTERS.get(name, 1024), what
        assert f"{spec.entry}_rocm" in SOURCES.names(), what
        own = shape != "hybrid" or spec.file in RECURRENT  # others have sizes there that no model has
        if own and (tokens in FEW or spec.file.startswith("amd/")):
            spilled = {key: found[key] for key in (".vgpr_spill_count", ".sgpr_spill_count")}
            assert not any(spilled.values()), f"{what}: {spilled}"
            assert found[".private_segment_fixed_size"] == 0, f"{what}: {found['.private_segment_fixed_size']} bytes"


@pytest.mark.parametrize(("name", "shape"), OFTEN)
def test_every_kernel_compiles(name: str, shape: str, code_object: CodeObject) -> None:
    check(name, shape, code_object)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "shape"), SELDOM)
def test_every_kernel_compiles_for_the_others(name: str, shape: str, code_object: CodeObject) -> None:
    check(name, shape, code_object)


ROW_SUMS = KernelSpec("row_sums", "row_sums", (("WG", 256), ("COLS", 2560)))


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("gfx906", "v_dot4_i32_i8"), ("gfx1030", "v_dot4c_i32_i8"), ("gfx1100", "v_dot4_i32_iu8"), ("gfx900", "")],
)
def test_dot_products_are_instructions(
    name: str, instruction: str, disassembly: Callable[[KernelSpec, str], str]
) -> None:
    text = disassembly(ROW_SUMS, name)
    assert "s_barrier" in text
    assert (instruction in text) if instruction else "v_dot4" not in text


WAVES = KernelSpec("amd/waves", "waves")


@pytest.mark.parametrize(
    ("name", "of_bytes", "of_halves"),
    [
        ("gfx908", "v_mfma_i32_16x16x16i8", "v_mfma_f32_16x16x16f16"),
        ("gfx90a", "v_mfma_i32_16x16x16i8", "v_mfma_f32_16x16x16f16"),
        ("gfx942", "v_mfma_i32_16x16x32_i8", "v_mfma_f32_16x16x16_f16"),
        ("gfx950", "v_mfma_i32_16x16x64_i8", "v_mfma_f32_16x16x16_f16"),
        ("gfx1103", "v_wmma_i32_16x16x16_iu8", "v_wmma_f32_16x16x16_f16"),
        ("gfx1201", "v_wmma_i32_16x16x16_iu8", "v_wmma_f32_16x16x16_f16"),
    ],
)
def test_matrix_products_are_instructions(
    name: str, of_bytes: str, of_halves: str, disassembly: Callable[[KernelSpec, str], str]
) -> None:
    text = disassembly(WAVES, name)
    assert of_bytes in text
    assert of_halves in text


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ("gfx90a:sramecc+:xnack-", ("gfx90a", 64, "sdot4", "mfma16")),
        ("gfx900:xnack-", ("gfx900", 64, "none", "none")),
        ("gfx942:sramecc+:xnack-", ("gfx942", 64, "sdot4", "mfma32")),
        ("gfx950", ("gfx950", 64, "sdot4", "mfma64")),
        ("gfx1010", ("gfx1010", 32, "none", "none")),
        ("gfx1036", ("gfx1036", 32, "sdot4", "none")),
        ("gfx1151", ("gfx1151", 32, "sudot4", "wmma11")),
        ("gfx1201", ("gfx1201", 32, "sudot4", "wmma12")),
        ("gfx1250", ("gfx1250", 32, "sudot4", "none")),
        ("gfx1310", ("gfx1310", 32, "none", "none")),
        ("gfx803", None),
        ("", None),
        ("gfx9", None),
        ("sm_90", None),
    ],
)
def test_architectures(reported: str, expected: Sequence[Any] | None) -> None:
    found = architecture(reported)
    assert (found and (found.name, found.wave, found.dot4, found.matrix)) == expected


@pytest.mark.parametrize("name", sorted({name for name, _ in OFTEN}))
def test_kernels_of_an_int8_cache_compile(name: str, code_object: CodeObject) -> None:
    """The kernels take the same arguments as those of any cache, and their scratch memory is local."""
    cache = (("DIM", 128), ("BLOCK", 32), ("KV_F16", 0), ("KV_I8", 1))
    for file, defines in (
        ("rope_append", (*cache, ("NEOX", 1))),
        ("attention_decode", (("WG", 128), *cache, ("HEAD_GROUP", 4), ("WINDOW", 0), ("ROPE", 1), ("NEOX", 1))),
        ("attention_prefill", (*cache, ("HEAD_GROUP", 4), ("WINDOW", 0))),
        ("attention", (("WG", 256), *cache, ("HEAD_GROUP", 4), ("WINDOW", 0))),
    ):
        found = metadata(code_object(KernelSpec(file, file, defines), name))[file]
        assert found[".private_segment_fixed_size"] == 0, file
        assert found[".group_segment_fixed_size"] <= LOCAL_BYTES, file
