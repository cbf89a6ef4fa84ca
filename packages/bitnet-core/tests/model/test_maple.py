"""Files of Maple's kind: experts, windows, scales of rows, and every invalid value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.blocks import encode_blocks
from bitnet.core.hal import Attention, DenseWeight, ExpertMatmul, GluNormQuant, Limits, RopeAppend, TernaryWeight
from bitnet.core.hal.check import check_program
from bitnet.core.model import open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.model.experts import Experts, Windows
from bitnet.core.model.memory import token_bytes, weight_bytes
from bitnet.core.model.program import build_program

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 256, 4, 2, 64, 512, 300, 2
EXPERTS, USED, WINDOW, ROTARY = 6, 3, 40, 32
MATRICES: dict[str, tuple[int, ...]] = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate_exps": (EXPERTS, FFN, HIDDEN),
    "ffn_up_exps": (EXPERTS, FFN, HIDDEN),
    "ffn_down_exps": (EXPERTS, HIDDEN, FFN),
}
FLOATS: dict[str, tuple[int, ...]] = {
    "attn_norm": (HIDDEN,),
    "attn_q_norm": (HEAD_DIM,),
    "attn_k_norm": (HEAD_DIM,),
    "ffn_norm": (HIDDEN,),
    "ffn_gate_inp": (EXPERTS, HIDDEN),
}


class Rows:
    """A matrix of codes with a scale for each row, and its blocks of a type."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: GGMLType, size: int) -> None:
        n, k = int(np.prod(shape[:-1])), shape[-1]
        self.codes = rng.integers(0, 3, (n, k), np.uint8)
        self.scales = rng.uniform(0.01, 0.1, n).astype(np.float16)
        self.codes[1, :size] = 1  # a block of zeros, whose scale is 0 as converters write it
        blocks = self.scales.repeat(k // size)
        blocks[k // size] = 0
        if k == size:
            self.scales[1] = 0
        self.data = encode_blocks(dtype, self.codes.reshape(-1, size), blocks)
        self.source = TensorSource(shape, dtype, self.data)


SIZES = {GGMLType.TQ1_0: 256, GGMLType.TQ2_0: 256, GGMLType.Q2_0: 64, GGMLType.Q2_0_G128: 128}


class Maple:
    """Metadata and tensors of a model: a layer that attends to a window, and one that attends in full."""

    def __init__(self, tiny: Any, dtype: GGMLType = GGMLType.TQ2_0) -> None:
        rng = np.random.default_rng()
        self.file, self.metadata = tiny, tiny.metadata
        for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
            tiny.metadata.pop(f"maple.{key}", None)
        for key, value in {
            "embedding_length": HIDDEN,
            "block_count": LAYERS,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": np.array([True, False]),
            "expert_count": EXPERTS,
            "expert_used_count": USED,
            "expert_feed_forward_length": FFN,
            "rope.dimension_count": ROTARY,
        }.items():
            self.metadata[f"maple.{key}"] = value
        self.rows: dict[str, Rows] = {}
        tensors: dict[str, Any] = {
            "token_embd.weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float16),
            "output.weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float16),
            "output_norm.weight": rng.normal(size=HIDDEN).astype(np.float32),
        }
        for layer in range(LAYERS):
            for name, shape in MATRICES.items():
                made = self.rows[f"blk.{layer}.{name}"] = Rows(rng, shape, dtype, SIZES[dtype])
                tensors[f"blk.{layer}.{name}.weight"] = made.source
            for name, shape in FLOATS.items():
                tensors[f"blk.{layer}.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        tiny.tensors = self.tensors = tensors

    def open(self) -> Any:
        return self.file.open()


@pytest.fixture
def maple(tiny: Callable[..., Any]) -> Maple:
    return Maple(tiny("maple"))


def test_shape(maple: Maple) -> None:
    config = maple.open().config
    assert config.experts == Experts(EXPERTS, USED, (7.0, 7.0))
    assert config.windows == Windows(WINDOW, (True, False))
    assert (config.window(0), config.window(1), config.ffn_size, config.rotary_dim) == (WINDOW, None, FFN, ROTARY)
    assert config.head_norms
    assert not config.tied_embeddings


@pytest.mark.parametrize("dtype", SIZES)
def test_rows_share_a_scale(tiny: Callable[..., Any], dtype: GGMLType) -> None:
    """Whatever the blocks of the type: a scale for each row, and a block of zeros has none."""
    maple = Maple(tiny("maple"), dtype)
    file = maple.open()
    for name, rows in maple.rows.items():
        weight = file.weights[name]
        assert isinstance(weight, TernaryWeight)
        assert weight.group == weight.shape[1] == rows.codes.shape[1]
        data = weight.load()
        np.testing.assert_array_equal(data.scale[:, 0], rows.scales)
        values = (data.codes[..., None] >> np.array([6, 4, 2, 0])) & 3
        codes = values.reshape(len(rows.codes), -1, 32, 4).swapaxes(2, 3).reshape(rows.codes.shape)
        np.testing.assert_array_equal(codes, rows.codes)


def test_a_row_with_several_scales_is_an_error(maple: Maple) -> None:
    name = "blk.1.ffn_down_exps"
    data = maple.rows[name].data.copy()
    data[7, -2:] = np.array([0.5], "<f2").view(np.uint8)
    maple.tensors[f"{name}.weight"] = TensorSource(MATRICES["ffn_down_exps"], GGMLType.TQ2_0, data)
    weight = maple.open().weights[name]
    with pytest.raises(ModelFileError, match="row 3 has blocks with the scales") as caught:
        weight.load()
    assert caught.value.field == f"tensor '{name}.weight'"


def test_blocks_with_scales_of_their_own_are_kept(maple: Maple) -> None:
    """Where the first projection has several scales in a row, so may all."""
    rng = np.random.default_rng()
    for name, rows in maple.rows.items():
        data = rows.data.copy()
        data[:, -2:] = rng.uniform(0.01, 0.1, (len(data), 1)).astype("<f2").view(np.uint8)
        maple.tensors[f"{name}.weight"] = TensorSource(rows.source.shape, GGMLType.TQ2_0, data)
    weight = maple.open().weights["blk.0.ffn_up_exps"]
    assert weight.group == 256
    assert weight.load().scale.shape == (EXPERTS * FFN, 1)


def test_program(maple: Maple) -> None:
    file = maple.open()
    program = build_program(file.config, file.weights, limits=Limits(8, 1, 1, 4), num_blocks=4)
    check_program(program)
    attends = [op for op in program.ops if isinstance(op, Attention)]
    ropes = [op for op in program.ops if isinstance(op, RopeAppend)]
    assert [op.window for op in attends] == [WINDOW, None]
    assert [op.cos for op in ropes] == ["rope_cos", "still_cos"]
    still = program.weights["still_sin"]
    assert isinstance(still, DenseWeight)
    assert not still.load().any()
    glu = next(op for op in program.ops if isinstance(op, GluNormQuant))
    assert (glu.clamp, glu.parts) == (7.0, USED)
    assert sum(isinstance(op, ExpertMatmul) for op in program.ops) == 2 * LAYERS


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (7.0, (7.0, 7.0)),
        (np.array([5.0, 0.0], np.float32), (5.0, 0.0)),
        (np.array([1e-7, 2.0], np.float32), (0.0, 2.0)),
    ],
)
def test_limits_of_gates(maple: Maple, given: Any, limits: tuple[float, ...]) -> None:
    maple.metadata["maple.swiglu_clamp_exp"] = given
    config = maple.open().config
    assert config.experts.clamps == limits
    if 0.0 in limits:
        file = maple.open()
        program = build_program(file.config, file.weights, limits=Limits(8, 1, 1, 4), num_blocks=4)
        found = [op.clamp for op in program.ops if isinstance(op, GluNormQuant)]
        assert found == [limit or None for limit in limits]


def test_rotated_elements_of_windows_may_have_a_key_of_their_own(maple: Maple) -> None:
    maple.metadata["maple.rope.dimension_count"] = 0
    maple.metadata["maple.rope.dimension_count_swa"] = 16
    assert maple.open().config.rotary_dim == 16


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_gating_func", 1),
        ("expert_weights_norm", True),
        ("expert_weights_scale", 1.0),
        ("expert_shared_count", 0),
    ],
)
def test_keys_that_say_what_is_so(maple: Maple, key: str, value: Any) -> None:
    maple.metadata[f"maple.{key}"] = value
    maple.open()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 2, "only 1 is supported"),
        ("expert_weights_norm", False, "only True is supported"),
        ("expert_weights_scale", 2.5, "only 1 is supported"),
        ("expert_shared_count", 1, "only 0 is supported"),
        ("leading_dense_block_count", 1, "only 0 is supported"),
        ("expert_count", None, "missing"),
        ("expert_count", 5000, "the limit is 4096"),
        ("expert_used_count", None, "missing"),
        ("expert_used_count", 7, "is 7 of 6 experts"),
        ("expert_feed_forward_length", None, "missing"),
        ("attention.sliding_window", None, "missing"),
        ("attention.sliding_window", 0, "not a positive integer"),
        ("attention.sliding_window_pattern", None, "missing"),
        ("attention.sliding_window_pattern", np.array([True]), "has 1 values for 2 layers"),
        ("attention.sliding_window_pattern", np.array([1, 2], np.int32), "others than 0 and 1"),
        ("attention.sliding_window_pattern", 1, "not a list"),
        ("swiglu_clamp_exp", np.array([7.0], np.float32), "one for each of the 2 layers"),
        ("swiglu_clamp_exp", np.array([7.0, -1.0], np.float32), "not negative"),
        ("swiglu_clamp_exp", np.array([7.0, np.nan], np.float32), "finite"),
        ("swiglu_clamp_exp", "7", "must be a number"),
        ("rope.dimension_count", 31, "only the head's 64 elements"),
        ("block_count", 1025, "the limit is 1024"),
    ],
)
def test_invalid_values(maple: Maple, key: str, value: Any, message: str) -> None:
    maple.metadata.pop(f"maple.{key}", None)
    if value is not None:
        maple.metadata[f"maple.{key}"] = value
    with pytest.raises(ModelFileError, match=message) as caught:
        maple.open()
    assert caught.value.field == f"metadata 'maple.{key}'"


