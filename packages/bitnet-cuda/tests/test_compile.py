"""Every kernel that lowering asks for compiles, for every generation of GPU: NVRTC needs no driver and no device.

Long, because each family of models has a program here, and what its lowering must launch.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import Bucket, Context, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.ops import advance
from bitnet.core.gpu.ops.adjusting import count_chosen
from bitnet.core.gpu.ops.logprobs import logprobs
from bitnet.core.gpu.plan import lower
from bitnet.core.hal import (
    DenseMatmul,
    Embed,
    Limits,
    NormRows,
    Op,
    Program,
    Sample,
    StepLayout,
    TernaryMatmul,
)
from bitnet.core.support import cache
from bitnet.core.testing.embedder_steps import gelu, in_columns, norms_last
from bitnet.core.testing.hybrid_steps import SHAPES as HYBRIDS
from bitnet.core.testing.hybrid_steps import Hybrid, hybrid_program
from bitnet.core.testing.mixture_steps import SHAPES as MIXTURES
from bitnet.core.testing.mixture_steps import Mixed, mixed_program
from bitnet.core.testing.model import TinyModel
from bitnet.core.testing.rig import dense, tensor, ternary
from bitnet.core.testing.tables import Table, random_table
from bitnet.cuda import compiler
from bitnet.cuda.device import architecture
from bitnet.cuda.groups import MIN_SLOTS, few_groups_product, few_groups_shape, group_slots
from bitnet.cuda.ops import SOURCES, CudaOps
from bitnet.cuda.slices import slice_product, slice_shape, slice_slots

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
try:
    nvrtc.nvrtcVersion()
except Exception as error:  # its loader's own types
    pytest.skip(f"nvidia-cuda-nvrtc is not installed: {error}", allow_module_level=True)

NIGHT = pytest.mark.nightly(
    unless_changed=["kernels/cuda", "packages/bitnet-cuda", "packages/bitnet-core/src/bitnet/core/gpu"]
)
GENERATIONS = [
    (7, 5),
    (9, 0),
    *(pytest.param(capability, marks=NIGHT) for capability in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)]),
]
"""Compute capabilities: the least and the one there is hardware of at all times, the others where they could fail."""
LIMITS = Limits(1024, 64, 64, 12)
FAR_BLOCKS = Hybrid(hidden=2048, heads=8, head_dim=256, rotary=64, ffn=2048, v_heads=16, dim=128, block=2048)
"""A hybrid model whose transforms are longer than those that one kernel does with the quantisation."""
SHARED_LIMIT = {(7, 5): 64, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB of shared memory of a block, where it is not 163."""
RESERVED = 1024
"""Bytes that the system takes beside those, from Hopper on; the compiler counts them to what a kernel declares."""


@dataclass(frozen=True)
class Memory:
    nbytes: int


