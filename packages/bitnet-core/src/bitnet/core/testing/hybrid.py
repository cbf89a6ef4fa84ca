"""Tests of a small model with recurrent layers and transforms: its tokens are the CPU's, and its requests' own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from bitnet.core.cpu.backend import BACKEND as CPU
from bitnet.core.engine.options import GenerationOptions
from bitnet.core.engine.results import Completion
from bitnet.core.hal import DETERMINISTIC, STATES, Device, Limits, OpenOptions, Weight
from bitnet.core.model.config import ModelConfig
from bitnet.core.model.delta_net import DeltaNet
from bitnet.core.model.hadamard import Hadamard
from bitnet.core.model.program import build_program
from bitnet.core.model.weights import expected_weights
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, needs
from bitnet.core.testing.determinism import Ask, Load, answers, bits, engines
from bitnet.core.testing.model import BLOCK
from bitnet.core.testing.rig import dense, random_ternary, ternary
from bitnet.core.testing.transforms import random_signs

HIDDEN, FFN, GROUP = 128, 192, 32
CONFIG = ModelConfig(
    architecture="qwen35",
    name="hybrid",
    vocab_size=301,
    hidden_size=HIDDEN,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn_size=FFN,
    context_length=4096,
    rms_eps=1e-6,
    rope_theta=10_000.0,
    rope_style="neox",
    rope_freq_factors=None,
    activation="silu",
    sub_norms=False,
    tied_embeddings=False,
    head_norms=True,
    rotary_dim=8,
    output_gate=True,
    delta_net=DeltaNet((True, False), 2, 4, 32, 32, 4),
)
LOADS: dict[Size, Load] = {
    "small": Load(4, 3, 64, 8),
    "quick": Load(24, 8, 160, 32),
    "full": Load(200, 32, 640, 40),
}
TIE = 0.1
"""Greatest lead, in nats, of the CPU's token over another device's where the two part, as activations next to a
rounding border are quantised one step apart: 0.014 is the most that was seen."""


def hybrid_model(rng: np.random.Generator) -> tuple[ModelConfig, dict[str, Weight]]:
    """The shape and random weights of a model that has every part of Bonsai 2 27B."""
    expected = list(expected_weights(CONFIG))
    products = frozenset(f"{name}.weight" for name, (kind, _) in expected if kind == "ternary")
    signs = {width: random_signs(rng, width) for width in (HIDDEN, FFN)}
    config = replace(CONFIG, hadamard=Hadamard(64, signs, products | {"output.weight"}, True, True))
    weights: dict[str, Weight] = {}
    for name, (kind, shape) in expected:
        if kind in ("ternary", "dense"):
            scales = rng.uniform(0.02, 0.2, (shape[0], shape[1] // GROUP)).astype(np.float16)
            weights[name] = ternary(random_ternary(rng, *shape), scales)
        elif name.endswith("ssm_a"):
            weights[name] = dense(-rng.uniform(0.02, 0.5, shape).astype(np.float32))
        elif name.endswith(("ssm_alpha", "ssm_beta", "ssm_conv1d", "ssm_dt.bias")):
            weights[name] = dense(rng.normal(0, 0.4, shape).astype(np.float32))
        else:
            weights[name] = dense(rng.uniform(0.5, 1.5, shape).astype(np.float32))
    return config, weights


def hybrid_asks(rng: np.random.Generator, load: Load) -> list[Ask]:
    """Greedy and sampled requests; prompts share beginnings and repeat themselves, so that drafts are found."""
    stems = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (5, 17, 24)]
    made = []
    for i in range(load.requests):
        own = rng.integers(0, CONFIG.vocab_size, 1 + 7 * i % 12).tolist()
        kind: dict[str, Any] = ({}, {"temperature": 0.9}, {}, {"temperature": 1.1, "top_p": 0.9})[i % 4]
        options = GenerationOptions(max_tokens=load.new, ignore_eos=True, logprobs=5, seed=100 + i, **kind)
        made.append(Ask(stems[i % len(stems)] + 2 * own, options))
    return made


class HybridTests(DeviceTests):
    @needs(STATES, DETERMINISTIC)
    def test_a_hybrid_model(self, device: Device, rng: np.random.Generator) -> None:
        """Alone, a request gets the CPU's tokens, and the same bits among others that come and go: in chunks,
        preempted, from snapshots, with drafts that are right and wrong."""
        load = LOADS[self.run_size]
        config, weights = hybrid_model(rng)
        limits = Limits(load.seqs + 5, load.seqs, load.seqs, load.context // BLOCK)
        program = build_program(
            config,
            weights,
            limits=limits,
            num_blocks=max(limits.max_blocks, load.seqs),
            block_size=BLOCK,
            deterministic=True,
            state_entries=2 * load.seqs + 2,
        )
        asks = hybrid_asks(rng, load)
        with engines(device, program, load, config.vocab_size) as make:
            alone = [answers(make(), [ask], [0])[0][0] for ask in asks]
            wrong = list[int]()
            for lookup in (False, True):
                order = rng.permutation(len(asks)).tolist()
                arrivals = rng.integers(0, 3 * len(asks), len(asks)).tolist()
                mixed, _ = answers(make(lookup=lookup), [asks[i] for i in order], arrivals)
                wrong += [i for i, found in zip(order, mixed, strict=True) if bits(found) != bits(alone[i])]
        assert not wrong, f"requests {sorted(set(wrong))} of {len(asks)} depend on what else was computed"
        cpu = CPU.open(CPU.probe().devices[0], OpenOptions())
        try:
            with engines(cpu, program, load, config.vocab_size) as make:
                greedy = [i for i, ask in enumerate(asks) if not ask.options.temperature]
                expected = [answers(make(), [asks[i]], [0])[0][0] for i in greedy]
        finally:
            cpu.close()
        same = [_agreement(right, alone[i]) for i, right in zip(greedy, expected, strict=True)]
        assert 2 * sum(same) >= len(greedy) * load.new, f"{same} of {load.new} tokens are the CPU's"


def _agreement(expected: Completion, found: Completion) -> int:
    """The number of tokens after which two answers part, which must be where the CPU's likeliest are nearly tied."""
    same = next((i for i, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=True)) if a != b), None)
    if same is None:
        return len(expected.tokens)
    assert expected.logprobs is not None
    top = expected.logprobs[same].top
    lead = top[0][1] - dict(top).get(found.tokens[same], -math.inf)
    assert lead <= TIE, f"token {same} differs where the CPU's leads by {lead:.3f} nats"
    return same
