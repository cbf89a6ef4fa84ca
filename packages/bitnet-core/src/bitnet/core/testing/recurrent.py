"""Tests of the operations of recurrent layers and of the states that sequences carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal import (
    STATES,
    CausalConv,
    DeltaGates,
    DeltaRule,
    Device,
    GatedQuant,
    Limits,
    Op,
    SequenceStep,
    StateSpec,
    TensorSpec,
    Transform,
)
from bitnet.core.testing import oracle, oracle_recurrent
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, log_uniform, needs, over, pick
from bitnet.core.testing.norms import check_codes, norm_weight, varied
from bitnet.core.testing.recurrent_inputs import Inputs, check_inputs
from bitnet.core.testing.rig import Array, Rig, assert_same_bits, assert_within, dense, tensor, tokens

F64 = npt.NDArray[np.float64]
ENTRIES = 7


class Conv(NamedTuple):
    """``channels`` columns, each convolved with ``taps`` numbers, in steps of at most ``most`` tokens."""

    channels: int
    taps: int
    most: int


def convolutions(size: Size) -> list[Conv]:
    fixed = [Conv(4, 2, 1), Conv(36, 4, 9), Conv(132, 3, 40), Conv(1024, 4, 3), Conv(20, 7, 12), Conv(10240, 4, 5)]

    def draw(rng: np.random.Generator) -> Conv:
        return Conv(log_uniform(rng, 4, 2048, 4), int(rng.integers(2, 9)), log_uniform(rng, 1, 90))

    return pick(size, fixed, draw, lambda s: 100 * s.channels * s.taps * s.most)


class Delta(NamedTuple):
    """``v_heads`` matrices of ``d_k × d_v``, in steps of at most ``most`` tokens."""

    k_heads: int
    v_heads: int
    d_k: int
    d_v: int
    most: int
    tiled: int = 0


def deltas(size: Size) -> list[Delta]:
    fixed = [
        Delta(1, 1, 4, 4, 1),
        Delta(2, 6, 8, 4, 5),
        Delta(2, 6, 4, 12, 5, tiled=1),
        Delta(1, 2, 128, 128, 3),
        Delta(2, 6, 128, 128, 80, tiled=1),
        Delta(2, 4, 64, 36, 150),
        Delta(3, 3, 20, 100, 70),
        Delta(16, 48, 128, 128, 2),
    ]

    def draw(rng: np.random.Generator) -> Delta:
        heads, ratio = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        d_k, d_v = log_uniform(rng, 4, 160, 4), log_uniform(rng, 4, 160, 4)
        return Delta(heads, heads * ratio, d_k, d_v, log_uniform(rng, 1, 200), int(rng.integers(0, 2)))

    return pick(size, fixed, draw, lambda s: 12 * s.v_heads * s.d_k * s.d_v * s.most)


class Part(NamedTuple):
    """A sequence's part of a step: the number of its tokens, and the entries that it reads and writes."""

    fed: int
    source: int
    target: int


