"""Tests of steps of small models with recurrent layers (Qwen3.5's graph), against the numpy device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from bitnet.core.hal import (
    STATES,
    TERNARY_TABLES,
    DenseWeight,
    Device,
    Executable,
    KVDtype,
    Limits,
    Program,
    SequenceStep,
    Step,
    StepLayout,
    TernaryWeight,
    Weight,
    run,
)
from bitnet.core.model.delta_net import DeltaNet
from bitnet.core.model.hadamard import Hadamard
from bitnet.core.model.program import build_program
from bitnet.core.reference import ReferenceDevice
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs
from bitnet.core.testing.hybrid import CONFIG
from bitnet.core.testing.norms import norm_weight
from bitnet.core.testing.oracle import F64
from bitnet.core.testing.rig import Array, dense, not_yet, random_ternary, ternary
from bitnet.core.testing.whole_model import END_TO_END, TYPICAL

ENTRIES, VOCAB = 6, 301
NEIGHBOURS, NUDGE = 4, 4e-6
"""Models whose roundings fall otherwise, and the relative change of their norms' weights: some times as much as right
kernels differ by."""


class Hybrid(NamedTuple):
    """A model's shape: two recurrent layers and one that attends.

    Attributes:
        block: Of its transforms; 0: it has none.
        grouped: Whether ``ssm_out`` has its heads in the other order.
    """

    hidden: int = 256
    heads: int = 4
    head_dim: int = 64
    rotary: int = 16
    ffn: int = 512
    k_heads: int = 2
    v_heads: int = 4
    dim: int = 64
    taps: int = 4
    group: int = 128
    block: int = 128
    grouped: bool = True


SHAPES = {
    "transformed": Hybrid(),
    "plain": Hybrid(rotary=64, v_heads=6, block=0),
    "wide": Hybrid(hidden=512, head_dim=128, rotary=32, ffn=1024, v_heads=6, dim=128, block=256),
    "odd": Hybrid(hidden=192, heads=2, head_dim=80, rotary=20, ffn=320, dim=40, taps=3, group=32, block=16),
}


def hybrid_program(
    rng: np.random.Generator, shape: Hybrid, limits: Limits, kv_dtype: KVDtype = "f16", *, deterministic: bool = False
) -> Program:
    """A random model whose embedding and head are ternary."""
    net = DeltaNet((True, True, False), shape.k_heads, shape.v_heads, shape.dim, shape.dim, shape.taps)
    widths = {shape.hidden, shape.heads * shape.head_dim, net.value_width, shape.ffn}
    signs = {width: rng.choice(np.array([-1, 1], np.float32), width) for width in sorted(widths)}
    folded = Hadamard(shape.block, signs, frozenset({"output.weight"}), True, shape.grouped) if shape.block else None
    kv_heads = shape.heads // 2
    config = replace(
        CONFIG,
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        layers=3,
        heads=shape.heads,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn,
        rotary_dim=shape.rotary,
        delta_net=net,
        hadamard=folded,
    )

    def matrix(rows: int, columns: int) -> TernaryWeight:
        size = (1.5 / columns) ** 0.5
        scales = rng.uniform(0.8 * size, 1.2 * size, (rows, columns // shape.group)).astype(np.float16)
        return ternary(random_ternary(rng, rows, columns), scales)

    def small(*size: int) -> Weight:
        return dense((rng.standard_normal(size) * size[-1] ** -0.5).astype(np.float32))

    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, kv_heads * shape.head_dim
    weights: dict[str, Weight] = {"token_embd": matrix(VOCAB, hidden), "output": matrix(VOCAB, hidden)}
    weights["output_norm"] = dense(norm_weight(rng, hidden))
    for layer, recurrent in enumerate(net.recurrent):
        if recurrent:
            own: dict[str, Weight] = {
                "attn_qkv": matrix(net.conv_width, hidden),
                "attn_gate": matrix(net.value_width, hidden),
                "ssm_out": matrix(hidden, net.value_width),
                "ssm_conv1d": small(net.conv_width, shape.taps),
                "ssm_alpha": small(shape.v_heads, hidden),
                "ssm_beta": small(shape.v_heads, hidden),
                "ssm_norm": dense(norm_weight(rng, shape.dim)),
                "ssm_dt.bias": dense(rng.standard_normal(shape.v_heads).astype(np.float32)),
                "ssm_a": dense(-(10.0 ** rng.uniform(-2, 0.5, shape.v_heads)).astype(np.float32)),
            }
        else:
            own = {
                "attn_q": matrix(2 * queries, hidden),
                "attn_k": matrix(keys, hidden),
                "attn_v": matrix(keys, hidden),
                "attn_output": matrix(hidden, queries),
                "attn_q_norm": dense(norm_weight(rng, shape.head_dim)),
                "attn_k_norm": dense(norm_weight(rng, shape.head_dim)),
            }
        own |= {name: dense(norm_weight(rng, hidden)) for name in ("attn_norm", "post_attention_norm")}
        own |= {name: matrix(shape.ffn, hidden) for name in ("ffn_gate", "ffn_up")}
        own["ffn_down"] = matrix(hidden, shape.ffn)
        weights |= {f"blk.{layer}.{name}": weight for name, weight in own.items()}
    blocks = limits.max_seqs * limits.max_blocks
    return build_program(
        config,
        weights,
        limits=limits,
        num_blocks=blocks,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
        state_entries=ENTRIES,
    )


class Feed(NamedTuple):
    """Tokens of a sequence, from a position on, and the entries of its states that it reads and writes."""

    sequence: int
    tokens: Array
    begin: int
    source: int
    target: int


def steps(rng: np.random.Generator) -> Iterator[list[Feed]]:
    """Prompts whole and in chunks, single tokens, a draft that is taken back, and a branch from a snapshot."""

    def some(count: int) -> Array:
        return rng.integers(0, VOCAB, count, np.int32)

    yield [Feed(0, some(19), 0, -1, 0)]
    yield [Feed(0, some(1), 19, 0, 0), Feed(1, some(33), 0, -1, 1), Feed(2, some(2), 0, -1, 3)]
    yield [Feed(0, some(5), 20, 0, 4), Feed(1, some(3), 33, 1, 2)]  # a draft, of which two tokens are right
    yield [Feed(0, some(2), 20, 0, 0), Feed(1, some(1), 33, 1, 1)]  # and the second sequence from before its three
    yield [Feed(s, some(1), begin, s, s) for s, begin in ((0, 22), (1, 34))]
    for begin, source, target in (
        (2, 3, 3),
        (3, 3, 3),
        (4, 3, 3),
        (5, 3, 5),
        (6, 5, 5),
    ):  # one by one, to another entry
        yield [Feed(2, some(1), begin, source, target)]


def parts_of(feeds: Sequence[Feed], limits: Limits) -> list[SequenceStep]:
    made = []
    for feed in feeds:
        n, end = len(feed.tokens), feed.begin + len(feed.tokens)
        blocks = range(feed.sequence * limits.max_blocks, (feed.sequence + 1) * limits.max_blocks)
        part = SequenceStep(
            feed.tokens, end, blocks, range(max(0, n - 8), n), state_from=feed.source, state_to=feed.target
        )
        made.append(part)
    return made


@contextmanager
def compiled(device: Device, program: Program) -> Iterator[Executable]:
    with not_yet():
        executable = device.compile(program)
    try:
        yield executable
    finally:
        executable.close()


def logits_of(device: Device, program: Program, fed: Iterable[Sequence[Feed]]) -> F64:
    """The logits of all rows of the steps, one after another."""
    rows, layout = list[F64](), StepLayout(program.limits)
    with compiled(device, program) as executable:
        for feeds in fed:
            step = Step(layout, parts_of(feeds, program.limits), logits=True)
            run(executable, step)
            rows.append(np.asarray(executable.read("logits", step.rows), np.float64))
    return np.concatenate(rows)


def neighbour(program: Program, rng: np.random.Generator) -> Program:
    """The same model, but for norms that differ by as little as kernels do: other codes lie next to a border."""

    def nudged(weight: DenseWeight) -> Weight:
        return dense((weight.load() * (1 + NUDGE * rng.standard_normal(weight.shape))).astype(np.float32))

    return replace(
        program,
        weights={
            name: nudged(weight) if isinstance(weight, DenseWeight) and "norm" in name else weight
            for name, weight in program.weights.items()
        },
    )


def assert_same_model(logits: F64, exact: F64, neighbours: Callable[[], Iterable[F64]]) -> None:
    """Logits of all rows are those of another device, but for activations that were quantised one step apart.

    Such a step stays in a state, and moves one row in thousands by more than ``END_TO_END``. Only if a row differs by
    more, ``neighbours`` computes how far such steps move each row.
    """

    def errors(logits: F64) -> F64:
        found: F64 = abs(logits - exact).max(axis=1) / abs(exact).max(axis=1)
        return found

    mine, bounds = errors(logits), np.full(len(exact), END_TO_END)
    if not (mine <= bounds).all():
        bounds += 2 * np.max([errors(other) for other in neighbours()], axis=0)
    assert (mine <= bounds).all(), f"errors of the rows are {mine.tolist()}; their bounds are {bounds.tolist()}"
    assert np.median(mine) <= TYPICAL, f"errors of the rows are {mine.tolist()}"


def check_hybrid(device: Device, rng: np.random.Generator, shape: str) -> None:
    """Logits of a model against the numpy device's."""
    limits = Limits(40, 3, 24, 2)
    program, fed = hybrid_program(rng, SHAPES[shape], limits), [*steps(rng)]
    found, exact = logits_of(device, program, fed), logits_of(ReferenceDevice(), program, fed)
    others = (neighbour(program, rng) for _ in range(NEIGHBOURS))
    assert_same_model(found, exact, lambda: (logits_of(ReferenceDevice(), other, fed) for other in others))


