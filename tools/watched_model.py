"""Small models that devices may fuse as they like, for tools that watch kernels: see sanitize.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bitnet.core import hal
from bitnet.core.hal import (
    GREEDY,
    KV_I8,
    TERNARY_TABLES,
    Device,
    KVDtype,
    Limits,
    Program,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
)
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.rig import ternary
from bitnet.core.testing.tables import Table, random_table


@dataclass(frozen=True)
class Shape:
    """A model's shape: arguments of :class:`TinyModel`, the cache's type, and whether a ternary table embeds tokens."""

    arguments: dict[str, Any] = field(default_factory=dict)
    kv: KVDtype = "f16"
    table: bool = False


_512 = {"heads": 8, "kv_heads": 4, "head_dim": 64, "vocab": 2048}
MODELS = {
    "narrow": Shape({"layers": 2, "vocab": 301}),
    "512-wide": Shape({"layers": 2, "ffn": 1376, **_512}),
    "2B4T-wide": Shape({"layers": 1, "heads": 20, "kv_heads": 5, "head_dim": 128, "ffn": 6912, "vocab": 1500}),
    "groups of 128": Shape(
        {"layers": 1, "ffn": 1536, "group": 128, "head_norms": True, "activation": "silu", **_512}, "i8"
    ),
    "groups of 64": Shape({"layers": 1, "ffn": 1088, "group": 64, "sub_norms": False, **_512}, table=True),
    "groups of 32": Shape({"layers": 1, "ffn": 224, "group": 32, "vocab": 301}, "i8", table=True),
    "biases": Shape({"layers": 1, "ffn": 1376, "biased": True, "centered": True, "style": "interleaved", **_512}, "i8"),
}
"""Shapes that differ in the kernels they get: by plain code, by tensor cores, and as a real model's layer; with scales
of groups, ternary tables, biases and int8 caches."""

SAMPLING = {
    "greedy": GREEDY,
    "drawn": SamplingParams(0.8, seed=5),
    "top-p": SamplingParams(0.9, top_k=40, top_p=0.9, seed=6),
}
LIMITS = Limits(max_tokens=320, max_seqs=64, max_rows=64, max_blocks=24)
PROMPTS = ((3,), (40, 1, 9), (300,), (17, 100, 64, 5))
"""Tokens of each sequence of a prefill step."""
BATCHES = (1, 2, 3, 5, 8, 13, 33, 64)
"""Sequences of a decode step: 3, 5, 13 and 33 are fewer than the rows of the recording that serves them."""


def program(device: Device, name: str, rng: np.random.Generator) -> Program:
    """The model of this name, less what the device does not support."""
    shape, features = MODELS[name], device.info.features
    model = TinyModel(rng, positions=LIMITS.max_blocks * BLOCK, **shape.arguments)
    kv: KVDtype = shape.kv if KV_I8 in features else "f16"
    made = model.program(LIMITS, LIMITS.max_seqs * LIMITS.max_blocks, kv)
    if not shape.table or TERNARY_TABLES not in features:
        return made
    assert model.group is not None
    table = ternary(*random_table(rng, Table(1, model.vocab, model.width, model.group)))
    return replace(made, weights={**made.weights, "embd": table, "head": table})


def run_model(device: Device, name: str) -> None:
    """Prefills, one in two chunks, and decode steps of every batch, alone and several at once."""
    rng, layout = np.random.default_rng(7), StepLayout(LIMITS)
    executable = device.compile(program(device, name, rng))
    vocabulary = MODELS[name].arguments["vocab"]

    def part(s: int, count: int, length: int, rows: Sequence[int], sampling: SamplingParams) -> SequenceStep:
        blocks = range(s * LIMITS.max_blocks, (s + 1) * LIMITS.max_blocks)
        return SequenceStep(rng.integers(0, vocabulary, count, np.int32), length, blocks, rows, sampling)

    def run(parts: Sequence[SequenceStep], count: int = 1, *, logits: bool = False) -> None:
        hal.run(executable, Step(layout, parts, block_size=BLOCK, logits=logits), count)

    for counts in PROMPTS:
        run([part(s, n, n, [n - 1], GREEDY) for s, n in enumerate(counts)])
    run([part(0, 20, 320, [], GREEDY), part(1, 2, 3, [0, 1], SAMPLING["top-p"])])
    for s in range(0, LIMITS.max_seqs, 16):
        run([part(s + i, 20, 20, [], GREEDY) for i in range(16)])
    for batch in BATCHES:
        for sampling in SAMPLING.values():
            for count, logits in ((1, True), (1, False), (3, False)):
                run([part(s, 1, 21, [0], sampling) for s in range(batch)], count, logits=logits)
    executable.close()