def walk(rng: np.random.Generator, most: int, steps: int = 6) -> Iterator[list[Part]]:
    """Steps of one to three sequences that begin, go on in place, branch into another entry, or share a source."""
    written: list[int] = []
    for number in range(steps):
        targets: list[int] = rng.permutation(ENTRIES)[: 1 if most == 1 else int(rng.integers(1, 4))].tolist()
        parts = []
        for target in targets:
            allowed = [-1, *(e for e in written if e == target or e not in targets)]
            source = int(rng.choice(allowed[1:] if len(allowed) > 1 and number % 3 else allowed))
            parts.append(Part(int(rng.integers(1, max(1, most // len(targets)) + 1)), source, target))
        yield parts
        written = sorted({*written, *targets})


def sequences(parts: list[Part]) -> list[SequenceStep]:
    return [SequenceStep(np.zeros(n, np.int32), n + 9, state_from=s, state_to=t) for n, s, t in parts]


class RecurrentTests(DeviceTests):
    @needs(STATES)
    @over(convolutions)
    def test_causal_conv(self, device: Device, rng: np.random.Generator, case: Conv) -> None:
        """States of several sequences, over steps that go on, begin anew, branch and go back."""
        c, taps = case.channels, case.taps
        weight = rng.standard_normal((c, taps)).astype(np.float32)
        specs, states = [tensor(n, "f32", "M", c) for n in ("x", "out")], {"tail": StateSpec((taps - 1, c), ENTRIES)}
        held: dict[int, F64] = {-1: np.zeros((taps - 1, c))}
        limits = Limits(case.most + 2, max_seqs=4)
        with Rig(
            device, [CausalConv("x", "w", "tail", "out")], specs, {"w": dense(weight)}, limits=limits, states=states
        ) as rig:
            for parts in walk(rng, case.most):
                x = varied(rng, sum(part.fed for part in parts), c, 3)
                out = rig.run(sequences(parts), {"x": x}, ["out"])["out"]
                begin, after = 0, {}
                for part in parts:
                    own = slice(begin, begin + part.fed)
                    exact, bound, after[part.target] = oracle_recurrent.causal_conv(x[own], weight, held[part.source])
                    assert_within(f"out of {part}", out[own], exact, bound)
                    begin = own.stop
                held |= after

    @needs(STATES)
    @over(deltas)
    def test_delta_rule(self, device: Device, rng: np.random.Generator, case: Delta) -> None:
        specs, ops = delta_program(case)
        held: dict[int, F64] = {-1: np.zeros((case.v_heads, case.d_k, case.d_v))}
        with Rig(device, ops, specs, limits=Limits(case.most + 2, max_seqs=4), states=delta_states(case)) as rig:
            for parts in walk(rng, case.most):
                qkv, gates = delta_inputs(rng, case, sum(part.fed for part in parts))
                out = rig.run(sequences(parts), {"qkv": qkv, "gates": gates}, ["out"])["out"]
                begin, after = 0, {}
                for part in parts:
                    own = slice(begin, begin + part.fed)
                    exact, bound, after[part.target] = oracle_recurrent.delta_rule(
                        qkv[own], gates[own], held[part.source], case.k_heads, 1e-6, tiled=bool(case.tiled)
                    )
                    assert_within(f"out of {part}", out[own], exact, bound)
                    begin = own.stop
                held |= after

    @needs(STATES)
    def test_delta_rule_uses_eps(self, device: Device, rng: np.random.Generator) -> None:
        """Heads so small that the number inside the root decides, and heads of zeros."""
        case = Delta(2, 2, 8, 8, 12)
        specs, ops = delta_program(case)
        qkv, gates = delta_inputs(rng, case, 12)
        qkv[:, :32] *= 3e-4
        qkv[5, :32] = 0
        with Rig(device, ops, specs, limits=Limits(12), states=delta_states(case)) as rig:
            out = rig.run(sequences([Part(12, -1, 3)]), {"qkv": qkv, "gates": gates}, ["out"])["out"]
        exact, bound, _ = oracle_recurrent.delta_rule(qkv, gates, np.zeros((2, 8, 8)), 2, 1e-6, tiled=False)
        assert_within("out", out, exact, bound)

    @needs(STATES)
    def test_a_state_is_read_where_it_is_kept(self, device: Device, rng: np.random.Generator) -> None:
        """From one entry, the same tokens give the same bits whatever was computed since, and in whichever entry."""
        case = Delta(2, 4, 16, 16, 8)
        specs, ops = delta_program(case)
        first, later, other = (delta_inputs(rng, case, n) for n in (8, 5, 8))
        with Rig(device, ops, specs, limits=Limits(8, max_seqs=2), states=delta_states(case)) as rig:

            def run(parts: list[Part], inputs: tuple[Array, Array]) -> Array:
                return rig.run(sequences(parts), dict(zip(("qkv", "gates"), inputs, strict=True)), ["out"])["out"]

            run([Part(8, -1, 2)], first)
            expected = run([Part(5, 2, 4)], later)
            run([Part(4, -1, 0), Part(4, 4, 4)], other)
            assert_same_bits("from the same entry, out", run([Part(5, 2, 2)], later), expected)

    @needs(STATES)
    @pytest.mark.parametrize("shape", [(1, 1, 4), (3, 2, 36), (17, 5, 640), (5, 48, 5120)], ids=str)
    def test_delta_gates(self, device: Device, rng: np.random.Generator, shape: tuple[int, int, int]) -> None:
        m, heads, k = shape
        x = varied(rng, m, k, 4)
        named = {
            "w": norm_weight(rng, k),
            "alpha": (rng.standard_normal((heads, k)) * 3 / np.sqrt(k)).astype(np.float32),
            "beta": (rng.standard_normal((heads, k)) * 3 / np.sqrt(k)).astype(np.float32),
            "bias": (rng.standard_normal(heads) * 4).astype(np.float32),
            "rate": -(10.0 ** rng.uniform(-3, 1.2, heads)).astype(np.float32),
        }
        named["bias"][0] = 40  # softplus is nearly the identity there
        specs = [tensor("x", "f32", "M", k), tensor("out", "f32", "M", 2 * heads)]
        op = DeltaGates("x", "w", 1e-6, "alpha", "beta", "bias", "rate", "out")
        weights = {name: dense(array) for name, array in named.items()}
        with Rig(device, [op], specs, weights, limits=Limits(m + 1)) as rig:
            out = rig.run(tokens(m), {"x": x}, ["out"])["out"]
        assert_within("out", out, *oracle_recurrent.delta_gates(x, named, 1e-6))

    @needs(STATES)
    @pytest.mark.parametrize(
        "shape",
        [
            Inputs(1, 512, 96, 40, 3),
            Inputs(3, 1536, 64, 5, 4, block=512),
            Inputs(7, 768, 64, 64, 3, group=64, block=256),
            Inputs(8, 512, 100, 70, 5, taps=3),
        ],
        ids=str,
    )
    def test_inputs_of_a_recurrent_layer(self, device: Device, rng: np.random.Generator, shape: Inputs) -> None:
        """Norm, gates, both products and the convolution, in a program whose device may run them in fewer launches."""
        check_inputs(device, rng, shape)

    @needs(STATES)
    @pytest.mark.parametrize("activation", ["silu", "sigmoid"])
    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    @pytest.mark.parametrize("shape", [(1, 1, 4), (3, 6, 20), (9, 12, 128), (2, 24, 256)], ids=str)
    def test_gated_quant(
        self,
        device: Device,
        rng: np.random.Generator,
        shape: tuple[int, int, int],
        normed: bool,
        activation: Literal["silu", "sigmoid"],
    ) -> None:
        """Gates of all sizes; as they are, transformed, and with heads put in the other order first."""
        check_gated(device, rng, shape, activation, normed=normed)

    @needs(STATES)
    @pytest.mark.parametrize(
        ("source", "target"),
        [((-2,), (0,)), ((-1,), (-1,)), ((ENTRIES,), (0,)), ((0,), (ENTRIES,)), ((0, 1), (2, 2)), ((0, 1), (1, 2))],
        ids=str,
    )
    def test_bad_entries_are_refused(self, device: Device, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        """Entries that do not exist, one that two sequences write, and one that a sequence reads and another writes."""
        specs, ops = delta_program(case := Delta(1, 1, 4, 4, 2))
        with Rig(device, ops, specs, limits=Limits(2, max_seqs=2), states=delta_states(case)) as rig:
            step = rig.step(sequences([Part(1, *pair) for pair in zip(source, target, strict=True)]))
            with pytest.raises(InvalidInputError, match="entries"):
                rig.executable.start(step)

    @pytest.mark.parametrize(
        "op",
        [
            CausalConv("x", "conv", "none", "y"),
            CausalConv("x", "conv", "matrix", "y"),
            CausalConv("x", "conv", "tail", "x"),
            CausalConv("x", "taps", "tail", "y"),
            DeltaRule("x", "gates", "tail", "y", 1, 1e-6),
            DeltaRule("x", "gates", "matrix", "y", 2, 1e-6),
            DeltaRule("y", "gates", "matrix", "y", 1, 1e-6),
            DeltaGates("x", "norm", 1e-6, "conv", "conv", "norm", "norm", "y"),
            GatedQuant("x", "gates", "silu", None, 0.0, "i8", "s"),
            GatedQuant("x", "x", "silu", "norm", 0.0, "i8", "s", None, 5),
            GatedQuant("x", "x", "silu", None, 0.0, "i8", "s", Transform(8)),
        ],
        ids=repr,
    )
    def test_malformed_recurrent_operations_are_refused(self, device: Device, op: Op) -> None:
        """States, weights and tensors that do not exist or do not fit, on every device, before it looks at features."""
        specs = [tensor(n, "f32", "M", 12) for n in ("x", "y")]
        specs += [tensor("gates", "f32", "M", 2), tensor("i8", "i8", "M", 12), tensor("s", "f32", "M")]
        shapes = {"conv": (12, 4), "taps": (12, 1), "norm": (4,)}
        weights = {name: dense(np.ones(shape, np.float32)) for name, shape in shapes.items()}
        states = {"tail": StateSpec((3, 12), 2), "matrix": StateSpec((1, 4, 8), 2)}
        with pytest.raises(InvalidInputError, match=type(op).__name__):
            Rig(device, [op], specs, weights, limits=Limits(1), states=states)

    def test_recurrent_programs_are_refused_without_the_feature(self, device: Device) -> None:
        specs, ops = delta_program(case := Delta(1, 1, 4, 4, 2))
        if STATES in device.info.features:
            Rig(device, ops, specs, limits=Limits(2), states=delta_states(case)).executable.close()
        else:
            with pytest.raises(UnsupportedProgramError, match="recurrent"):
                Rig(device, ops, specs, limits=Limits(2), states=delta_states(case))


def delta_program(case: Delta) -> tuple[list[TensorSpec], list[Op]]:
    keys, values = case.k_heads * case.d_k, case.v_heads * case.d_v
    specs = [tensor("qkv", "f32", "M", 2 * keys + values), tensor("gates", "f32", "M", 2 * case.v_heads)]
    specs += [tensor("out", "f32", "M", values)]
    return specs, [DeltaRule("qkv", "gates", "s", "out", case.k_heads, 1e-6, bool(case.tiled))]


def delta_states(case: Delta) -> dict[str, StateSpec]:
    return {"s": StateSpec((case.v_heads, case.d_k, case.d_v), ENTRIES)}


def delta_inputs(rng: np.random.Generator, case: Delta, count: int) -> tuple[Array, Array]:
    """Heads of all sizes, decays from none to nearly all, and strengths from 0 to 1."""
    keys, values = 2 * case.k_heads * case.d_k, case.v_heads * case.d_v
    qk, v = varied(rng, count, keys, 3), rng.standard_normal((count, values))
    decays = -(10.0 ** rng.uniform(-4, 1, (count, case.v_heads))) * rng.integers(0, 9, (count, case.v_heads)).clip(0, 1)
    strengths = rng.uniform(-0.2, 1.2, (count, case.v_heads)).clip(0, 1)
    return np.concatenate([qk, v], 1).astype(np.float32), np.concatenate([decays, strengths], 1).astype(np.float32)


def check_gated(
    device: Device,
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    activation: Literal["silu", "sigmoid"],
    *,
    normed: bool,
) -> None:
    """``gated_quant`` of ``(m, heads, head)``: as it is, transformed, and with heads put in the other order first."""
    m, heads, head = shape
    x, gate = varied(rng, m, heads * head, 3), varied(rng, m, heads * head, 3)
    weight = norm_weight(rng, head) if normed else None
    exact = oracle_recurrent.gated(x, gate, weight, 1e-6, activation)
    codes, scale = gated_quant(device, x, gate, weight, activation, None, 0)
    check_codes(codes, scale, oracle.absmax(exact))
    signs = rng.choice(np.array([-1, 1], np.float32), heads * head)
    block = heads * head & -(heads * head)
    k_heads = {1: 1, 6: 2, 12: 4, 24: 8}[heads] if normed else 0
    if k_heads:
        exact = exact.reshape(m, heads // k_heads, k_heads, head).swapaxes(1, 2).reshape(m, -1)
    codes, scale = gated_quant(device, x, gate, weight, activation, signs, k_heads)
    check_codes(codes, scale, oracle.absmax(oracle_recurrent.hadamard(exact * signs, block)))


def gated_quant(
    device: Device,
    x: Array,
    gate: Array,
    weight: Array | None,
    activation: Literal["silu", "sigmoid"],
    signs: Array | None,
    untile: int,
) -> tuple[Array, Array]:
    m, width = x.shape
    specs = [tensor("x", "f32", "M", width), tensor("gate", "f32", "M", width)]
    specs += [tensor("out", "i8", "M", width), tensor("s", "f32", "M")]
    weights = {name: dense(array) for name, array in (("w", weight), ("signs", signs)) if array is not None}
    transform = None if signs is None else Transform(width & -width, "signs")
    op = GatedQuant("x", "gate", activation, None if weight is None else "w", 1e-6, "out", "s", transform, untile)
    with Rig(device, [op], specs, weights, limits=Limits(m + 1)) as rig:
        out = rig.run(tokens(m), {"x": x, "gate": gate}, ["out", "s"])
    return out["out"], out["s"]