def test_experts_that_are_too_wide_together(maple: Maple) -> None:
    maple.metadata["maple.expert_feed_forward_length"] = 8192
    with pytest.raises(ModelFileError, match="makes a width of 24576 for a token"):
        maple.open()


@pytest.mark.parametrize("name", ["blk.1.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight", "output_norm.weight"])
def test_missing_tensors(maple: Maple, name: str) -> None:
    del maple.tensors[name]
    with pytest.raises(ModelFileError, match="is missing"):
        _ = maple.open().weights


def test_experts_of_another_number(maple: Maple) -> None:
    maple.metadata["maple.expert_count"] = EXPERTS - 1
    with pytest.raises(ModelFileError, match="according to the metadata"):
        _ = maple.open().weights


def test_shared_experts_are_refused(maple: Maple) -> None:
    maple.tensors["blk.0.ffn_gate_shexp.weight"] = maple.tensors["blk.0.attn_q.weight"]
    with pytest.raises(ModelFileError, match="is not part of the architecture maple"):
        _ = maple.open().weights


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0", "q2_0", "q2_0_g128"])
def test_convert(maple: Maple, tmp_path: Path, kind: str) -> None:
    """Every encoding holds the same codes and scales, and experts stay stacked."""
    source = maple.open()
    convert_model(source.path, tmp_path / "new.gguf", dtype=kind)
    made = open_model(tmp_path / "new.gguf")
    assert made.config.experts == source.config.experts
    for name in maple.rows:
        old, new = source.weights[name], made.weights[name]
        assert isinstance(new, TernaryWeight)
        assert (new.shape, new.group) == (old.shape, old.group)
        for a, b in zip(old.load(), new.load(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_token_reads_only_its_experts(maple: Maple) -> None:
    file = maple.open()
    weights = file.weights
    experts = sum(weights[n].shape[0] * (weights[n].shape[1] // 4 + 2) for n in maple.rows if n.endswith("_exps"))
    difference = weight_bytes(weights) - token_bytes(weights, file.config.experts)
    assert difference == experts * (EXPERTS - USED) // EXPERTS + (VOCAB - 1) * HIDDEN * 2
