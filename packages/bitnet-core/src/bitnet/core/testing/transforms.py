"""Tests of Hadamard transforms in operations that have other tests without them, and of partial rotations."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal import (
    ROTATED_NORMS,
    STATES,
    Attention,
    Device,
    Embed,
    GluNormQuant,
    KVDtype,
    KVSpec,
    Limits,
    NormQuant,
    NormRows,
    Op,
    RopeAppend,
    SequenceStep,
    Transform,
    Weight,
)
from bitnet.core.testing import oracle, oracle_recurrent
from bitnet.core.testing.attention import BOUND
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, log_uniform, needs, over, pick
from bitnet.core.testing.norms import check_codes, norm_weight, varied
from bitnet.core.testing.rig import (
    Array,
    Rig,
    assert_rel,
    assert_same_bits,
    assert_within,
    dense,
    random_ternary,
    tensor,
    ternary,
    tokens,
)


class Blocks(NamedTuple):
    """``m`` rows of ``blocks`` blocks of ``block`` elements."""

    m: int
    blocks: int
    block: int


def block_shapes(size: Size) -> list[Blocks]:
    fixed = [Blocks(1, 1, 4), Blocks(3, 5, 8), Blocks(2, 3, 32), Blocks(5, 5, 1024), Blocks(2, 17, 1024)]

    def draw(rng: np.random.Generator) -> Blocks:
        return Blocks(log_uniform(rng, 1, 64), int(rng.integers(1, 9)), 1 << int(rng.integers(2, 13)))

    return pick(size, fixed, draw, lambda s: 200 * s.m * s.blocks * s.block)


class TransformTests(DeviceTests):
    @needs(STATES)
    @over(block_shapes)
    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    def test_norm_quant_of_a_transform(
        self, device: Device, rng: np.random.Generator, case: Blocks, normed: bool
    ) -> None:
        check_norm(device, rng, case, normed=normed)

    @needs(STATES)
    @over(block_shapes)
    @pytest.mark.parametrize("activation", ["relu2", "silu"])
    def test_glu_norm_quant_of_a_transform(
        self, device: Device, rng: np.random.Generator, case: Blocks, activation: Literal["relu2", "silu"]
    ) -> None:
        check_glu(device, rng, case, activation)

    @needs(STATES)
    @over(block_shapes)
    def test_norm_rows_of_a_transform(self, device: Device, rng: np.random.Generator, case: Blocks) -> None:
        k = case.blocks * case.block
        x, weight, signs = varied(rng, case.m, k, 3), norm_weight(rng, k), random_signs(rng, k)
        rows = sorted(rng.choice(case.m, int(rng.integers(1, case.m + 1)), replace=False).tolist())
        specs = [tensor("x", "f32", "M", k), tensor("out", "f32", "R", k)]
        op, weights = NormRows("x", "w", 1e-5, "out", Transform(case.block, "signs")), {"w": weight, "signs": signs}
        named = {name: dense(array) for name, array in weights.items()}
        with Rig(device, [op], specs, named, limits=Limits(case.m, max_rows=case.m + 1)) as rig:
            out = rig.run(tokens(case.m, rows), {"x": x}, ["out"])["out"]
        exact = oracle_recurrent.hadamard(oracle.rms_norm(x, weight, 1e-5) * signs, case.block)
        assert_rel("out", out, exact[rows], 1e-5)

    @needs(STATES)
    @over(block_shapes)
    @pytest.mark.parametrize("packed", [True, False], ids=["ternary", "float"])
    def test_embed_undoes_a_transform(
        self, device: Device, rng: np.random.Generator, case: Blocks, packed: bool
    ) -> None:
        k, signs = case.blocks * case.block, random_signs(rng, case.blocks * case.block)
        ids = rng.integers(0, 50, case.m).astype(np.int32)
        if packed:
            codes, scales = random_ternary(rng, 50, k), rng.uniform(-1, 1, (50, 1)).astype(np.float16)
            table: Array = codes * scales.astype(np.float64)
            weight: Weight = ternary(codes, scales)
        else:
            table = rng.standard_normal((50, k)).astype(np.float16)
            weight = dense(table)
        weights: dict[str, Weight] = {"t": weight, "signs": dense(signs)}
        specs, op = [tensor("out", "f32", "M", k)], Embed("t", "out", Transform(case.block, "signs"))
        with Rig(device, [op], specs, weights, limits=Limits(case.m + 1)) as rig:
            out = rig.run([SequenceStep(ids, case.m)], {}, ["out"])["out"]
        assert_rel("out", out, oracle_recurrent.hadamard(table[ids], case.block) * signs, 1e-5)

    @needs(STATES)
    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    @pytest.mark.parametrize("style", ["neox", "interleaved"])
    @pytest.mark.parametrize("part", [2, 12, 64])
    def test_rope_of_a_part(
        self,
        device: Device,
        rng: np.random.Generator,
        part: int,
        style: Literal["neox", "interleaved"],
        normed: bool,
    ) -> None:
        """The first elements of each head of q are turned, the others are only normalised."""
        m, heads, kv_heads, d, positions = 5, 4, 2, 72, 40
        x = rng.standard_normal((m, (heads + 2 * kv_heads) * d)).astype(np.float32)
        angles = rng.uniform(0, 7, (positions, part // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        weights: dict[str, Any] = {"cos": dense(cos), "sin": dense(sin), "n": dense(norm_weight(rng, d))}
        norm = "n" if normed else None
        op = RopeAppend("qkv", 0, heads, kv_heads, d, "cos", "sin", style, norm, norm, 1e-6)
        specs, kv = [tensor("qkv", "f32", "M", x.shape[1])], KVSpec(1, kv_heads, d, 3, dtype="f32")
        with Rig(device, [op], specs, weights, limits=Limits(m, max_blocks=2), kv=kv) as rig:
            out = rig.run([SequenceStep(np.zeros(m, np.int32), m + 9, [0, 1])], {"qkv": x}, ["qkv"])["qkv"]
        for row in range(m):
            q = x[row, : heads * d].reshape(heads, d).astype(np.float64)
            q = oracle.rms_norm(q, weights["n"].load(), 1e-6) if normed else q
            q[:, :part] = oracle.rotate(q[:, :part], cos[row + 9], sin[row + 9], style)
            assert_rel(f"q of token {row}", out[row, : heads * d].reshape(heads, d), q, 2e-6 if normed else 1e-6)
        assert_same_bits("v", out[:, (heads + kv_heads) * d :], x[:, (heads + kv_heads) * d :])

    @needs(STATES)
    @pytest.mark.parametrize("kv_dtype", ["f32", "f16", "i8"])
    @pytest.mark.parametrize("style", ["neox", "interleaved"])
    def test_attention_to_keys_with_a_rotated_part(
        self, device: Device, rng: np.random.Generator, style: Literal["neox", "interleaved"], kv_dtype: KVDtype
    ) -> None:
        """Keys are in the cache with the elements that are not rotated, too."""
        m, heads, kv_heads, d, part = 9, 2, 1, 32, 12
        x = rng.standard_normal((m, (heads + 2 * kv_heads) * d)).astype(np.float32)
        angles = rng.uniform(0, 7, (m, part // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        weights: dict[str, Weight] = {"cos": dense(cos), "sin": dense(sin)}
        ops: list[Op] = [
            RopeAppend("qkv", 0, heads, kv_heads, d, "cos", "sin", style),
            Attention("qkv", "out", 0, heads, kv_heads, d),
        ]
        specs = [tensor("qkv", "f32", "M", x.shape[1]), tensor("out", "f32", "M", heads * d)]
        kv = KVSpec(1, kv_heads, d, 3, dtype=kv_dtype)
        with Rig(device, ops, specs, weights, limits=Limits(m, max_blocks=1), kv=kv) as rig:
            out = rig.run([SequenceStep(np.zeros(m, np.int32), m, [2])], {"qkv": x}, ["qkv", "out"])
        cache, all_heads = oracle.Cache(kv_dtype, m), x.reshape(m, -1, d).astype(np.float64)
        for row in range(m):
            q, k = out["qkv"][row].reshape(-1, d)[:heads], all_heads[row, heads : heads + kv_heads].copy()
            k[:, :part] = oracle.rotate(k[:, :part], cos[row], sin[row], style)
            cache.put(0, row, k, all_heads[row, heads + kv_heads :])
            exact, doubt = (f(0, row, q).reshape(-1) for f in (cache.attend, cache.doubt))
            bound = BOUND[kv_dtype] * abs(exact).max() + doubt
            assert_within(f"attention of token {row}", out["out"][row], exact, bound)

    @needs(STATES, ROTATED_NORMS)
    @pytest.mark.parametrize("kv_dtype", ["f32", "f16", "i8"])
    @pytest.mark.parametrize("style", ["neox", "interleaved"])
    @pytest.mark.parametrize("part", [2, 12, 64])
    def test_norms_after_the_rotation_of_a_part(
        self,
        device: Device,
        rng: np.random.Generator,
        part: int,
        style: Literal["neox", "interleaved"],
        kv_dtype: KVDtype,
    ) -> None:
        """All of a head of q and k counts for its norm. The tables make heads longer, which a norm before it would
        leave."""
        m, heads, kv_heads, d = 9, 4, 2, 72
        x = rng.standard_normal((m, (heads + 2 * kv_heads) * d)).astype(np.float32)
        angles = rng.uniform(0, 7, (m, part // 2))
        cos, sin = ((1.5 * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
        norms = {name: norm_weight(rng, d) for name in ("qn", "kn")}
        weights: dict[str, Weight] = {name: dense(w) for name, w in {"cos": cos, "sin": sin, **norms}.items()}
        ops: list[Op] = [
            RopeAppend("qkv", 0, heads, kv_heads, d, "cos", "sin", style, "qn", "kn", 1e-6, norms_last=True),
            Attention("qkv", "out", 0, heads, kv_heads, d),
        ]
        specs = [tensor("qkv", "f32", "M", x.shape[1]), tensor("out", "f32", "M", heads * d)]
        kv = KVSpec(1, kv_heads, d, 3, dtype=kv_dtype)
        with Rig(device, ops, specs, weights, limits=Limits(m, max_blocks=1), kv=kv) as rig:
            out = rig.run([SequenceStep(np.zeros(m, np.int32), m, [2])], {"qkv": x}, ["qkv", "out"])
        cache = oracle.Cache(kv_dtype, m)
        for row in range(m):
            exact = x[row].reshape(-1, d).astype(np.float64)
            exact[:-kv_heads, :part] = oracle.rotate(exact[:-kv_heads, :part], cos[row], sin[row], style)
            q = out["qkv"][row].reshape(-1, d)[:heads]
            assert_rel(f"q of token {row}", q, oracle.rms_norm(exact[:heads], norms["qn"], 1e-6), 2e-6)
            k = oracle.rms_norm(exact[heads : heads + kv_heads], norms["kn"], 1e-6)
            cache.put(0, row, k, exact[heads + kv_heads :])
            attended, doubt = (f(0, row, q).reshape(-1) for f in (cache.attend, cache.doubt))
            bound = BOUND[kv_dtype] * abs(attended).max() + doubt
            assert_within(f"attention of token {row}", out["out"][row], attended, bound)

    def test_transforms_are_refused_without_the_feature(self, device: Device) -> None:
        """An operation with a transform never runs as if it had none."""
        specs = [tensor("x", "f32", "M", 8), tensor("i8", "i8", "M", 8), tensor("s", "f32", "M")]
        op = NormQuant("x", None, 0.0, "i8", "s", Transform(8))
        if STATES in device.info.features:
            Rig(device, [op], specs, limits=Limits(1)).executable.close()
        else:
            with pytest.raises(UnsupportedProgramError):
                Rig(device, [op], specs, limits=Limits(1))

    @pytest.mark.parametrize(
        "transform", [Transform(2), Transform(12), Transform(16), Transform(8, "none"), Transform(8, "t")], ids=repr
    )
    def test_malformed_transforms_are_refused(self, device: Device, transform: Transform) -> None:
        """Blocks that are too small, no power of two, or do not divide the row; and signs that are no row."""
        specs = [tensor("x", "f32", "M", 24), tensor("i8", "i8", "M", 24), tensor("s", "f32", "M")]
        op = NormQuant("x", None, 0.0, "i8", "s", transform)
        with pytest.raises(InvalidInputError, match="NormQuant"):
            Rig(device, [op], specs, {"t": dense(np.ones(8, np.float32))}, limits=Limits(1))


def random_signs(rng: np.random.Generator, count: int) -> Array:
    return rng.choice(np.array([-1, 1], np.float32), count)


def check_norm(device: Device, rng: np.random.Generator, case: Blocks, *, normed: bool) -> None:
    """``norm_quant`` with a transform and signs."""
    k = case.blocks * case.block
    x, weight, signs = varied(rng, case.m, k, 6), norm_weight(rng, k) if normed else None, random_signs(rng, k)
    op = NormQuant("x", "w" if normed else None, 1e-5, "out", "s", Transform(case.block, "signs"))
    out = _quantised(device, op, x, {"w": weight, "signs": signs}, k)
    exact = oracle_recurrent.hadamard(oracle.rms_norm(x, weight, 1e-5) * signs, case.block)
    check_codes(out["out"], out["s"], oracle.absmax(exact))


def check_glu(device: Device, rng: np.random.Generator, case: Blocks, activation: Literal["relu2", "silu"]) -> None:
    """``glu_norm_quant`` with a norm and a transform."""
    k = case.blocks * case.block
    x, weight = varied(rng, case.m, 2 * k, 3), norm_weight(rng, k)
    op = GluNormQuant("x", "w", 1e-5, activation, "out", "s", Transform(case.block))
    out = _quantised(device, op, x, {"w": weight}, k)
    exact = oracle_recurrent.hadamard(oracle.rms_norm(oracle.glu(x, activation), weight, 1e-5), case.block)
    check_codes(out["out"], out["s"], oracle.absmax(exact))


def _quantised(
    device: Device, op: NormQuant | GluNormQuant, x: Array, weights: dict[str, Array | None], k: int
) -> dict[str, Array]:
    name = op.x if isinstance(op, NormQuant) else op.gate_up
    specs = [tensor(name, "f32", "M", x.shape[1]), tensor("out", "i8", "M", k), tensor("s", "f32", "M")]
    named = {name: dense(array) for name, array in weights.items() if array is not None}
    with Rig(device, [op], specs, named, limits=Limits(len(x) + 1)) as rig:
        return rig.run(tokens(len(x)), {name: x}, ["out", "s"])
