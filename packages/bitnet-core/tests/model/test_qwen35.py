"""Files of Qwen3.5's kind: which layers are recurrent, their shapes, folded transforms, and every invalid value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import BitNetError, ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource, write_gguf
from bitnet.core.hal import DenseWeight, Limits, TernaryWeight
from bitnet.core.hal.check import check_program
from bitnet.core.model import open_model
from bitnet.core.model.delta_net import DeltaNet
from bitnet.core.model.program import build_program

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 128, 4, 2, 64, 384, 300
K_HEADS, V_HEADS, DIM, TAPS, LAYERS = 2, 6, 64, 4, 3
VALUES = V_HEADS * DIM
CONV = 2 * K_HEADS * DIM + VALUES
PRODUCTS = {
    False: {
        "attn_q": (2 * HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    },
    True: {"attn_qkv": (CONV, HIDDEN), "attn_gate": (VALUES, HIDDEN), "ssm_out": (HIDDEN, VALUES)},
}
FLOATS: dict[bool, dict[str, tuple[int, ...]]] = {
    False: {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)},
    True: {
        "ssm_conv1d.weight": (CONV, TAPS),
        "ssm_alpha.weight": (V_HEADS, HIDDEN),
        "ssm_beta.weight": (V_HEADS, HIDDEN),
        "ssm_dt.bias": (V_HEADS,),
        "ssm_a": (V_HEADS,),
        "ssm_norm.weight": (DIM,),
    },
}
FEED_FORWARD = {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}


def pq2_0(rng: np.random.Generator, shape: tuple[int, int]) -> TensorSource:
    blocks = shape[0] * shape[1] // 128
    data = np.empty((blocks, 34), np.uint8)
    data[:, :2] = rng.uniform(0.05, 0.1, (blocks, 1)).astype("<f2").view(np.uint8)
    codes = rng.integers(0, 3, (blocks, 32, 4), np.uint8)
    data[:, 2:] = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2)
    return TensorSource(shape, GGMLType.PQ2_0, data)


class Hybrid:
    """Metadata and tensors of a model: a recurrent layer, one that attends, and another recurrent one."""

    def __init__(self, tiny: Any) -> None:
        rng = np.random.default_rng()
        self.file = tiny
        self.metadata: dict[str, Any] = tiny.metadata
        for key, value in {
            "block_count": LAYERS,
            "feed_forward_length": FFN,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "full_attention_interval": 2,
            "rope.dimension_count": 16,
            "rope.dimension_sections": np.array([3, 3, 2, 0], np.int32),
            "ssm.conv_kernel": TAPS,
            "ssm.state_size": DIM,
            "ssm.group_count": K_HEADS,
            "ssm.time_step_rank": V_HEADS,
            "ssm.inner_size": VALUES,
        }.items():
            self.metadata[f"qwen35.{key}"] = value
        tensors: dict[str, Any] = {
            "token_embd.weight": pq2_0(rng, (VOCAB, HIDDEN)),
            "output.weight": pq2_0(rng, (VOCAB, HIDDEN)),
            "output_norm.weight": rng.normal(size=HIDDEN).astype(np.float32),
        }
        for layer in range(LAYERS):
            block, recurrent = f"blk.{layer}.", layer != 1
            for name, shape in (PRODUCTS[recurrent] | FEED_FORWARD).items():
                tensors[f"{block}{name}.weight"] = pq2_0(rng, shape)
            floats = FLOATS[recurrent] | dict.fromkeys(("attn_norm.weight", "post_attention_norm.weight"), (HIDDEN,))
            for name, size in floats.items():
                tensors[block + name] = rng.normal(size=size).astype(np.float32)
        tiny.tensors = self.tensors = tensors

    def fold(self, block: int = 128) -> None:
        """Say that transforms are folded into the products, head and embedding."""
        widths = [HIDDEN, HEADS * HEAD_DIM, VALUES, FFN]
        signs = np.random.default_rng().choice(np.array([-1, 1], np.int32), sum({*widths}))
        products = [name for name, t in self.tensors.items() if isinstance(t, TensorSource) and "embd" not in name]
        for key, value in {
            "version": 1,
            "block_size": block,
            "transform": "normalized-sylvester-walsh-hadamard",
            "axis": "input-last-dimension",
            "sign_mode": "explicit",
            "sign_widths": np.array(sorted({*widths}), np.int32),
            "sign_values": signs,
            "weight_names": products,
            "inverse_weight_names": ["token_embd.weight"],
            "gdn_v_grouped": True,
        }.items():
            self.metadata[f"prism.hadamard.{key}"] = value

    def open(self) -> Any:
        return self.file.open()


@pytest.fixture
def hybrid(tiny: Callable[..., Any]) -> Hybrid:
    return Hybrid(tiny("qwen35"))


def test_shape(hybrid: Hybrid) -> None:
    file = hybrid.open()
    config = file.config
    assert config.delta_net == DeltaNet((True, False, True), K_HEADS, V_HEADS, DIM, DIM, TAPS)
    assert (config.rotary_dim, config.rotated, config.output_gate, config.hadamard) == (16, 16, True, None)
    assert (config.attention_layers, config.recurrent(0), config.recurrent(1)) == (1, True, False)
    assert config.delta_net.state_bytes == 2 * 4 * (V_HEADS * DIM * DIM + CONV * 3)
    for layer in range(LAYERS):
        for name in PRODUCTS[layer != 1] | FEED_FORWARD:
            assert isinstance(file.weights[f"blk.{layer}.{name}"], TernaryWeight)
    alpha = file.weights["blk.0.ssm_alpha"]
    assert isinstance(alpha, DenseWeight)
    assert alpha.dtype == "f32"
    np.testing.assert_array_equal(alpha.load(), hybrid.tensors["blk.0.ssm_alpha.weight"])


def test_heads_are_reordered() -> None:
    """Three value heads for each of two key heads: 0 1 2 belong to key head 0, 3 4 5 to key head 1."""
    assert DeltaNet((True, False), 2, 6, 4, 4, 4).grouped_heads.tolist() == [0, 3, 1, 4, 2, 5]
    assert DeltaNet((True, False), 3, 3, 4, 4, 4).grouped_heads.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [np.bool_, np.int32, np.uint32])
def test_layers_by_name(hybrid: Hybrid, kind: Any) -> None:
    del hybrid.metadata["qwen35.full_attention_interval"]
    hybrid.metadata["qwen35.attention.recurrent_layers"] = np.array([1, 0, 1], kind)
    assert hybrid.open().config.delta_net.recurrent == (True, False, True)


def test_layers_that_predict_further_tokens_and_vision_towers_are_not_run(hybrid: Hybrid) -> None:
    hybrid.metadata |= {"qwen35.block_count": LAYERS + 1, "qwen35.nextn_predict_layers": 1}
    hybrid.tensors["blk.3.nextn.eh_proj.weight"] = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    hybrid.tensors["v.blk.0.attn_q.weight"] = np.zeros((8, 8), np.float32)
    assert hybrid.open().config.layers == LAYERS


@pytest.mark.parametrize("folded", [False, True])
def test_programs(hybrid: Hybrid, folded: bool) -> None:
    """Every weight of the file is in the program, and every product has a transform before it or none has."""
    if folded:
        hybrid.fold()
    file = hybrid.open()
    program = build_program(file.config, file.weights, limits=Limits(4, max_blocks=2), num_blocks=2, state_entries=3)
    check_program(program)
    assert set(file.weights) <= set(program.weights)
    named = {str(value) for op in program.ops for field in fields(op) for value in _listed(getattr(op, field.name))}
    assert set(program.weights) - {"hadamard_signs.384", "hadamard_signs.256", "hadamard_signs.128"} <= named
    assert {spec.entries for spec in program.states.values()} == {3}
    assert sum(spec.bytes for spec in program.states.values()) == 3 * file.config.delta_net.state_bytes
    transforms = [op.transform for op in program.ops if hasattr(op, "transform")]
    assert all(transforms) if folded else not any(transforms)


def _listed(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)


def test_an_mmproj_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    write_gguf(path, {"general.architecture": "clip"}, {"v.patch_embd.weight": np.zeros((8, 8), np.float32)})
    with pytest.raises(ModelFileError, match=r"vision encoder \(mmproj\).*language model's own file"):
        open_model(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("full_attention_interval", 1, "all layers of one kind"),
        ("full_attention_interval", 4, "all layers of one kind"),
        ("full_attention_interval", 0, "not a positive integer"),
        ("attention.recurrent_layers", np.array([True, False]), "2 values for 3 layers"),
        ("attention.recurrent_layers", np.array([1, 0, 2], np.int32), "others than 0 and 1"),
        ("attention.recurrent_layers", np.array([1, 1, 1], np.int32), "all layers of one kind"),
        ("attention.recurrent_layers", ["a", "b", "c"], "one truth value for each layer"),
        ("block_count", 2**31 - 1, "the limit is 1024"),
        ("nextn_predict_layers", 3, "is 3 of 3 layers"),
        ("nextn_predict_layers", -1, "not a positive integer"),
        ("ssm.group_count", 4, "not a multiple of 4 key heads"),
        ("ssm.group_count", 0, "not a positive integer"),
        ("ssm.inner_size", 385, "not a multiple of the 6 value heads"),
        ("ssm.state_size", 2**30, "at most 1024"),
        ("ssm.state_size", 66, "a multiple of 4"),
        ("ssm.inner_size", 6 * 512 * 4, "at most 1024"),
        ("ssm.inner_size", 6 * 66, "a multiple of 4"),
        ("ssm.conv_kernel", 1, "taps"),
        ("ssm.conv_kernel", 2**30, "taps"),
        ("rope.dimension_count", 15, "only the head's 64 elements"),
        ("rope.dimension_count", 66, "only the head's 64 elements"),
        ("rope.dimension_count", 0, "not a positive integer"),
    ],
)
def test_shapes_that_are_refused(hybrid: Hybrid, key: str, value: Any, message: str) -> None:
    hybrid.metadata[f"qwen35.{key}"] = value
    with pytest.raises(ModelFileError, match=message) as caught:
        hybrid.open()
    assert f"'qwen35.{key}'" in str(caught.value)


def test_wide_heads_are_refused(hybrid: Hybrid) -> None:
    hybrid.metadata |= {"qwen35.ssm.time_step_rank": 2**14, "qwen35.ssm.inner_size": 2**14 * 64}
    with pytest.raises(ModelFileError, match="the limit is 8192"):
        hybrid.open()


def test_transforms(hybrid: Hybrid) -> None:
    hybrid.fold()
    found = hybrid.open().config.hadamard
    assert (found.block, found.embedding, found.head, found.v_grouped) == (128, True, True, True)
    values = hybrid.metadata["prism.hadamard.sign_values"]
    assert sorted(found.signs) == [128, 256, 384]
    np.testing.assert_array_equal(found.signs[256], values[128:384])


def test_transforms_without_signs(hybrid: Hybrid) -> None:
    hybrid.fold()
    for key in ("sign_widths", "sign_values"):
        del hybrid.metadata[f"prism.hadamard.{key}"]
    hybrid.metadata["prism.hadamard.sign_mode"] = "identity"
    assert hybrid.open().config.hadamard.signs == {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, None, "is missing") for key in ("version", "transform", "axis", "sign_mode", "block_size")),
        *((key, None, "is missing") for key in ("sign_widths", "sign_values", "weight_names", "gdn_v_grouped")),
        ("version", 2, "only 1 is supported"),
        ("version", "1", "not a positive integer"),
        ("transform", "discrete-cosine", "is not supported"),
        ("axis", "output", "is not supported"),
        ("sign_mode", "random", "is not supported"),
        ("sign_mode", "identity", "not allowed"),
        ("block_size", 256, "does not divide rows of 128 columns"),
        ("block_size", 96, "power of two"),
        ("block_size", 2, "power of two"),
        ("block_size", 2**30, "power of two"),
        ("sign_widths", np.array([128, 256], np.int32), "rows of products have"),
        ("sign_widths", np.array([128, 256, 2**62], np.int64), "rows of products have"),
        ("sign_widths", ["128"], "not a list of integers"),
        ("sign_widths", np.array([128, 256], np.float64), "not a list of integers"),
        ("sign_values", np.ones(3, np.int8), "has 3 signs"),
        ("sign_values", np.zeros(768, np.int8), "other than 1 and -1"),
        ("sign_values", np.full(768, np.nan, np.float32), "other than 1 and -1"),
        ("weight_names", [], "names no weight"),
        ("weight_names", "all", "not a list of tensors' names"),
        ("weight_names", ["blk.0.attn_qkv.weight"] * 2, "twice"),
        ("weight_names", ["blk.0.attn_qkv.weight"], "lacks"),
        ("inverse_weight_names", ["output.weight"], "only token_embd.weight"),
        ("gdn_v_grouped", 1, "not a truth value"),
        ("rounding", "stochastic", "is not known"),
    ],
)
def test_transforms_that_are_refused(hybrid: Hybrid, key: str, value: Any, message: str) -> None:
    hybrid.fold()
    hybrid.metadata[f"prism.hadamard.{key}"] = value
    hybrid.metadata = {key: value for key, value in hybrid.metadata.items() if value is not None}
    hybrid.file.metadata = hybrid.metadata
    with pytest.raises(BitNetError, match=message) as caught:
        hybrid.open()
    assert key in str(caught.value) or key == "block_size"


def test_a_transform_of_more_than_the_products_is_refused(hybrid: Hybrid) -> None:
    hybrid.fold()
    hybrid.metadata["prism.hadamard.weight_names"].append("blk.0.ssm_alpha.weight")
    with pytest.raises(ModelFileError, match=r"has 'blk.0.ssm_alpha.weight'"):
        hybrid.open()


def test_a_transform_of_tied_embeddings_is_refused(hybrid: Hybrid) -> None:
    hybrid.fold()
    del hybrid.tensors["output.weight"]
    with pytest.raises(ModelFileError, match="head is its embedding"):
        hybrid.open()
