"""Mixtures of experts with windows: logits against float64, and no token depends on the requests beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.engine import GenerationOptions
from bitnet.core.gguf import unpack_ternary
from bitnet.core.hal import DenseWeight, Device, Limits, SequenceStep, Step, StepLayout, TernaryWeight, Weight, run
from bitnet.core.model import ModelConfig
from bitnet.core.model.experts import Experts, Windows
from bitnet.core.model.program import BLOCK_SIZE, build_program
from bitnet.core.model.weights import expected_weights

F64 = npt.NDArray[np.float64]
MAPLE: dict[str, Any] = {
    "architecture": "maple",
    "layers": 3,
    "activation": "silu",
    "sub_norms": False,
    "head_norms": True,
    "rotary_dim": 8,
    "experts": Experts(12, 3, (7.0, 0.5, 0.0)),
    "windows": Windows(24, (True, False, True)),
    "context_length": 4096,
}
LEVELS = pytest.mark.parametrize("device", ["cpu:scalar", "cpu:avx2", "cpu:avx512"], indirect=True)


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one expert": {"experts": Experts(1, 1, (7.0, 7.0, 7.0)), "ffn_size": 36},
    "all experts": {"experts": Experts(5, 5, (1.0, 1.0, 1.0)), "ffn_size": 100, "rotary_dim": None},
    "odd": {"hidden_size": 100, "head_dim": 20, "heads": 6, "kv_heads": 3, "ffn_size": 44, "rotary_dim": 12},
    "many experts": {"experts": Experts(70, 8, (7.0, 7.0, 7.0)), "windows": Windows(1, (True, True, False))},
    "long window": {"windows": Windows(130, (True, True, True)), "hidden_size": 132, "ffn_size": 260},
}
"""Odd shapes, none of them a multiple of a kernel's tile."""


def logits(config: ModelConfig, weights: Mapping[str, F64], tokens: npt.NDArray[Any], *, int8: bool = True) -> F64:
    """Logits after each token, ``[tokens, vocabulary]``.

    Args:
        weights: By canonical name; those of experts are ``[E, N, K]``.
        int8: Whether inputs of ternary products are rounded to int8, as in the contract.
    """
    assert config.experts is not None
    x = weights["token_embd"][tokens]
    for layer in range(config.layers):
        block = {n.removeprefix(f"blk.{layer}."): w for n, w in weights.items() if n.startswith(f"blk.{layer}.")}
        x = x + _attention(config, block, x, config.window(layer), int8)
        x = x + _experts(config, block, x, layer, int8)
    out: F64 = _norm(x, weights["output_norm"], config.rms_eps) @ weights["output"].T
    return out


def _norm(x: F64, weight: F64, eps: float) -> F64:
    out: F64 = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    return out


def _rounded(x: F64, int8: bool) -> F64:
    if not int8:
        return x
    unit = np.maximum(abs(x).max(axis=-1, keepdims=True), 1e-5) / 127
    out: F64 = np.rint(x / unit) * unit
    return out


