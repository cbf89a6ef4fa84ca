"""What types of fewer bits than f32 cost the states of the gated delta rule, by how long a head remembers.

    uv run tools/measure_states.py                     # 30,000 tokens: minutes
    uv run tools/measure_states.py --tokens 3000       # some of a minute

Every token's state is rounded as a decoding step would write it. Errors are those of the heads' outputs after their
RMSNorm, as the model goes on with them, against float64 with exact activations: the root of the mean square over the
second half of the tokens, of the outputs' own. Rows of the layer are random, q, k and v random ternary products of
them, convolved, through SiLU. "int8" rounds the rows' activations to codes, as each ternary product does, and keeps
the states in f32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from running import positive, run_tool

F32 = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating]
Rounding = Callable[[F32], F32]
D_K, D_V, WIDTH, TAPS, EPS = 128, 16, 1024, 4, 1e-6
"""Columns of a state are independent: 16 of a head's 128 are computed."""
HALF_LIVES = (1, 10, 100, 1_000, 10_000)
STRENGTHS = ("strong", "weak", "silent")
"""Medians of 0.5 and 0.007; and strong in the first 256 tokens, then 6e-6: what was read is only to be kept."""
HEADS = 2
"""For each half-life and strength."""


class Inputs(NamedTuple):
    """One layer's text: ``q``, ``k`` ``[n, H, d_k]``, ``v[n, H, d_v]``, ``decay``, ``beta`` ``[n, H]``."""

    q: F32
    k: F32
    v: F32
    decay: F32
    beta: F32


def gates(rng: np.random.Generator, n: int) -> tuple[F32, F32, list[tuple[str, str]]]:
    """Decays and strengths ``[n, H]``, and the strength and half-life of each head.

    The last group has the published initialisation: rates from 0 to 16, steps from 0.001 to 0.1, evenly in the
    logarithm. In all of them a step changes from token to token, by some e times.
    """
    rates: list[float] = []
    bias: list[float] = []
    names: list[tuple[str, str]] = []
    for strength in STRENGTHS:
        for half_life in HALF_LIVES:
            rates += [np.log(2) / half_life / np.log1p(np.exp(-2))] * HEADS
            bias += [-2.0] * HEADS
            names += [(strength, f"{half_life:,}")] * HEADS
    step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), 8))
    rates += list(rng.uniform(0, 16, 8))
    bias += list(np.log(np.expm1(step)))
    names += [("strong", "published")] * 8
    log_decay = -np.array(rates) * np.logaddexp(0, rng.standard_normal((n, len(names))) + bias)
    beta = np.empty((n, len(names)))
    for h, (strength, _) in enumerate(names):
        beta[:, h] = rng.normal(-5 if strength == "weak" else 0, 2 if strength == "weak" else 1, n)
        if strength == "silent":
            beta[256:, h] = -12
    return np.exp(log_decay).astype(np.float32), (1 / (1 + np.exp(-beta))).astype(np.float32), names


def int8(rows: F32) -> F32:
    """Rows after absmax quantisation of each."""
    unit = np.abs(rows).max(axis=1, keepdims=True) / 127
    return np.asarray(np.rint(rows / unit) * unit, np.float32)


def heads(rows: F32, decay: F32, beta: F32, seed: int) -> Inputs:
    """q, k and v of ``rows[n, WIDTH]`` by the weights of ``seed``."""
    rng, (n, count) = np.random.default_rng(seed), decay.shape

    def mixed(width: int) -> F32:
        out = np.empty((n, count, width), np.float32)
        for h in range(count):
            weights = rng.integers(-1, 2, (WIDTH, width)).astype(np.float32) * np.float32((2 / 3 * WIDTH) ** -0.5)
            taps = rng.standard_normal((TAPS, width)).astype(np.float32) / 2
            product = np.concatenate([np.zeros((TAPS - 1, width), np.float32), rows @ weights])
            total = sum(product[j : j + n] * taps[j] for j in range(TAPS))
            out[:, h] = total / (1 + np.exp(-total))
        return out

    q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + EPS) for x in (mixed(D_K), mixed(D_K)))
    return Inputs(q * np.float32(D_K**-0.5), k, mixed(D_V), decay, beta)


