"""Bombs in files of Maple's kind: experts, routers, windows and limits of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import random_maple
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.types import tensor_bytes
from bombs.base import GGUF
from bombs.family import Door, Family
from random_shapes import PRESETS, ExpertShape

MB = 1 << 20
GREATEST = 2**31 - 1
_SMALL = PRESETS["maple-small"]
assert isinstance(_SMALL, ExpertShape)
SHAPE = replace(_SMALL, layers=2, interval=2, experts=4, used=2, context=64)
FIRST: tuple[Door, ...] = ("inspect",)
"""Where a file whose metadata are refused is brought to: all doors read them the same way."""
PATTERN = "attention.sliding_window_pattern"
Change = Callable[[dict[str, Any], dict[str, Any]], None]


class Mixture(GGUF):
    """Metadata and tensors of a small mixture of experts, to be changed and written."""

    def __post_init__(self) -> None:
        self.metadata = dict(random_maple.metadata(SHAPE))
        self.tensors = dict(random_maple.tensors(SHAPE, 0))


def families() -> Iterator[Family]:
    """Every family of this file."""
    yield Family("experts: sound", _file(lambda keys, tensors: None), None, ("inspect", "run"))
    for name, key, value, refused in _keys():
        yield Family(f"experts: {name}", _file(_key(f"maple.{key}", value)), refused, FIRST)
    for name, change, refused in _tensors():
        yield Family(f"experts: {name}", _file(change), refused, FIRST)


def _keys() -> Iterator[tuple[str, str, Callable[[], Any], str]]:
    yield "2^31 experts", "expert_count", lambda: GREATEST, "the limit is 4096"
    yield "4096 experts without weights", "expert_count", lambda: 4096, "has the shape"
    yield "no expert", "expert_count", lambda: 0, "expert_count"
    yield "experts by text", "expert_count", lambda: "4" * MB, "expert_count"
    yield "2^31 experts a token", "expert_used_count", lambda: GREATEST, "the limit is"
    yield "more experts a token than there are", "expert_used_count", lambda: 5, "of 4 experts"
    yield "no expert a token", "expert_used_count", lambda: 0, "expert_used_count"
    yield "experts of 2^31", "expert_feed_forward_length", lambda: GREATEST - 3, "feed_forward_length"
    yield "experts of no width", "expert_feed_forward_length", lambda: 0, "feed_forward_length"
    yield "2^31 shared experts", "expert_shared_count", lambda: GREATEST, "only 0 is supported"
    yield "2^31 groups of experts", "expert_group_count", lambda: GREATEST, "only 1 is supported"
    yield "a router of another function", "expert_gating_func", lambda: GREATEST, "only 1 is supported"
    yield "routers by an array", "expert_weights_norm", lambda: np.arange(MB, dtype=np.int32), "values that differ"
    yield "scales of experts by text", "expert_weights_scale", lambda: ["1"] * MB, "only 1 is supported"
    yield "a window of 2^31", "attention.sliding_window", lambda: 2**63, "sliding_window"
    yield "a window of nothing", "attention.sliding_window", lambda: 0, "sliding_window"
    yield "a negative window", "attention.sliding_window", lambda: -1, "sliding_window"
    yield "8 million layers with windows", PATTERN, lambda: np.ones(8 * MB, np.bool_), "values for"
    yield "windows by text", PATTERN, lambda: ["yes"] * MB, "one truth value"
    yield "windows that are no truth values", PATTERN, lambda: np.array([2, 0]), "others than"
    yield "8 million limits", "swiglu_clamp_exp", lambda: np.ones(8 * MB, np.float32), "swiglu_clamp_exp"
    yield "limits that are not finite", "swiglu_clamp_exp", lambda: np.array([np.nan, np.inf]), "negative and finite"
    yield "limits by text", "swiglu_clamp_exp", lambda: ["7"] * MB, "swiglu_clamp_exp"
    yield "2^31 layers", "block_count", lambda: GREATEST, "the limit is"
    yield "2^31 rotated elements", "rope.dimension_count", lambda: GREATEST - 1, "dimension_count"


def _tensors() -> Iterator[tuple[str, Change, str]]:
    experts, ffn, hidden = SHAPE.experts, SHAPE.ffn, SHAPE.hidden
    router = experts, hidden
    yield "a router of 2^20 experts", _float("ffn_gate_inp", (MB, 4)), "has the shape"
    yield "a router of a packed type", _packed("ffn_gate_inp", router, GGMLType.I2_S), "cannot be read as numbers"
    yield "no router", _without("ffn_gate_inp"), "is missing"
    yield "experts of two dimensions", _packed("ffn_up_exps", (experts * ffn, hidden)), "has the shape"
    yield "an expert too many", _packed("ffn_up_exps", (experts + 1, ffn, hidden)), "has the shape"
    yield "no expert's gates", _without("ffn_gate_exps"), "is missing"
    yield "20,000 layers of experts by name", _far_layers, "not part of"


def _file(change: Change) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = Mixture()
        change(model.metadata, model.tensors)
        return model.write(folder)

    return make


def _key(key: str, value: Callable[[], Any]) -> Change:
    return lambda keys, tensors: keys.update({key: value()})


def _float(name: str, shape: tuple[int, ...]) -> Change:
    return lambda keys, tensors: tensors.update({f"blk.0.{name}.weight": np.zeros(shape, np.float32)})


def _packed(name: str, shape: tuple[int, ...], dtype: GGMLType = GGMLType.TQ2_0) -> Change:
    source = TensorSource(shape, dtype, np.zeros(tensor_bytes(dtype, shape), np.uint8))
    return lambda keys, tensors: tensors.update({f"blk.0.{name}.weight": source})


def _without(name: str) -> Change:
    def change(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        del tensors[f"blk.0.{name}.weight"]

    return change


def _far_layers(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors |= {f"blk.{i}.ffn_up_exps.weight": np.ones(8, np.float32) for i in range(9, 20_009)}