class NoDevice:
    """What a context needs of a driver, less the device; keeps what is to be launched at once."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []

    def record(self, launches: Sequence[Launch]) -> Sequence[Launch]:
        return launches

    def submit(self, recording: Sequence[Launch]) -> None:
        self.launched += recording

    def alloc(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def upload(self, buffer: Memory, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        assert offset + array.nbytes <= buffer.nbytes


def launches(program: Program, capability: tuple[int, int], *, keep: bool = False) -> Iterator[Launch]:
    lowering = CudaOps(132, capability).lowering()
    device = NoDevice()
    context = Context(device, program, StepLayout(program.limits), keep)  # type: ignore[arg-type]
    for tokens, rows in ((1, 1), (8, 8), (16, 16), (64, 64), (512, 0), (1024, 0)):
        for plain in (False, True):
            logits = plain or not lowering.leaves_out(context)
            yield from lower(context, Bucket(tokens, rows, 192, logits=logits, apart=not plain), lowering.table)
    for far, tokens in ((4096, 1), (16384, 1), (16384, 8)):
        yield from lower(context, Bucket(tokens, tokens, far, apart=True), lowering.table)
    for rows in (1, 64):
        for logits in (True, not lowering.leaves_out(context)):
            adjusted = Bucket(rows, rows, 192, logits, apart=True, adjusted=True)
            yield from lower(context, adjusted, lowering.table)
    for rows, penalties in ((1, False), (8, False), (8, True)):
        filtered = Bucket(rows, rows, 192, not lowering.leaves_out(context), adjusted=penalties, filtered=True)
        yield from lower(context, filtered, lowering.table)
    yield from device.launched
    yield count_chosen(context)
    yield from logprobs(context, Bucket(1, 1, 192, logprobs=True), 256)
    yield advance(context)


def programs() -> Sequence[tuple[Program, bool]]:
    """Models, and whether all their tensors are to be kept."""
    wide = TinyModel(np.random.default_rng(5), layers=1, heads=4, kv_heads=2, head_dim=64, ffn=512)
    shape: dict[str, Any] = {"activation": "silu", "style": "interleaved", "biased": True, "centered": True}
    odd = TinyModel(np.random.default_rng(6), layers=1, sub_norms=False, **shape)
    scaled = [
        TinyModel(np.random.default_rng(7), layers=1, head_dim=d, ffn=f, group=group, head_norms=True)
        for d, f, group in ((32, 128, 32), (64, 256, 64), (128, 1024, 128), (128, 1024, 256), (128, 1536, 512))
    ]
    plain = wide.program(LIMITS, 64)
    others = [(model.program(LIMITS, 64), False) for model in scaled]
    others += [(model.program(LIMITS, 64, "i8"), False) for model in (wide, scaled[0], scaled[2])]
    others += [(with_table(np.random.default_rng(8), *shape), False) for shape in ((512, 64), (1024, 128), (64, 32))]
    others += [(hybrid_program(np.random.default_rng(9), HYBRIDS[name], LIMITS), False) for name in ("wide", "odd")]
    others += [(hybrid_program(np.random.default_rng(9), FAR_BLOCKS, LIMITS), False)]
    others += [(norms_last(model.program(LIMITS, 64)), False) for model in scaled[:3]]
    others += [(norms_last(hybrid_program(np.random.default_rng(9), HYBRIDS["wide"], LIMITS)), False)]
    others += [(gelu(model.program(LIMITS, 64)), False) for model in (wide, scaled[2], scaled[3])]
    others += [(in_columns(gelu(model.program(LIMITS, 64))), False) for model in (wide, scaled[0], scaled[2])]
    mixed = [mixed_program(np.random.default_rng(10), shape, LIMITS) for shape in MIXTURES.values()]
    others += [(program, keep) for program in mixed for keep in (False, True)]
    return (plain, False), (plain, True), (odd.program(LIMITS, 64, "f32"), False), *others


def with_table(rng: np.random.Generator, width: int, group: int) -> Program:
    """An embedding and a head that are one ternary table of 1,000 rows."""
    specs = [tensor("x", "f32", "M", width), tensor("r", "f32", "R", width)]
    specs += [tensor("logits", "f32", "R", 1000), tensor("out", "i32", "R")]
    norm, table = dense(np.ones(width, np.float32)), ternary(*random_table(rng, Table(1, 1000, width, group)))
    ops: list[Op] = [Embed("t", "x"), NormRows("x", "norm", 1e-5, "r"), DenseMatmul("r", "t", "logits")]
    ops.append(Sample("logits", "out"))
    return Program(ops, {s.name: s for s in specs}, {"t": table, "norm": norm}, LIMITS, name="table")


@pytest.mark.parametrize("capability", GENERATIONS, ids=architecture)
def test_every_kernel_compiles(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device's own compiler, which shows each as progress and compiles what kernels share once."""
    made = {
        launch.kernel: launch for program, keep in programs() for launch in launches(program, capability, keep=keep)
    }
    monkeypatch.setenv("BITNET_NO_KERNEL_CACHE", "1")
    compiled: list[str] = []

    def listen(label: str, seconds: float) -> None:
        compiled.append(label)

    monkeypatch.setattr(cache, "listeners", [listen])
    arch = architecture(capability)
    cubins = compiler.Compiler("test", arch, "no device", "no driver", cache.KernelCache()).cubins(list(made))
    assert len(compiled) == len({(spec.file, spec.defines) for spec in made})
    for spec, launch in made.items():
        assert f"{spec.entry}_cuda" in SOURCES.names()
        assert launch.shared <= SHARED_LIMIT.get(capability, 163) * 1024
        assert f".text.{spec.entry}\0".encode() in cubins[spec]


