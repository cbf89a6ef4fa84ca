"""Model files of HunYuan's dense shape (Hy-MT): norms of q's and k's heads after the rotary embedding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.cli import main
from bitnet.core.engine.setup import refusals
from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.blocks import encode_blocks
from bitnet.core.hal import ROTATED_NORMS, DeviceInfo, KVDtype, Limits, RopeAppend, TernaryWeight
from bitnet.core.model import open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.model.hf_config import HFConfig
from bitnet.core.model.program import build_program
from bitnet.core.reference.device import NUMPY_INFO
from bitnet.core.text.vocabulary import HUNYUAN, HUNYUAN_END

SIZES = {GGMLType.STQ1_0: 256, GGMLType.TQ1_0: 256, GGMLType.TQ2_0: 256, GGMLType.Q2_0: 64}


class HunYuan:
    """Metadata and tensors; every matrix has 256 columns, so that all types of blocks can hold it."""

    def __init__(self, tiny: Any, dtype: GGMLType = GGMLType.STQ1_0) -> None:
        rng = np.random.default_rng()
        self.tiny, self.metadata, self.tensors = tiny, tiny.metadata, tiny.tensors
        self.codes: dict[str, np.ndarray] = {}
        sizes = {"embedding_length": 256, "attention.key_length": 64, "attention.value_length": 64}
        for key, value in {**sizes, "rope.dimension_count": 64, "rope.freq_base": 11_158_840.0}.items():
            self.metadata[f"hunyuan-dense.{key}"] = value
        self.metadata |= {"hunyuan-dense.rope.scaling.type": "none", "hunyuan-dense.rope.scaling.factor": 1.0}
        self.metadata["tokenizer.ggml.pre"] = "hunyuan-dense"
        self.tensors.clear()
        self.tensors["token_embd.weight"] = rng.normal(scale=0.05, size=(300, 256)).astype(np.float16)
        self.tensors["output_norm.weight"] = self.norm(256)
        shapes = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}
        for layer in range(2):
            for name, rows in (shapes | {"ffn_gate": 256, "ffn_up": 256, "ffn_down": 256}).items():
                self.matrix(rng, f"blk.{layer}.{name}", rows, dtype)
            for name, size in (("attn_norm", 256), ("ffn_norm", 256), ("attn_q_norm", 64), ("attn_k_norm", 64)):
                self.tensors[f"blk.{layer}.{name}.weight"] = self.norm(size)

    def matrix(self, rng: np.random.Generator, name: str, rows: int, dtype: GGMLType) -> None:
        fours = np.argsort(rng.random((rows * 256 // 4, 4)), axis=1) == 0  # one zero of four, which all types can hold
        codes = np.where(fours, 1, rng.choice([0, 2], fours.shape)).astype(np.uint8)
        self.codes[name] = codes.reshape(-1, 16, 4).swapaxes(1, 2).reshape(rows, 256)
        blocks = self.codes[name].reshape(-1, SIZES[dtype])
        scales = rng.uniform(0.5, 1.5, len(blocks)).astype(np.float16) / np.float16(16)
        self.tensors[f"{name}.weight"] = TensorSource((rows, 256), dtype, encode_blocks(dtype, blocks, scales))

    @staticmethod
    def norm(size: int) -> np.ndarray:
        return np.random.default_rng().uniform(0.5, 1.5, size).astype(np.float32)

    def open(self) -> Any:
        return self.tiny.open()


@pytest.fixture
def hunyuan(tiny: Callable[..., Any]) -> HunYuan:
    return HunYuan(tiny("hunyuan-dense"))


@pytest.mark.parametrize("dtype", SIZES)
def test_a_file_of_each_type(tiny: Callable[..., Any], dtype: GGMLType) -> None:
    model = HunYuan(tiny("hunyuan-dense"), dtype)
    file = model.open()
    config = file.config
    assert (config.head_norms, config.rope_style, config.activation, config.tied_embeddings) == (
        True,
        "neox",
        "silu",
        True,
    )
    assert (config.rope_theta, config.rope_scaling, config.rope_freq_factors) == (11_158_840.0, None, None)
    for name, codes in model.codes.items():
        weight = file.weights[name]
        assert isinstance(weight, TernaryWeight)
        found = (weight.load().codes[..., None] >> np.array([6, 4, 2, 0])) & 3
        np.testing.assert_array_equal(found.reshape(len(codes), -1, 32, 4).swapaxes(2, 3).reshape(codes.shape), codes)
    program = build_program(config, file.weights, limits=Limits(4, max_blocks=2), num_blocks=2)
    ropes = [op for op in program.ops if isinstance(op, RopeAppend)]
    assert [(op.norms_last, op.q_norm) for op in ropes] == [(True, f"blk.{i}.attn_q_norm") for i in range(2)]


def test_devices_agree_and_the_order_counts(hunyuan: HunYuan) -> None:
    """The same tokens on the CPU and with numpy; as a Qwen 3, whose norms come first, the file answers otherwise."""
    prompts = [np.random.default_rng().integers(0, 256, 12).tolist() for _ in range(12)]
    path = hunyuan.tiny.write()

    def answers(path: Path, device: str) -> list[list[int]]:
        with load_model(path, device=device, kv_dtype="f32") as model:
            return [
                list(model.generate(prompt, max_tokens=5, temperature=0, ignore_eos=True).tokens) for prompt in prompts
            ]

    found = answers(path, "cpu")
    # 1 answer of 360 parted, where two tokens were nearly tied: 3 of 12 do once in 200,000 times.
    assert sum(a == b for a, b in zip(found, answers(path, "cpu:numpy"), strict=True)) >= 10
    metadata = {k.replace("hunyuan-dense.", "qwen3."): v for k, v in hunyuan.metadata.items()}
    hunyuan.metadata.clear()
    hunyuan.metadata |= metadata | {"general.architecture": "qwen3"}
    assert answers(hunyuan.tiny.write(), "cpu") != found


@pytest.mark.nightly(unless_changed=("kernels", "packages/bitnet-core/src/bitnet/core/gpu"))
@pytest.mark.parametrize("kv_dtype", ["f16", "i8"])
def test_gpus_agree(hunyuan: HunYuan, gpus: Sequence[DeviceInfo], kv_dtype: KVDtype) -> None:
    """The CPU's tokens, in deterministic mode, on every device that has the operation."""
    prompts = [np.random.default_rng().integers(0, 256, length).tolist() for length in (1, 5, 12, 20, 33, 40) * 4]
    path = hunyuan.tiny.write()

    def answers(device: str) -> list[list[int]]:
        with load_model(path, device=device, kv_dtype=kv_dtype, deterministic=True) as model:
            completed = model.generate_batch(prompts, max_tokens=5, temperature=0, ignore_eos=True)
        return [list(answer.tokens) for answer in completed]

    expected = answers("cpu")
    for info in gpus:
        if ROTATED_NORMS in info.features:
            same = [a == b for a, b in zip(expected, answers(info.name), strict=True)]
            assert sum(same) >= 20, (info.name, same)  # near ties


