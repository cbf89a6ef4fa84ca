"""The models that tests and measurements run are whole, repeatable, and of the shape they claim."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bitnet.core.gguf import GGMLType
from bitnet.core.gguf.types import tensor_bytes
from bitnet.core.hal import TernaryData
from bitnet.core.model import open_model
from bitnet.core.model.inspect import inspect_tensors
from make_random_model import ENCODINGS, make_model, metadata, tensors
from random_parts import vocabulary
from random_qwen35 import metadata as metadata_of_qwen35
from random_shapes import PRESETS, HunYuanShape, HybridShape


def test_the_2b4t_preset_is_the_official_files() -> None:
    shape = PRESETS["2b4t"]
    assert len(metadata(shape)) == 24
    found = dict(tensors(shape, 0))
    assert len(found) == 332
    ternary = sum(int(np.prod(t.shape)) for t in found.values() if t.type.name == "I2_S")
    assert ternary == 30 * (2 * 2560 * 2560 + 2 * 640 * 2560 + 3 * 6912 * 2560)
    assert found["token_embd.weight"].shape == (128_256, 2560)
    tokens, types, merges = vocabulary(shape.vocab)
    assert len(tokens) == len(set(tokens)) == len(types) == 128_256
    assert 250_000 < len(merges) == len(set(merges)) < 400_000


def test_a_small_model_opens(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    make_model(path, PRESETS["small"], seed=5)
    model = open_model(path)
    assert model.quantization == "I2_S"
    assert (model.config.layers, model.config.vocab_size) == (2, 512)
    for weight in model.weights.values():
        weight.load()
    assert not [report.warnings for report in inspect_tensors(model.gguf) if report.warnings]
    text = "the 1st cat, naïve 😀\n"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "hi"}]).endswith("<|eot_id|>Assistant: ")
    make_model(tmp_path / "b.gguf", PRESETS["small"], seed=5)
    assert (tmp_path / "b.gguf").read_bytes() == path.read_bytes()
    make_model(tmp_path / "c.gguf", PRESETS["small"], seed=6)
    assert (tmp_path / "c.gguf").read_bytes() != path.read_bytes()


def test_other_shapes(tmp_path: Path) -> None:
    shape = replace(PRESETS["small"], hidden=128, heads=8, kv_heads=8, head_dim=32, ffn=384, vocab=300, tied=False)
    make_model(tmp_path / "a.gguf", shape)
    model = open_model(tmp_path / "a.gguf")
    assert model.weights["blk.0.attn_q"].shape == (256, 128)
    assert not model.config.tied_embeddings
    assert model.tokenizer.vocab_size == 300


@pytest.mark.parametrize("encoding", ["tq1_0", "tq2_0", "q2_0"])
def test_a_small_hunyuan_opens(tmp_path: Path, encoding: str) -> None:
    shape = PRESETS["hunyuan-small"]
    assert isinstance(shape, HunYuanShape)
    make_model(tmp_path / "a.gguf", replace(shape, encoding=ENCODINGS[encoding]))
    model = open_model(tmp_path / "a.gguf")
    assert model.quantization == encoding.upper()
    assert (model.config.architecture, model.config.tied_embeddings, model.config.head_norms) == (
        "hunyuan-dense",
        True,
        True,
    )
    assert not [report.warnings for report in inspect_tensors(model.gguf) if report.warnings]
    text = "the 1234th cat, 日本 😀\n"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


@pytest.mark.parametrize("group", [64, 128])
def test_a_model_with_groups_opens(tmp_path: Path, group: int) -> None:
    shape = replace(PRESETS["bonsai-8b"], layers=1, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=384, vocab=300)
    make_model(tmp_path / "a.gguf", replace(shape, group=group))
    model = open_model(tmp_path / "a.gguf")
    assert model.quantization == {64: "Q2_0", 128: "Q2_0_G128"}[group]
    assert (model.config.architecture, model.config.tied_embeddings) == ("qwen3", False)
    assert not [report.warnings for report in inspect_tensors(model.gguf) if report.warnings]
    weight = model.weights["blk.0.ffn_down"].load()
    assert isinstance(weight, TernaryData)
    assert isinstance(weight.scale, np.ndarray)
    assert weight.scale.shape == (256, 384 // group)
    assert 0.5 <= weight.scale.astype(np.float64).min() / (1.5 / 384) ** 0.5 < weight.scale.max() / (1.5 / 384) ** 0.5


def test_the_bonsai_27b_preset_is_the_published_files() -> None:
    """Tensors by type, and the bytes of all matrices: those of Ternary-Bonsai-2 27B, PQ2_0 and PTQ1_0."""
    shape = PRESETS["bonsai-27b"]
    assert isinstance(shape, HybridShape)
    for encoding, size in ((GGMLType.PQ2_0, 34), (GGMLType.PTQ1_0, 28)):
        found = dict(tensors(replace(shape, encoding=encoding), 0))
        types = Counter(tensor.type.name for tensor in found.values())
        assert types == {encoding.name: 402, "F32": 353, "BF16": 96}
        published = {34: 7_206_168_928, 28: 5_946_648_928}[size]
        data = sum(tensor_bytes(tensor.type, tensor.shape) for tensor in found.values())
        assert 0 < published - data < 20_000_000  # the rest is metadata: a vocabulary and signs
    assert len(metadata_of_qwen35(shape, 0)["prism.hadamard.weight_names"]) == 401  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["pq2_0", "ptq1_0", "tq1_0", "tq2_0", "q2_0", "q2_0_g128", "q1_0"])
def test_a_small_bonsai_27b_opens(tmp_path: Path, encoding: str) -> None:
    shape = PRESETS["bonsai-27b-small"]
    assert isinstance(shape, HybridShape)
    make_model(tmp_path / "a.gguf", replace(shape, encoding=ENCODINGS[encoding]))
    model = open_model(tmp_path / "a.gguf")
    assert model.quantization == encoding.upper()
    assert model.config.hadamard is not None
    assert not [report.warnings for report in inspect_tensors(model.gguf) if report.warnings]
    assert model.tokenizer.decode(model.tokenizer.encode("naïve हिन्दी 😀\n")) == "naïve हिन्दी 😀\n"
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "hi"}]).endswith("assistant\n<think>\n")


def test_every_token_can_be_made() -> None:
    """Each token's letters are merged into it, so that a large vocabulary is used as one."""
    tokens, types, merges = vocabulary(5000)
    ids = {token: i for i, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": False}
    backend = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    for token, kind in zip(tokens, types, strict=True):
        if kind == 1:
            assert backend.encode(token).ids == [ids[token]]
