"""Bombs in files and folders of Qwen3.5's kind: layers, heads, convolutions, transforms, signs and types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import random_qwen35
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.types import tensor_bytes
from bombs.base import GGUF
from bombs.family import FOLDER_DOORS, Door, Family
from random_shapes import PRESETS, HybridShape

MB = 1 << 20
GREATEST = 2**31 - 1
_SMALL = PRESETS["bonsai-27b-small"]
assert isinstance(_SMALL, HybridShape)
SHAPE = replace(_SMALL, layers=2, interval=2, ffn=256, context=64)
FIRST: tuple[Door, ...] = ("inspect",)
"""Where a file whose metadata are refused is brought to: all doors read them the same way."""


class Hybrid(GGUF):
    """Metadata and tensors of a small hybrid model, to be changed and written."""

    def __post_init__(self) -> None:
        self.metadata = random_qwen35.metadata(SHAPE, 0)
        self.tensors = dict(random_qwen35.tensors(SHAPE, 0))


def families() -> Iterator[Family]:
    """Every family of this file."""
    yield Family("hybrid: sound", _file(lambda keys, tensors: None), None)
    for name, key, value, refused in _shapes():
        yield Family(f"hybrid: {name}", _key(f"qwen35.{key}", value), refused, FIRST)
    for name, key, value, refused in _transforms():
        yield Family(f"hybrid: {name}", _key(f"prism.hadamard.{key}", value), refused, FIRST)
    yield Family("hybrid: a million heads", _file(_many_heads), "the limit is", FIRST)
    yield Family("hybrid: 60,000 transforms by other names", _file(_many_keys), "is not known", FIRST)
    yield Family("hybrid: 20,000 tensors of a vision tower", _file(_vision), None, ("inspect", "convert"))
    yield Family("hybrid: a layer of 60 digits", _file(_far_layer), "not part of", FIRST)
    yield Family("hybrid: gates of a packed type", _file(_packed_gates), "cannot be read as numbers", FIRST)
    yield Family("hybrid: a convolution of a million taps", _file(_long_convolution), "has the shape", FIRST)
    yield Family("hybrid: weights of 1 bit with infinite scales", _file(_infinite), "not finite", ("convert",))
    for name, change, ends in _folders():
        yield Family(f"convert: {name}", _folder(change), ends, FOLDER_DOORS)


def _shapes() -> Iterator[tuple[str, str, Callable[[], Any], str]]:
    yield "2^31 layers", "block_count", lambda: GREATEST, "the limit is 1024"
    yield "1000 layers", "block_count", lambda: 1000, "lacks"
    yield "no layer that attends", "full_attention_interval", lambda: GREATEST, "one kind"
    yield "no recurrent layer", "full_attention_interval", lambda: 1, "one kind"
    yield "16 million layers by name", "attention.recurrent_layers", lambda: np.zeros(16 * MB, np.bool_), "one kind"
    yield "a million layers by text", "attention.recurrent_layers", lambda: ["yes"] * MB, "one truth value"
    yield "2^31 key heads", "ssm.group_count", lambda: GREATEST, "not a multiple"
    yield "2^31 value heads", "ssm.time_step_rank", lambda: GREATEST, "not a multiple"
    yield "values of 2^31", "ssm.inner_size", lambda: 6 * 2**28, "at most 1024"
    yield "states of 2^31", "ssm.state_size", lambda: GREATEST - 3, "at most 1024"
    yield "2^31 taps", "ssm.conv_kernel", lambda: GREATEST, "taps"
    yield "2^31 rotated elements", "rope.dimension_count", lambda: GREATEST - 1, "dimension_count"
    yield "layers for further tokens by an array", "nextn_predict_layers", lambda: np.arange(MB), "values that differ"
    yield "2^31 layers for further tokens", "nextn_predict_layers", lambda: GREATEST, "nextn_predict_layers"


def _transforms() -> Iterator[tuple[str, str, Callable[[], Any], str]]:
    yield "blocks of 2^30", "block_size", lambda: 2**30, "power of two"
    yield "8 million signs", "sign_values", lambda: np.ones(8 * MB, np.int8), "signs for rows"
    yield "signs that are zero", "sign_values", lambda: np.zeros(1536, np.int8), "other than 1 and -1"
    yield "a million widths", "sign_widths", lambda: np.arange(MB, dtype=np.int32), "rows of products"
    yield "a width of 2^62", "sign_widths", lambda: np.array([256, 512, 2**62]), "rows of products"
    yield "300,000 folded weights", "weight_names", lambda: [f"w{i}" for i in range(300_000)], "lacks"
    yield "a million folded weights of no name", "weight_names", lambda: [""] * MB, "twice"
    yield "300,000 tables", "inverse_weight_names", lambda: [f"w{i}" for i in range(300_000)], "only token_embd"
    yield "a transform of 8 MB", "transform", lambda: "x" * (8 * MB), "is not supported"
    yield "a version of 8 MB", "version", lambda: "1" * (8 * MB), "not a positive integer"


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def _file(change: Change) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = Hybrid()
        change(model.metadata, model.tensors)
        return model.write(folder)

    return make


def _key(key: str, value: Callable[[], Any]) -> Callable[[Path], Path]:
    return _file(lambda keys, tensors: keys.update({key: value()}))


def _many_heads(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    keys |= {"qwen35.ssm.time_step_rank": MB, "qwen35.ssm.inner_size": 4 * MB}


def _many_keys(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    keys |= {f"prism.hadamard.{i}": 1 for i in range(60_000)}


def _vision(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors |= {f"v.{i}": np.ones(8, np.float32) for i in range(20_000)}


def _far_layer(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors[f"blk.{'9' * 55}.a"] = np.ones(8, np.float32)


def _packed_gates(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    shape = (SHAPE.v_heads, SHAPE.hidden)
    data = np.zeros(tensor_bytes(GGMLType.I2_S, shape), np.uint8)
    tensors["blk.0.ssm_alpha.weight"] = TensorSource(shape, GGMLType.I2_S, data)


def _long_convolution(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["blk.0.ssm_conv1d.weight"] = np.zeros((4, MB), np.float16)


def _infinite(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    data = np.full(tensor_bytes(GGMLType.Q1_0, (SHAPE.ffn, SHAPE.hidden)), 0x7C, np.uint8)
    data.reshape(-1, 18)[:, 0] = 0
    tensors["blk.0.ffn_up.weight"] = TensorSource((SHAPE.ffn, SHAPE.hidden), GGMLType.Q1_0, data)


def _folder(change: Callable[[dict[str, Any], Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        target = folder / "bomb"
        random_qwen35.write_folder(target, SHAPE, 0, "mlx")
        config = json.loads((target / "config.json").read_text())
        change(config, target)
        (target / "config.json").write_text(json.dumps(config))
        return target

    return make


def _text(**changes: Any) -> Callable[[dict[str, Any], Path], None]:
    return lambda config, folder: config["text_config"].update(changes)


def _outer(key: str, value: Callable[[], Any]) -> Callable[[dict[str, Any], Path], None]:
    return lambda config, folder: config.update({key: value()})


def _folders() -> Iterator[tuple[str, Callable[[dict[str, Any], Path], None], str | None]]:
    yield "hybrid: sound", lambda config, folder: None, None
    yield "hybrid: 2^31 layers", _text(num_hidden_layers=GREATEST), "the limit is 1024"
    yield "hybrid: 300,000 layers by name", _text(layer_types=["linear_attention"] * 300_000), "layer_types"
    yield "hybrid: 2^31 value heads", _text(linear_num_value_heads=GREATEST - 1), "the limit is"
    yield "hybrid: 2^31 taps", _text(linear_conv_kernel_dim=GREATEST), "taps"
    yield "hybrid: configurations in configurations", _text(text_config={"text_config": {}}), None
    paths = [{"path": f"model.layers.{i}", "block": 2 ** (i % 40), "embedding": False} for i in range(50_000)]
    yield "hybrid: 50,000 modules with transforms", _outer("modules", lambda: paths), "no tensor of its signs"
    yield "hybrid: a module of a megabyte", _outer("modules", lambda: [{"path": "x" * MB, "block": 1}]), "signs"