def declared(cubin: bytes, entry: str) -> int:
    """Bytes of shared memory that a kernel's source declares: the size of a section of its ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    name = f".nv.shared.{entry}\0".encode()
    return max((s[5] for s in sections if cubin.startswith(name, sections[names][4] + s[0])), default=0)


@pytest.mark.parametrize("capability", GENERATIONS[1:], ids=architecture)
@pytest.mark.parametrize(
    "shape", [(1, 64, 23040, None), (1, 64, 14336, None), (8, 256, 512, None), (4, 64, 12288, 128)], ids=str
)
def test_a_block_has_the_shared_memory_it_takes(
    shape: tuple[int, int, int, int | None], capability: tuple[int, int]
) -> None:
    """The feed-forwards of Falcon3 10B, Llama 3 8B and Bonsai 8B (in groups); eight wide heads that share keys."""
    heads, head_dim, ffn, group = shape
    sizes = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "ffn": ffn, "group": group}
    model = TinyModel(np.random.default_rng(), layers=1, **sizes)  # type: ignore[arg-type]
    program = model.program(LIMITS, 64)
    lowering = CudaOps(132, capability).lowering()
    context = Context(NoDevice(), program, StepLayout(program.limits))  # type: ignore[arg-type]
    buckets = (Bucket(tokens, tokens, 4096, apart=tokens != 8) for tokens in (1, 4, 8, 64))
    made = {launch.kernel: launch for bucket in buckets for launch in lower(context, bucket, lowering.table)}
    some = {spec: launch for spec, launch in made.items() if spec.file in ("attention_decode", "ternary_decode")}
    assert len(some) > 1
    limit = 1024 * SHARED_LIMIT.get(capability, 163) + (RESERVED if capability >= (9, 0) else 0)
    for spec, launch in made.items():
        assert launch.shared <= limit, spec
    for spec, launch in some.items():
        if launch.shared > limit // 2 or spec.file == "attention_decode":
            cubin = compiler.compile_cubin(spec.file, compiler.options(spec, architecture(capability)), "no device")
            assert 0 < declared(cubin, spec.entry) <= limit - launch.shared, spec


def test_attention_rotates_a_part_of_heads() -> None:
    """As it rotates whole heads."""
    program = hybrid_program(np.random.default_rng(), HYBRIDS["wide"], LIMITS)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    made = lower(context, Bucket(1, 1, 192, apart=True), CudaOps(132, (9, 0)).lowering().table)
    files = [launch.kernel.file for launch in made]
    assert "rope_part" not in files
    (attention,) = (launch for launch in made if launch.kernel.file == "attention_decode")
    assert dict(attention.kernel.defines)["ROPE"] == 1
    assert dict(attention.kernel.defines)["ROTATED"] == HYBRIDS["wide"].rotary // 2


def test_attention_rotates_no_heads_that_are_normed_afterwards() -> None:
    """The norms that it has are those before the rotation."""
    model = TinyModel(np.random.default_rng(7), layers=1, head_dim=64, ffn=256, head_norms=True)
    for program, expected in ((model.program(LIMITS, 64), []), (norms_last(model.program(LIMITS, 64)), [1])):
        context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
        for tokens in (1, 8):
            made = lower(context, Bucket(tokens, tokens, 192, apart=True), CudaOps(132, (9, 0)).lowering().table)
            ropes = [launch.kernel for launch in made if launch.kernel.file == "rope_append"]
            assert [dict(rope.defines)["NORMS_LAST"] for rope in ropes] == expected
            (attention,) = (launch.kernel for launch in made if launch.kernel.file == "attention_decode")
            assert dict(attention.defines)["ROPE"] == 1 - len(expected)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1024])
def test_products_of_some_columns_are_in_no_group(tokens: int) -> None:
    """Neither with the quantisation before them, nor with the activation after them."""
    model = TinyModel(np.random.default_rng(7), layers=1, head_dim=64, ffn=256)
    program = in_columns(gelu(model.program(LIMITS, 64)))
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    made = lower(context, Bucket(tokens, 0, 192, apart=True), CudaOps(132, (9, 0)).lowering().table)
    files = [launch.kernel.file for launch in made]
    assert files.count("norm_values") == 2
    assert files.count("put_columns") == 5
    assert files.count("glu_norm_quant") == 1
    for launch in made:
        if launch.kernel.file == "glu_norm_quant":
            assert dict(launch.kernel.defines)["GELU"] == 1


def test_texts_whose_every_token_is_a_row_are_prompts() -> None:
    """As an embedder has them; tokens that are a sequence each are not."""
    program = TinyModel(np.random.default_rng(7), layers=1, head_dim=64, ffn=256).program(LIMITS, 64)
    program = replace(program, ops=[op for op in program.ops if not isinstance(op, DenseMatmul | Sample)])
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    for tokens, apart, expected in ((64, False, "prefill"), (512, False, "wgmma"), (64, True, "decode")):
        made = lower(context, Bucket(tokens, tokens, 192, apart=apart), CudaOps(132, (9, 0)).lowering().table)
        assert f"attention_{expected}" in {launch.kernel.file for launch in made}


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_layer_with_experts_takes_six_launches(tokens: int) -> None:
    """Each product norms and quantises by itself, and those of experts choose them."""
    program = mixed_program(np.random.default_rng(), Mixed(), LIMITS)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    made = lower(context, Bucket(tokens, 0, 192, apart=True), CudaOps(132, (9, 0)).lowering().table)
    layer = ["ternary_decode", "attention_decode", "ternary_decode", "route", "expert_up", "expert_down"]
    assert [launch.kernel.file for launch in made] == ["embed", *3 * layer]


def test_pairs_are_grouped_once_for_both_products() -> None:
    program = mixed_program(np.random.default_rng(), Mixed(), LIMITS)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    for tokens in (16, 1024):
        made = lower(context, Bucket(tokens, 0, 192), CudaOps(132, (9, 0)).lowering().table)
        files = [launch.kernel.file for launch in made]
        assert files.count("expert_tiles") == 3
        assert files.count("expert_mma") == 2 * 3


def test_a_hybrid_layer_takes_one_launch_for_each_transform() -> None:
    """With what is quantised behind it; and gates are activated where they are multiplied."""
    program = hybrid_program(np.random.default_rng(), HYBRIDS["wide"], LIMITS)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    for tokens in (1, 8, 1024):
        made = lower(context, Bucket(tokens, 1, 192), CudaOps(132, (9, 0)).lowering().table)
        files = [launch.kernel.file for launch in made]
        by_rows = 3 * 3 if tokens > 64 else 0  # all but the gated ones
        assert [files.count(name) for name in ("transform_rows", "transform_quant")] == [by_rows, 4 * 3 - by_rows]
        assert files.count("hadamard") == 2  # of the embedding and of the head
        assert not {"norm_values", "glu_values", "gated_values", "glu_norm_quant"} & {*files}


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_a_recurrent_layer_takes_nine_launches(tokens: int) -> None:
    """Decays and strengths with the norm of their rows, and both products with the convolution."""
    program = hybrid_program(np.random.default_rng(), HYBRIDS["wide"], LIMITS)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    made = lower(context, Bucket(tokens, 0, 192, apart=True), CudaOps(132, (9, 0)).lowering().table)
    product, out = ("ternary_bits", "ternary_decode") if tokens == 1 else ("ternary_few", "ternary_few")
    mixing = ["transform_quant", product, "delta_rule", "transform_quant", out]  # whose rows have 768 columns
    layer = [*mixing, "transform_quant", product, "transform_quant", product]
    assert [launch.kernel.file for launch in made][:20] == ["table_embed", "hadamard", *2 * layer]


@pytest.mark.parametrize(
    ("tokens", "product", "reads", "leaves"),
    [(1, "ternary_bits", ("INPUT", 3), "PLANES"), (8, "ternary_few", ("ORDERED", 1), "ORDERED")],
)
def test_products_read_what_the_quantisation_leaves(
    tokens: int, product: str, reads: tuple[str, int], leaves: str
) -> None:
    """Codes in a form of their own, in the buffer that the launch before has written."""
    program = hybrid_program(np.random.default_rng(), HYBRIDS["wide"], LIMITS)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    made = lower(context, Bucket(tokens, 0, 192, apart=True), CudaOps(132, (9, 0)).lowering().table)
    pairs = [(before, after) for before, after in pairwise(made) if after.kernel.file == product]
    assert len(pairs) >= 3 * 3
    for before, after in pairs:
        assert reads in after.kernel.defines
        if before.kernel.file == product:  # two products of the same rows
            assert after.args[1] is before.args[1]
        else:
            assert (leaves, 1) in before.kernel.defines
            assert after.args[1] is before.args[9]


@pytest.mark.parametrize("tokens", [2, 9, 64])
def test_sequences_of_several_tokens_are_convolved_apart(tokens: int) -> None:
    """And so are those of steps that are too large for it, or too small for the kernel of five to eight tokens."""
    program = hybrid_program(np.random.default_rng(), HYBRIDS["wide"], LIMITS)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    for apart in (False, True):
        made = lower(context, Bucket(tokens, 0, 192, apart=apart), CudaOps(132, (9, 0)).lowering().table)
        assert [launch.kernel.file for launch in made].count("causal_conv") == 2
        gates = [launch.kernel.file for launch in made].count("delta_gates")
        assert gates == (0 if apart and tokens <= 8 else 2)


@pytest.mark.parametrize("context", [4096, 32768])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 6, 8, 10, 16])
def test_the_clusters_of_a_long_context_run_at_once(kv_heads: int, context: int) -> None:
    """One and two sequences, on 132 multiprocessors: no more clusters than were seen to run at once on an H200."""
    fit = {2: 64, 4: 30, 8: 15, 16: 6}
    sizes = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "head_dim": 128}
    program = TinyModel(np.random.default_rng(), layers=1, **sizes).program(LIMITS, 64)  # type: ignore[arg-type]
    lowering = CudaOps(132, (9, 0)).lowering()
    for tokens in (1, 2):
        if kv_heads * tokens > (15 if context == 4096 else 16):
            continue  # several blocks share a multiprocessor
        made = Context(NoDevice(), program, StepLayout(program.limits))  # type: ignore[arg-type]
        launches = lower(made, Bucket(tokens, tokens, context, apart=True), lowering.table)
        (attention,) = (launch for launch in launches if launch.kernel.file == "attention_decode")
        blocks, cluster = int(np.prod(attention.grid)), int(dict(attention.kernel.defines)["CLUSTER"])
        assert blocks // cluster <= fit[cluster], (tokens, attention.grid)
        assert context == 4096 or blocks >= 80, "multiprocessors are idle"


@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("shape", [(3840, 2560), (13824, 2560), (2560, 6912), (46080, 3072), (3840, 8192), (10, 208)])
def test_slices_leave_attention_its_cache(shape: tuple[int, int], tokens: int) -> None:
    """One block a multiprocessor, and not with all of its shared memory; clusters that run at once on an H200."""
    (rows, cols), program = shape, TinyModel(np.random.default_rng(), layers=1).program(LIMITS, 64)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    op = next(op for op in program.ops if isinstance(op, TernaryMatmul))
    w = TernaryBuffer(Memory(0), Memory(0), rows, cols, -(-cols // 128) * 32, None)
    found = slice_shape(w, tokens, 132)
    assert found is not None or (tokens == 16 and cols > 4096)
    if found is None:
        return
    context._ternary[op.weights] = w
    launch = slice_product(context, op, tokens, context.tensors[op.out], "", found)
    assert 114 * 1024 < launch.shared < 162 * 1024
    slots, units = slice_slots(w, found), -(-w.row_bytes // 32 // found.split)
    assert slots == units or (slots >= 3 and found.parts == 1)
    blocks = int(np.prod(launch.grid))
    assert found.split == 1 or blocks // found.split <= 30, "clusters that wait for others"


@pytest.mark.parametrize("tokens", [17, 32, 64])
@pytest.mark.parametrize(("rows", "cols"), [(34816, 5120), (5120, 17408), (4096, 4096), (10, 1024), (300, 40960)])
def test_groups_of_few_tokens_leave_attention_its_cache(rows: int, cols: int, tokens: int) -> None:
    """One block a multiprocessor, and not with all of its shared memory; a ring that holds what is in use."""
    program = TinyModel(np.random.default_rng(), layers=1, group=64, ffn=256).program(LIMITS, 64)
    context = Context(NoDevice(), program, StepLayout(LIMITS))  # type: ignore[arg-type]
    op = next(op for op in program.ops if isinstance(op, TernaryMatmul))
    w = TernaryBuffer(Memory(0), Memory(0), rows, cols, cols // 4, 128)
    found = few_groups_shape(w, tokens, 132)
    assert found is not None
    context._ternary[op.weights] = w
    launch = few_groups_product(context, op, tokens, context.tensors[op.out], "", found, bounded=False)
    assert 114 * 1024 < launch.shared < 162 * 1024
    assert group_slots(w, found) >= min(cols // 128, MIN_SLOTS)


def test_groups_of_few_tokens_need_whole_vectors_of_scales() -> None:
    def shape(cols: int, group: int | None, tokens: int) -> object:
        return few_groups_shape(TernaryBuffer(Memory(0), Memory(0), 512, cols, cols // 4, group), tokens, 132)

    assert shape(2048, 128, 64)
    refused = (2048, 128, 65), (2048, 128, 16), (2048, 64, 64), (2048, None, 64), (1920, 128, 64), (1 << 20, 128, 64)
    assert not any(shape(*case) for case in refused)


def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(KernelCompileError) as raised:
        compiler.compile_cubin("row_sums", compiler.options(KernelSpec("row_sums", "row_sums"), "sm_90a"), "cuda:0")
    assert "row_sums.cu" in str(raised.value)
    assert "COLS" in raised.value.log


def test_only_what_is_not_in_the_cache_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    monkeypatch.setattr(cache, "listeners", [lambda label, seconds: compiled.append(label)])
    advance, embed = (KernelSpec("advance", "advance"), KernelSpec("embed", "embed", (("WG", 64), ("WEIGHT_F16", 1))))
    other = replace(embed, defines=(("WG", 64), ("WEIGHT_F16", 0)))

    def cubins(*specs: KernelSpec, driver: str = "1") -> dict[KernelSpec, bytes]:
        compiled.clear()
        return compiler.Compiler("test", "sm_90a", "no device", driver, cache.KernelCache()).cubins(specs)

    first = cubins(advance, embed)
    assert sorted(compiled) == ["advance", "embed"]
    second = cubins(advance, embed, other)
    assert compiled == ["embed"]
    assert second == first | {other: second[other]}
    assert len({*second.values()}) == 3
    assert cubins(other, advance) == {other: second[other], advance: first[advance]}
    assert compiled == []
    assert cubins(advance, driver="2").keys() == {advance}
    assert compiled == ["advance"]


@pytest.mark.parametrize("group", [None, 64])
def test_codes_of_groups_get_their_sign_once(group: int | None) -> None:
    """In place: a second time would spoil them."""
    model = TinyModel(np.random.default_rng(), layers=2, ffn=256, group=group)
    program = model.program(LIMITS, 64)
    lowering, device = CudaOps(132, (9, 0)).lowering(), NoDevice()
    context = Context(device, program, StepLayout(program.limits))  # type: ignore[arg-type]
    for tokens in (1, 8, 64, 1024, 1):
        list(lower(context, Bucket(tokens, min(tokens, 64), 192), lowering.table))
    signed = [launch.args[0] for launch in device.launched if launch.kernel.file == "sign_codes"]
    products = {op.weights for op in program.ops if isinstance(op, TernaryMatmul)}
    codes = [context.ternary(names).codes for names in products] if group else []
    assert sorted(map(id, signed)) == sorted(map(id, codes))
