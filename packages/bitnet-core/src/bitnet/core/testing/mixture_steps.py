"""Tests of steps of small models with mixtures of experts and windows (Maple's graph), against the numpy device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from bitnet.core.hal import EXPERTS, WINDOWS, Device, Limits, Program, TernaryWeight, Weight
from bitnet.core.model.experts import Experts, Windows
from bitnet.core.model.program import build_program
from bitnet.core.model.weights import expected_weights
from bitnet.core.reference import ReferenceDevice
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs
from bitnet.core.testing.hybrid import CONFIG
from bitnet.core.testing.hybrid_steps import NEIGHBOURS, Feed, assert_same_model, logits_of, neighbour
from bitnet.core.testing.norms import norm_weight
from bitnet.core.testing.rig import Array, dense, random_ternary, ternary


class Mixed(NamedTuple):
    """A model's shape: two layers that attend to a window, and between them one that attends in full.

    Attributes:
        group: Columns that share a scale in every row; 0: all of a row's, and None: all of a matrix's.
    """

    hidden: int = 512
    heads: int = 4
    head_dim: int = 128
    rotary: int = 64
    ffn: int = 256
    experts: int = 20
    used: int = 4
    window: int = 24
    clamps: tuple[float, ...] = (7.0, 0.5, 0.0)
    group: int | None = 0


SHAPES = {
    "rows": Mixed(),
    "matrices": Mixed(256, 4, 64, 32, 512, 5, 5, 30, group=None),
    "groups": Mixed(192, 2, 64, 16, 320, 70, 3, 1, group=64),
    "narrow": Mixed(256, 6, 32, 32, 100, 1, 1, 40, group=None),
}


def mixed_program(rng: np.random.Generator, shape: Mixed, limits: Limits) -> Program:
    """A random model whose routers choose by a margin.

    A code that is quantised one step apart moves logits by some hundredths, so random routers choose other experts for
    some row of nearly every text, and logits of such a row are off by 0.1 to 0.5 of the greatest, in right models, too.
    Here the first columns stand for the experts: an embedding has ``mark`` in the columns of its token's experts, which
    the routers read. Norms make these columns as small as the others.
    """
    mark = (shape.hidden / shape.used / 2) ** 0.5
    config = replace(
        CONFIG,
        architecture="maple",
        hidden_size=shape.hidden,
        layers=3,
        heads=shape.heads,
        kv_heads=shape.heads // 2,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn,
        rotary_dim=shape.rotary,
        output_gate=False,
        delta_net=None,
        experts=Experts(shape.experts, shape.used, shape.clamps),
        windows=Windows(shape.window, (True, False, True)),
    )

    def matrix(rows: int, columns: int) -> TernaryWeight:
        size = (1.5 / columns) ** 0.5
        if shape.group is None:
            return ternary(random_ternary(rng, rows, columns), float(rng.uniform(0.8 * size, 1.2 * size)))
        groups = columns // (shape.group or columns)
        scales = rng.uniform(0.8 * size, 1.2 * size, (rows, groups)).astype(np.float16)
        return ternary(random_ternary(rng, rows, columns), scales)

    weights: dict[str, Weight] = {}
    for name, (kind, size) in expected_weights(config):
        if kind == "ternary":
            weights[name] = matrix(int(np.prod(size[:-1])), size[-1])
        elif len(size) == 1:
            values = norm_weight(rng, size[0])
            if size[0] == shape.hidden:
                values[: shape.experts] = rng.uniform(0.9, 1.1, shape.experts) / mark
            weights[name] = dense(values)
        else:
            values = (rng.standard_normal(size) * size[-1] ** -0.5).astype(np.float32)
            if name.endswith("ffn_gate_inp"):
                values /= 4
                np.fill_diagonal(values, 4.0)
            elif name == "token_embd":
                own = rng.permuted(np.tile(np.arange(shape.experts), (len(values), 1)), axis=1)[:, : shape.used]
                np.put_along_axis(values, own, mark, axis=1)
            weights[name] = dense(values.astype(np.float16 if kind == "dense" else np.float32))
    return build_program(config, weights, limits=limits, num_blocks=limits.max_seqs * limits.max_blocks)


def steps(rng: np.random.Generator) -> Iterator[list[Feed]]:
    """Prompts whole and in chunks, across the windows and behind them, and single tokens of up to three sequences."""

    def some(sequence: int, count: int, begin: int) -> Feed:
        tokens: Array = rng.integers(0, CONFIG.vocab_size, count, np.int32)
        return Feed(sequence, tokens, begin, -1, 0)

    yield [some(0, 19, 0)]
    yield [some(0, 1, 19), some(1, 33, 0), some(2, 2, 0)]
    yield [some(0, 40, 20)]
    yield [some(0, 1, 60)]
    yield [some(s, 1, begin) for s, begin in ((0, 61), (1, 33))]
    yield [some(s, 1, begin) for s, begin in ((0, 62), (1, 34), (2, 2))]
    yield [some(1, 7, 35), some(2, 21, 3)]


class MixtureStepTests(DeviceTests):
    @needs(EXPERTS, WINDOWS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_mixture_of_experts_is_the_numpy_devices(
        self, device: Device, rng: np.random.Generator, shape: str
    ) -> None:
        """Logits of prompts and single tokens, free to fuse."""
        limits = Limits(40, 3, 24, 3)
        program, fed = mixed_program(rng, SHAPES[shape], limits), [*steps(rng)]
        found, exact = logits_of(device, program, fed), logits_of(ReferenceDevice(), program, fed)
        others = (neighbour(program, rng) for _ in range(NEIGHBOURS))
        assert_same_model(found, exact, lambda: (logits_of(ReferenceDevice(), other, fed) for other in others))
