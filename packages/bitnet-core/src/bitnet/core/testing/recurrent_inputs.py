"""A check of what a recurrent layer computes before the delta rule, in steps that devices may run in fewer kernels."""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

import numpy as np

from bitnet.core.hal import (
    CausalConv,
    DeltaGates,
    Device,
    KVSpec,
    Limits,
    NormQuant,
    Op,
    Program,
    SequenceStep,
    StateSpec,
    Step,
    StepLayout,
    TernaryMatmul,
    Transform,
    Weight,
    run,
)
from bitnet.core.testing import oracle, oracle_recurrent
from bitnet.core.testing.norms import check_codes, norm_weight, varied
from bitnet.core.testing.oracle import F64
from bitnet.core.testing.rig import assert_same_bits, assert_within, dense, random_ternary, tensor, ternary

BLOCK, EPS, STEPS = 32, 1e-6, 5


class Inputs(NamedTuple):
    """``m`` sequences of one token, rows of ``width``, products with ``mixed`` and ``gate`` rows of ``group``s."""

    m: int
    width: int
    mixed: int
    gate: int
    heads: int
    taps: int = 4
    group: int = 128
    block: int = 128


def check_inputs(device: Device, rng: np.random.Generator, case: Inputs) -> None:
    """Steps whose sequences begin, go on in place, branch into another entry, or share the entry that they read.

    Only the last results are read back, as in no program that keeps its tensors, and the codes of the norm, from which
    the products have to have the contract's bits.
    """
    m, width, entries = case.m, case.width, 3 * case.m + 1
    matrices = [
        (random_ternary(rng, n, width), rng.uniform(0.01, 0.1, (n, width // case.group)).astype(np.float16))
        for n in (case.mixed, case.gate)
    ]
    named = {
        "w": norm_weight(rng, width),
        "alpha": (rng.standard_normal((case.heads, width)) * 3 / np.sqrt(width)).astype(np.float32),
        "beta": (rng.standard_normal((case.heads, width)) * 3 / np.sqrt(width)).astype(np.float32),
        "bias": (rng.standard_normal(case.heads) * 4).astype(np.float32),
        "rate": -(10.0 ** rng.uniform(-3, 1, case.heads)).astype(np.float32),
    }
    signs = rng.choice(np.array([-1, 1], np.float32), width)
    taps = rng.standard_normal((case.mixed, case.taps)).astype(np.float32)
    weights: dict[str, Weight] = {name: dense(array) for name, array in named.items()}
    weights |= {"signs": dense(signs), "taps": dense(taps), "a": ternary(*matrices[0]), "b": ternary(*matrices[1])}
    specs = [tensor("x", "f32", "M", width), tensor("q", "i8", "M", width), tensor("s", "f32", "M")]
    specs += [tensor("mixed", "f32", "M", case.mixed), tensor("z", "f32", "M", case.gate)]
    specs += [tensor("gates", "f32", "M", 2 * case.heads), tensor("out", "f32", "M", case.mixed)]
    ops: list[Op] = [
        NormQuant("x", "w", EPS, "q", "s", Transform(case.block, "signs")),
        TernaryMatmul("q", "s", ("a",), "mixed"),
        TernaryMatmul("q", "s", ("b",), "z"),
        DeltaGates("x", "w", EPS, "alpha", "beta", "bias", "rate", "gates"),
        CausalConv("mixed", "taps", "tail", "out"),
    ]
    limits, kv = Limits(m + 2, max_seqs=m + 1, max_blocks=1), KVSpec(1, 1, 64, m + 1, BLOCK)
    states = {"tail": StateSpec((case.taps - 1, case.mixed), entries)}
    program = Program(ops, {s.name: s for s in specs}, weights, limits, kv, "inputs", states=states)
    held: dict[int, F64] = {-1: np.zeros((case.taps - 1, case.mixed))}
    with closing(device.compile(program)) as executable:
        for _ in range(STEPS):
            targets = rng.permutation(entries)[:m].tolist()
            free = [e for e in held if e not in targets]
            sources = [t if t in held and rng.integers(2) else int(rng.choice(free)) for t in targets]
            x = varied(rng, m, width, 3)
            executable.write("x", x)
            for name, columns in (("z", case.gate), ("gates", 2 * case.heads), ("out", case.mixed)):
                executable.write(name, np.full((m + 2, columns), np.nan, np.float32))
            parts = enumerate(zip(sources, targets, strict=True))
            seqs = [SequenceStep(np.zeros(1, np.int32), 9, [i], state_from=s, state_to=t) for i, (s, t) in parts]
            run(executable, Step(StepLayout(limits), seqs, block_size=BLOCK))
            codes, scale = executable.read("q", m), executable.read("s", m)
            normed = oracle.rms_norm(x, named["w"], EPS) * signs
            check_codes(codes, scale, oracle.absmax(oracle_recurrent.hadamard(normed, case.block)))
            mixed, z = (oracle.group_matmul(codes, scale, [matrix]) for matrix in matrices)
            assert_same_bits("z", executable.read("z", m), z)
            assert_within("gates", executable.read("gates", m), *oracle_recurrent.delta_gates(x, named, EPS))
            out, after = executable.read("out", m), {}
            for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
                exact, bound, after[target] = oracle_recurrent.causal_conv(mixed[i : i + 1], taps, held[source])
                assert_within(f"out of {source} to {target}", out[i : i + 1], exact, bound)
            held |= after
            for name in ("z", "gates", "out"):
                assert np.isnan(executable.read(name)[m:]).all(), f"rows of {name} past the step's tokens were written"