def outputs(inputs: Inputs, dtype: type, rounding: Callable[[Floats], Floats], outside: bool = False) -> Floats:
    """Outputs ``[n, H, d_v]`` after the RMSNorm, with states rounded after each token.

    Args:
        outside: The decays are kept beside the state in one f32 number for each head; the state is halved, which
            rounds nothing, whenever that falls below a half.
    """
    n, count, _ = inputs.q.shape
    state: Floats = np.zeros((count, D_V, D_K), dtype)
    kept: Floats = np.ones((count, 1, 1), dtype)
    out: Floats = np.empty((n, count, D_V), dtype)
    one = np.ones_like(kept)
    for m in range(n):
        q, k, v = (x[m].astype(dtype)[..., None] for x in (inputs.q, inputs.k, inputs.v))
        decay, beta = (x[m].astype(dtype)[:, None, None] for x in (inputs.decay, inputs.beta))
        if outside:
            kept = np.maximum(kept * decay, dtype(1e-30))
        else:
            state *= decay
        now = kept if outside else one
        error = beta * (v - now * (state @ k))
        state += error / now * k.swapaxes(1, 2)
        out[m] = (now * (state @ q))[..., 0]
        if outside:
            factor = np.exp2(np.ceil(np.maximum(-1 - np.log2(kept), 0))).astype(dtype)
            state, kept = state / factor, kept * factor
        state = rounding(state)
    return np.asarray(out / np.sqrt((out * out).mean(axis=-1, keepdims=True) + EPS))


def f16(state: Floats) -> Floats:
    return state.astype(np.float16).astype(np.float32)


def nearest(bits: int) -> Callable[[Floats], Floats]:
    """f32 with so many bits of its mantissa less, to the nearest, ties to even."""

    def rounded(state: Floats) -> Floats:
        pattern = state.view(np.uint32)
        pattern = pattern + np.uint32((1 << bits - 1) - 1) + (pattern >> np.uint32(bits) & np.uint32(1))
        return np.asarray(pattern >> np.uint32(bits) << np.uint32(bits)).view(np.float32)

    return rounded


def stochastic_f16(seed: int) -> Callable[[Floats], Floats]:
    """Up or down with the probability that makes the mean exact."""
    rng = np.random.default_rng(seed)

    def rounded(state: Floats) -> Floats:
        pattern = state.view(np.uint32) + rng.integers(0, 1 << 13, state.shape, np.uint32)
        return f16(np.asarray(pattern >> np.uint32(13) << np.uint32(13)).view(np.float32))

    return rounded


def codes(most: int, axes: tuple[int, ...]) -> Callable[[Floats], Floats]:
    """Integers up to ``most`` with an f32 scale for all elements along ``axes`` of ``[H, d_v, d_k]``, by absmax."""

    def rounded(state: Floats) -> Floats:
        unit = np.maximum(np.abs(state).max(axis=axes, keepdims=True), np.float32(1e-30)) / np.float32(most)
        return np.asarray(np.rint(state / unit) * unit)

    return rounded


def scaled_f16(state: Floats) -> Floats:
    """f16 with a scale for each head, so that neither its greatest numbers nor its subnormal ones are met."""
    greatest = np.maximum(np.abs(state).max(axis=(1, 2), keepdims=True), np.float32(1e-30))
    return np.asarray(f16(state / greatest) * greatest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    n, rng = arguments.tokens, np.random.default_rng(arguments.seed)
    decay, beta, names = gates(rng, n)
    rows = rng.standard_normal((n, WIDTH)).astype(np.float32)
    exact = heads(rows, decay, beta, arguments.seed + 1)
    rounded = heads(int8(rows), decay, beta, arguments.seed + 1)
    oracle = outputs(exact, np.float64, lambda state: state)[n // 2 :]
    kinds: dict[str, tuple[Inputs, Callable[[Floats], Floats], bool]] = {
        "f32": (exact, lambda state: state, False),
        "int8, f32": (rounded, lambda state: state, False),
        "f16": (exact, f16, False),
        "bf16": (exact, nearest(16), False),
        "f16, a scale for each head": (exact, scaled_f16, False),
        "f16, decays outside": (exact, f16, True),
        "f16, stochastic": (exact, stochastic_f16(arguments.seed), False),
        "f16 and 8 bits of its error": (exact, nearest(5), False),
        "i16, a scale for each head": (exact, codes(32767, (1, 2)), False),
        "i16, a scale for each column": (exact, codes(32767, (2,)), False),
        "i8, a scale for each column": (exact, codes(127, (2,)), False),
        "int8, f16": (rounded, f16, False),
        "int8, i16 with a scale for each column": (rounded, codes(32767, (2,)), False),
    }
    groups = list(dict.fromkeys(names))
    lines: dict[str, list[str]] = {strength: [] for strength in STRENGTHS}
    for kind, (inputs, rounding, outside) in kinds.items():
        apart = outputs(inputs, np.float32, rounding, outside)[n // 2 :] - oracle
        for strength in STRENGTHS:
            errors = []
            for group in groups:
                if group[0] == strength:
                    of = [h for h, name in enumerate(names) if name == group]
                    errors.append(np.sqrt(np.square(apart[:, of]).sum() / np.square(oracle[:, of]).sum()))
            lines[strength].append(f"| {kind} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")
    for strength in STRENGTHS:
        columns = [half_life for of, half_life in groups if of == strength]
        print(f"| {strength}, half-life | " + " | ".join(columns) + " |", "| --- " * (1 + len(columns)) + "|", sep="\n")
        print(*lines[strength], "", sep="\n")


if __name__ == "__main__":
    run_tool(main)