class HybridStepTests(DeviceTests):
    @needs(STATES, TERNARY_TABLES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_hybrid_model_is_the_numpy_devices(self, device: Device, rng: np.random.Generator, shape: str) -> None:
        """Logits of prompts, single tokens, drafts that are taken back and branches, free to fuse."""
        check_hybrid(device, rng, shape)

    @needs(STATES, TERNARY_TABLES)
    def test_passes_move_the_states(self, device: Device, rng: np.random.Generator) -> None:
        """A run of several passes, the first of which reads another entry, gives what single steps give."""
        limits = Limits(32, 3, 3, 4)
        program, layout = hybrid_program(rng, SHAPES["transformed"], limits), StepLayout(limits)
        prompts = [rng.integers(0, VOCAB, n, np.int32) for n in (20, 9)]

        def fed(tokens: Sequence[Array], lengths: Sequence[int], source: Sequence[int], target: Sequence[int]) -> Step:
            parts = []
            for s, (part, length) in enumerate(zip(tokens, lengths, strict=True)):
                blocks = range(4 * s, 4 * s + 4)
                entries = {"state_from": source[s], "state_to": target[s]}
                parts.append(SequenceStep(part, length, blocks, [len(part) - 1], **entries))  # type: ignore[arg-type]
            return Step(layout, parts)

        with compiled(device, program) as executable:
            first = run(executable, fed(prompts, [20, 9], [-1, -1], [2, 3]))
            starts = [np.array([token], np.int32) for token in first.reshape(-1)[:2]]
            single, last, source = [], starts, [2, 3]
            for at in range(1, 5):
                out = run(executable, fed(last, [20 + at, 9 + at], source, [0, 1])).reshape(-1)[:2]
                single.append(out.tolist())
                last, source = [np.array([token], np.int32) for token in out], [0, 1]
            together = run(executable, fed(starts, [21, 10], [2, 3], [0, 1]), 4)
        assert together.reshape(4, 2).tolist() == single