def _rotated(head: F64, position: int, rotary: int, theta: float) -> F64:
    out: F64 = head.copy()
    for i in range(rotary // 2):
        angle = position * theta ** (-2 * i / rotary)
        a, b = head[i], head[i + rotary // 2]
        out[i], out[i + rotary // 2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


def _attention(config: ModelConfig, block: Mapping[str, F64], x: F64, window: int | None, int8: bool) -> F64:
    h, g, d = config.heads, config.kv_heads, config.head_dim
    y = _rounded(_norm(x, block["attn_norm"], config.rms_eps), int8)
    q, k, v = ((y @ block[f"attn_{n}"].T).reshape(len(x), -1, d) for n in "qkv")
    q, k = _norm(q, block["attn_q_norm"], config.rms_eps), _norm(k, block["attn_k_norm"], config.rms_eps)
    if window is not None:
        for heads in (q, k):
            for p in range(len(x)):
                for head in heads[p]:
                    head[:] = _rotated(head, p, config.rotated, config.rope_theta)
    out = np.empty((len(x), h, d))
    for p in range(len(x)):
        first = 0 if window is None else max(0, p - window + 1)
        for head in range(h):
            scores = k[first : p + 1, head * g // h] @ q[p, head] / np.sqrt(d)
            shares = np.exp(scores - scores.max())
            out[p, head] = shares / shares.sum() @ v[first : p + 1, head * g // h]
    mixed: F64 = _rounded(out.reshape(len(x), -1), int8) @ block["attn_output"].T
    return mixed


def _experts(config: ModelConfig, block: Mapping[str, F64], x: F64, layer: int, int8: bool) -> F64:
    assert config.experts is not None
    y, limit = _norm(x, block["ffn_norm"], config.rms_eps), config.experts.clamps[layer] or np.inf
    out = np.zeros_like(x)
    for p, row in enumerate(y):
        scores = block["ffn_gate_inp"] @ row
        shares = np.exp(scores - scores.max())
        chosen = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[: config.experts.used]
        codes = _rounded(row, int8)
        for e in chosen:
            gate = np.minimum(block["ffn_gate_exps"][e] @ codes, limit)
            up = np.clip(block["ffn_up_exps"][e] @ codes, -limit, limit)
            inner = _rounded(gate / (1 + np.exp(-gate)) * up, int8)
            out[p] += shares[e] / shares[chosen].sum() * (block["ffn_down_exps"][e] @ inner)
    return out


def floats(config: ModelConfig, weights: dict[str, Weight]) -> dict[str, Any]:
    """Weights as float64."""
    found: dict[str, Any] = {}
    for name, (_, shape) in expected_weights(config):
        weight = weights[name]
        if isinstance(weight, DenseWeight):
            found[name] = weight.load().astype(np.float64)
            continue
        assert isinstance(weight, TernaryWeight)
        data = weight.load()
        found[name] = (unpack_ternary(data.codes, shape[-1]) * data.scale.astype(np.float64)).reshape(shape)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_logits(device: Device, shape: str, make_model: Callable[..., Any]) -> None:
    """Prompts that end before, at and behind the windows, in chunks of any size."""
    rng = np.random.default_rng()
    config, weights = make_model(rng, **{**MAPLE, **SHAPES[shape]})
    tokens, at, width = rng.integers(0, config.vocab_size, 150, np.int32), 0, 5
    limits = Limits(64, 1, 64, width)
    program = build_program(config, weights, limits=limits, num_blocks=width, kv_dtype="f32")
    executable, found = device.compile(program), []
    while at < len(tokens):
        count = min(int(rng.choice([1, 2, 7, 40, 64])), len(tokens) - at)
        step = SequenceStep(tokens[at : at + count], at + count, list(range(width)), list(range(count)))
        run(executable, Step(StepLayout(limits), [step], block_size=BLOCK_SIZE))
        found.append(executable.read("logits", count))
        at += count
    executable.close()
    matrices, computed = floats(config, weights), np.concatenate(found)

    def error(config: ModelConfig) -> Any:
        exact = logits(config, matrices, tokens)
        return abs(computed - exact).max(axis=1) / abs(exact).max(axis=1), computed.argmax(1) == exact.argmax(1)

    errors, agree = error(config)
    # A code next to a rounding border may differ from float64's, and all that follows by as much as a code changes it.
    assert np.median(errors) < 0.01
    assert agree.mean() > 0.95
    size, slides = config.windows.size, config.windows.slides
    wider = error(replace(config, windows=Windows(size + 1, slides)))[0][size:]
    assert np.median(errors[size:]) < np.median(wider) / 1.5, "a window of one more fits as well"


@LEVELS
def test_64_requests_equal_their_solo_runs(device: Device, make_rig: Callable[..., Any]) -> None:
    rng = np.random.default_rng()
    asked = []
    for _ in range(64):
        prompt = rng.integers(0, 40, int(rng.integers(1, 100))).tolist()
        options: dict[str, Any] = {"max_tokens": int(rng.integers(1, 40)), "ignore_eos": bool(rng.integers(2))}
        asked.append((prompt, options))
    limits = Limits(max_tokens=96, max_seqs=16, max_rows=32, max_blocks=8)
    rig = make_rig(device, limits=limits, num_blocks=70, block_size=32, **MAPLE)
    numbers = []
    for prompt, options in asked:
        sequences = rig.engine.preparer.prepare(prompt, GenerationOptions(**options))
        numbers.append(sequences[0].number)
        rig.engine.add(sequences)
    together = rig.finish()
    alone = make_rig(device, limits=limits, num_blocks=70, block_size=32, tables=1, **MAPLE)  # keeps all blocks
    for number, (prompt, options) in zip(numbers, asked, strict=True):
        assert list(together[number].tokens) == list(alone.one(prompt, **options).tokens)