@pytest.mark.parametrize("name", ["attn_q_norm", "attn_k_norm"])
def test_a_missing_norm_is_named(hunyuan: HunYuan, name: str) -> None:
    for layer in range(2):
        del hunyuan.tensors[f"blk.{layer}.{name}.weight"]
    with pytest.raises(ModelFileError, match="is missing") as caught:
        hunyuan.open()
    assert caught.value.field == f"tensor 'blk.0.{name}.weight'"


def test_devices_without_them_say_so(hunyuan: HunYuan) -> None:
    (why,) = refusals(hunyuan.open(), [replace(NUMPY_INFO, features=())]).values()
    assert why == "it computes no norms of heads after the rotary embedding."


def test_inspect_tells(hunyuan: HunYuan, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(hunyuan.tiny.write())]) == 0
    said = capsys.readouterr().out
    assert "(hunyuan-dense, HunYuan (Hy-MT))" in said
    assert "norms of heads after their rotation" in said
    assert "feed-forward layers STQ1_0" in said
    assert "of which a token reads" in said


def test_an_end_token_that_is_text(hunyuan: HunYuan) -> None:
    """Old files name the token 3, ``$``: an answer does not end at it, but at HunYuan's own token."""
    tokens = hunyuan.metadata["tokenizer.ggml.tokens"]
    hunyuan.metadata["tokenizer.ggml.eos_token_id"] = 3
    hunyuan.metadata["tokenizer.ggml.tokens"] = [*tokens, HUNYUAN_END]
    types = hunyuan.metadata["tokenizer.ggml.token_type"]
    hunyuan.metadata["tokenizer.ggml.token_type"] = np.array([*types, 3], np.int32)
    tokenizer = hunyuan.open().tokenizer
    assert len(tokens) in tokenizer.eos_ids
    assert 3 not in tokenizer.eos_ids


def test_convert_keeps_everything(hunyuan: HunYuan, tmp_path: Path) -> None:
    source = hunyuan.open()
    convert_model(source.path, tmp_path / "new.gguf", dtype="tq2_0")
    made = open_model(tmp_path / "new.gguf")
    assert made.config == replace(source.config, name=made.config.name)
    assert made.gguf.metadata["tokenizer.ggml.pre"] == HUNYUAN
    for name in hunyuan.codes:
        for a, b in zip(source.weights[name].load(), made.weights[name].load(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("rope", "base"),
    [
        ({"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10_000.0}, 11_158_839.925),
        ({"type": "dynamic", "alpha": 50, "factor": 1.0}, 10_000 * 50 ** (128 / 126)),
        ({"rope_type": "dynamic", "factor": 2.0}, 10_000),
        ({"rope_type": "default", "alpha": 1000.0}, 10_000),
    ],
)
def test_ntk_base(tmp_path: Path, rope: dict[str, Any], base: float) -> None:
    """An alpha stretches the base once, whatever the position; nothing else of ``dynamic`` counts."""
    values = {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 128, "rope_scaling": rope}
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    config = HFConfig(tmp_path)
    assert config.model.rope_theta == pytest.approx(base, rel=1e-9)
    assert config.rope() == ({}, {})


@pytest.mark.parametrize("alpha", [0, -1.0, "big", 1e38])
def test_an_alpha_that_makes_no_base(tmp_path: Path, alpha: object) -> None:
    rope = {"rope_type": "dynamic", "alpha": alpha}
    values = {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 128, "rope_scaling": rope}
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    with pytest.raises(ModelFileError) as caught:
        HFConfig(tmp_path)
    assert caught.value.field == "alpha"
