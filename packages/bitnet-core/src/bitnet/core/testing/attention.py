"""Tests of ``rope_append`` and ``attention``, which can only be observed together, through the paged KV cache.

Long, because all tests share one class, which has both operations beside the cache of the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal import (
    ROTATED_NORMS,
    Attention,
    Device,
    Embed,
    KVDtype,
    KVSpec,
    Limits,
    Op,
    Program,
    RopeAppend,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing import oracle
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, needs, over, pick
from bitnet.core.testing.rig import Array, Rig, assert_rel, assert_same_bits, assert_within, dense, not_yet, tensor

BOUND = {"f32": 1e-5, "f16": 2e-3, "i8": 2e-3}
EPS = 1e-6


class Heads(NamedTuple):
    """Heads of an attention layer, and how its cache is kept."""

    h: int
    g: int
    d: int
    block: int = 32
    dtype: KVDtype = "f16"
    style: Literal["neox", "interleaved"] = "neox"

    @property
    def columns(self) -> int:
        return (self.h + 2 * self.g) * self.d


class Part(NamedTuple):
    """A sequence in a step: ``new`` tokens after ``past`` cached ones."""

    past: int
    new: int

    def __str__(self) -> str:
        return f"{self.past}+{self.new}"


def head_shapes(size: Size) -> list[Heads]:
    fixed = [
        Heads(1, 1, 64),
        Heads(4, 4, 80, dtype="f32"),
        Heads(4, 2, 80, 16),
        Heads(2, 1, 48),
        Heads(6, 3, 16, style="interleaved"),
        Heads(4, 2, 96, style="interleaved"),
        Heads(6, 2, 100, dtype="f32"),
        Heads(4, 1, 128, 16),
        Heads(5, 1, 128, dtype="f32", style="interleaved"),
        Heads(20, 5, 128),
        Heads(6, 1, 20, 64),
        Heads(7, 1, 32, 16, "f32"),
        Heads(8, 1, 64, 16, "f32"),
        Heads(8, 2, 256),
        Heads(18, 1, 32, 16),
        Heads(12, 4, 64),
    ]
    fixed += [heads._replace(dtype="i8") for heads in fixed if heads.dtype == "f16"]
    fixed += [Heads(6, 2, 100, dtype="i8"), Heads(7, 1, 32, 16, "i8", "interleaved")]

    def draw(rng: np.random.Generator) -> Heads:
        g = int(rng.integers(1, 5))
        ratio = int(rng.integers(1, 9))
        d = int(rng.choice([16, 32, 64, 80, 96, 100, 128, 256]))
        block = int(rng.choice([16, 32, 64]))
        dtypes: tuple[KVDtype, ...] = ("f32", "f16", "i8")
        styles: tuple[Literal["neox", "interleaved"], ...] = ("neox", "interleaved")
        return Heads(ratio * g, g, d, block, dtypes[rng.integers(3)], styles[rng.integers(2)])

    # The work of the mixed step below, roughly: 100 queries over 100 keys.
    return pick(size, fixed, draw, lambda s: s.h * s.d * {"small": 400, "quick": 8_000, "full": 20_000}[size])


def mixtures(size: Size) -> list[tuple[Part, ...]]:
    """Steps of several sequences: prefill, a later chunk of it, decode, and both at once."""
    short = [
        (Part(0, 1),),
        (Part(0, 9),),
        (Part(7, 1),),
        (Part(0, 5), Part(15, 1), Part(16, 1), Part(3, 4)),
    ]
    longer = [
        (Part(31, 1), Part(32, 1), Part(33, 1), Part(0, 1), Part(255, 1)),
        (Part(0, 130), Part(64, 1), Part(40, 30)),
        (Part(100, 77), Part(0, 3)),
        tuple(Part(n, 1) for n in range(3, 70, 3)),
    ]
    longest = [(Part(0, 512),), (Part(4000, 1), Part(1023, 1)), (Part(1500, 100),)]
    return short + (longer if size != "small" else []) + (longest if size == "full" else [])


def angles(positions: int, d: int) -> tuple[Array, Array]:
    """The usual tables of cosines and sines, ``[positions, d / 2]``."""
    turn = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(d // 2) / (d // 2))
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def identity(positions: int, d: int) -> tuple[Array, Array]:
    """Tables of the identity rotation."""
    return np.ones((positions, d // 2), np.float32), np.zeros((positions, d // 2), np.float32)


class Paged:
    """A ``rope_append`` and an ``attention`` on a device beside the oracle's cache, block tables shuffled.

    Args:
        tables: Block tables of a sequence. The operations take the last one; the others name other sequences' blocks.
    """

    def __init__(
        self,
        device: Device,
        rng: np.random.Generator,
        heads: Heads,
        *,
        length: int,
        seqs: int,
        chunk: int,
        turning: bool = True,
        norms: bool = False,
        norms_last: bool = False,
        window: int | None = None,
        tables: int = 1,
    ) -> None:
        self.rng, self.heads, self.others = rng, heads, tables - 1
        self.most = -(-length // heads.block) + 1
        blocks, positions = self.most * seqs + 3, self.most * heads.block
        self.cos, self.sin = angles(positions, heads.d) if turning else identity(positions, heads.d)
        shape = heads.h, heads.g, heads.d
        self.norms = dict.fromkeys(("qn", "kn"), None) if not norms else {n: self._norm() for n in ("qn", "kn")}
        self.norms_last = norms_last
        named = {"q_norm": "qn", "k_norm": "kn", "eps": EPS, "norms_last": norms_last} if norms else {}
        rope = RopeAppend("qkv", 1, *shape, "cos", "sin", heads.style, **named, table=self.others)  # type: ignore[arg-type]
        ops: list[Op] = [rope, Attention("qkv", "out", 1, *shape, window, self.others)]
        specs = [tensor("qkv", "f32", "M", heads.columns), tensor("out", "f32", "M", heads.h * heads.d)]
        weights = {"cos": dense(self.cos), "sin": dense(self.sin)}
        weights |= {name: dense(norm) for name, norm in self.norms.items() if norm is not None}
        kv = KVSpec(2, heads.g, heads.d, blocks, heads.block, heads.dtype)
        self.rig = Rig(device, ops, specs, weights, limits=Limits(chunk, seqs, 1, self.most, tables), kv=kv)
        self.cache = oracle.Cache(heads.dtype, positions, window)
        order = rng.permutation(blocks).tolist()
        self.tables = [order[s * self.most : (s + 1) * self.most] for s in range(seqs)]
        self._fill_with_nan(order)

    def _fill_with_nan(self, blocks: Sequence[int]) -> None:
        """Fill the whole cache with NaN, which uninitialised memory may hold."""
        chunk, size = self.rig.program.limits.max_tokens, self.heads.block
        qkv = np.full((chunk, self.heads.columns), np.nan, np.float32)
        for first in range(0, len(blocks), self.most):
            table = blocks[first : first + self.most]
            for at in range(0, len(table) * size, chunk):
                count = min(chunk, len(table) * size - at)
                self.rig.executable.write("qkv", qkv[:count])
                step = self.rig.step([self._sequence(count, at + count, table)])
                run(self.rig.executable, step)

    def _norm(self) -> Array:
        return self.rng.uniform(-2, 2, self.heads.d).astype(np.float32)

    def _turned(self, x: Array, norm: Array | None, owner: Sequence[tuple[int, int]]) -> Array:
        """Heads ``x[m, heads, d]``, normalised and rotated to each token's position, or the other way round."""
        pairs = zip(x if self.norms_last else self._normed(x, norm), owner, strict=True)
        turned = [oracle.rotate(head, self.cos[p], self.sin[p], self.heads.style) for head, (_, p) in pairs]
        return self._normed(np.stack(turned), norm) if self.norms_last else np.stack(turned)

    def _normed(self, x: Array, norm: Array | None) -> Array:
        return x if norm is None else np.stack([oracle.rms_norm(head, norm, EPS) for head in x])

    def random(self, tokens: int) -> Array:
        """Rows of ``qkv`` whose scores have a spread typical of trained models."""
        qkv = self.rng.standard_normal((tokens, self.heads.columns)).astype(np.float32)
        qkv[:, : self.heads.h * self.heads.d] *= 2
        return qkv

    def step(self, parts: Sequence[tuple[int, Part]]) -> list[SequenceStep]:
        """The step of each ``(sequence, part)``, whose tokens do not matter."""
        return [self._sequence(p.new, p.past + p.new, self.tables[s]) for s, p in parts]

    def _sequence(self, new: int, length: int, table: Sequence[int]) -> SequenceStep:
        wrong = [self.tables[0][: len(table)] for _ in range(self.others)]
        first, *more = (*wrong, table)
        return SequenceStep(np.zeros(new, np.int32), length, first, more_blocks=more)

    def fill(self, s: int, part: Part) -> None:
        """Append a part of a sequence to the cache, without checking attention's result."""
        h, g, d = self.heads[:3]
        owner, qkv = [(s, part.past + i) for i in range(part.new)], self.random(part.new)
        self.rig.run(self.step([(s, part)]), {"qkv": qkv}, ["qkv", "out"])
        _, k, v = np.split(qkv.reshape(part.new, h + 2 * g, d), [h, h + g], axis=1)
        for (_, p), key, value in zip(owner, self._turned(k, self.norms["kn"], owner), v, strict=True):
            self.cache.put(s, p, key, value)

    def run(self, parts: Sequence[tuple[int, Part]], qkv: Array | None = None) -> Array:
        """Run a step with q, k and v for each ``(sequence, part)``, check all results, and return attention's."""
        heads, (h, g, d) = self.heads, self.heads[:3]
        owner = [(s, part.past + i) for s, part in parts for i in range(part.new)]
        m = len(owner)
        qkv = self.random(m) if qkv is None else qkv
        result = self.rig.run(self.step(parts), {"qkv": qkv}, ["qkv", "out"])
        q, k, v = np.split(qkv.reshape(m, h + 2 * g, d), [h, h + g], axis=1)
        out_q, out_k, out_v = np.split(result["qkv"].reshape(m, h + 2 * g, d), [h, h + g], axis=1)
        exact_q, exact_k = self._turned(q, self.norms["qn"], owner), self._turned(k, self.norms["kn"], owner)
        assert_rel("rotated q", out_q.reshape(m, -1), exact_q.reshape(m, -1), 1e-6)
        assert_same_bits("v of qkv", out_v, v)
        if not np.array_equal(out_k, k):
            only_normed = k if self.norms_last else self._normed(k, self.norms["kn"])
            near = only_normed if np.allclose(out_k, only_normed, rtol=1e-3) else exact_k
            assert_rel("k of qkv", out_k.reshape(m, -1), near.reshape(m, -1), 1e-6)
        for i, (s, p) in enumerate(owner):
            self.cache.put(s, p, exact_k[i], v[i])
        exact, doubt = (
            np.stack([of(s, p, out_q[i]).reshape(-1) for i, (s, p) in enumerate(owner)])
            for of in (self.cache.attend, self.cache.doubt)
        )
        bound = BOUND[heads.dtype] * abs(exact).max(axis=-1, keepdims=True) + doubt
        assert_within("attention", result["out"], exact, bound)
        return result["out"]

    def prefill(self, *pasts: int) -> None:
        """Prefill each sequence to a length, in chunks that cross block boundaries."""
        for s, past in enumerate(pasts):
            at = 0
            while at < past:
                count = min(self.rig.program.limits.max_tokens, past - at, int(self.rng.integers(1, 90)))
                self.run([(s, Part(at, count))])
                at += count


class AttentionTests(DeviceTests):
    @over(head_shapes)
    def test_heads(self, device: Device, rng: np.random.Generator, case: Heads) -> None:
        """Every ratio of heads, width, block size, cache type and style, on one mixed step."""
        parts = [Part(0, 6), Part(17, 1), Part(5, 3)]
        if self.run_size != "small":
            parts += [Part(70, 1), Part(0, 40)]
        self._mixture(device, rng, case, parts)

    @pytest.mark.parametrize(
        "heads",
        [Heads(4, 2, 128), Heads(3, 1, 20, 16, "f32", "interleaved"), Heads(4, 2, 64, dtype="i8")],
        ids=["f16", "f32", "i8"],
    )
    def test_heads_with_norms(self, device: Device, rng: np.random.Generator, heads: Heads) -> None:
        """Each head of q and of k is normalised before it is turned."""
        with not_yet():
            paged = Paged(device, rng, heads, length=60, seqs=2, chunk=40, norms=True)
        with paged.rig:
            paged.run([(0, Part(0, 30)), (1, Part(0, 3))])
            paged.run([(1, Part(3, 1)), (0, Part(30, 1))])

    @needs(ROTATED_NORMS)
    @pytest.mark.parametrize(
        "heads",
        [Heads(4, 2, 128), Heads(3, 1, 20, 16, "f32", "interleaved"), Heads(4, 2, 64, dtype="i8")],
        ids=["f16", "f32", "i8"],
    )
    def test_norms_after_the_rotation(self, device: Device, rng: np.random.Generator, heads: Heads) -> None:
        """Each head of q and of k is turned before it is normalised, by weights that differ within a pair."""
        paged = Paged(device, rng, heads, length=60, seqs=2, chunk=40, norms=True, norms_last=True)
        with paged.rig:
            paged.run([(0, Part(0, 30)), (1, Part(0, 3))])
            paged.run([(1, Part(3, 1)), (0, Part(30, 1))])

    def test_a_device_without_norms_after_rotations_refuses(self, device: Device) -> None:
        """One that has them refuses an operation that asks for their order, but has no norms."""
        capable, table = ROTATED_NORMS in device.info.features, dense(np.ones((8, 8), np.float32))
        named = {} if capable else {"q_norm": "n", "k_norm": "n", "eps": EPS}
        op = RopeAppend("qkv", 0, 1, 1, 16, "t", "t", **named, norms_last=True)  # type: ignore[arg-type]
        weights = {"t": table} | ({} if capable else {"n": dense(np.ones(16, np.float32))})
        refusal = (InvalidInputError, "norms_last needs") if capable else (UnsupportedProgramError, "norms of heads")
        with pytest.raises(refusal[0], match=refusal[1]):
            Rig(device, [op], [tensor("qkv", "f32", "M", 48)], weights, limits=Limits(1), kv=KVSpec(1, 1, 16, 1))

    @over(mixtures)
    @pytest.mark.parametrize(
        "heads",
        [Heads(4, 2, 64, 16, "f32"), Heads(8, 2, 32, 32, "f16", "interleaved"), Heads(4, 2, 64, 16, "i8")],
        ids=["f32", "f16", "i8"],
    )
    def test_mixtures(self, device: Device, rng: np.random.Generator, case: tuple[Part, ...], heads: Heads) -> None:
        self._mixture(device, rng, heads, case)

    def _mixture(self, device: Device, rng: np.random.Generator, heads: Heads, parts: Sequence[Part]) -> None:
        length, chunk = max(p.past + p.new for p in parts), sum(p.new for p in parts)
        paged = Paged(device, rng, heads, length=length, seqs=len(parts), chunk=max(chunk, 33) + 1)
        with paged.rig:
            paged.prefill(*(p.past for p in parts))
            paged.run(list(enumerate(parts)))

    @pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
    def test_a_long_context(self, device: Device, rng: np.random.Generator, dtype: KVDtype) -> None:
        """Decode so far from the start that a device may split a sequence's positions, beside one that is short."""
        past = {"small": 300, "quick": 700, "full": 1100}[self.run_size]
        paged = Paged(device, rng, Heads(4, 1, 32, 16, dtype), length=past + 2, seqs=2, chunk=256)
        with paged.rig:
            for at in range(0, past, 256):
                paged.run([(0, Part(at, min(256, past - at)))])
            paged.prefill(0, 5)
            for i in range(2):
                paged.run([(0, Part(past + i, 1)), (1, Part(5 + i, 1))])

    @pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
    def test_huge_scores(self, device: Device, rng: np.random.Generator, dtype: KVDtype) -> None:
        """Scores in the hundreds overflow unless the maximum is subtracted; small integers keep them exact."""
        heads = Heads(4, 1, 64, dtype=dtype)
        paged = Paged(device, rng, heads, length=80, seqs=2, chunk=64, turning=False)
        qkv = paged.random(50)
        qkv[:, :256] = 16 * rng.integers(-2, 3, (50, 256))
        qkv[:, 256:320] = rng.integers(-3, 4, (50, 64))
        with paged.rig:
            paged.run([(0, Part(0, 30))], qkv[:30])
            paged.run([(1, Part(0, 15)), (0, Part(30, 5))], qkv[30:])

    @pytest.mark.parametrize("dtype", ["f32", "i8"])
    def test_one_sequence_leaves_another_alone(self, device: Device, rng: np.random.Generator, dtype: KVDtype) -> None:
        """Appending to and reusing blocks of one sequence changes nothing another sequence sees."""
        paged = Paged(device, rng, Heads(4, 2, 64, 16, dtype), length=60, seqs=3, chunk=40)
        lengths = [30, 18, 1]
        with paged.rig:
            paged.prefill(*lengths)
            for s in (0, 1, 2, 0, 1):
                paged.run([(s, Part(lengths[s], 1))])
                lengths[s] += 1
            # Sequence 1 ends; its blocks go to a new one, which must see none of the old positions.
            paged.run([(1, Part(0, 2)), (0, Part(lengths[0], 1))])
            paged.run([(2, Part(lengths[2], 9)), (1, Part(2, 1))])

    @pytest.mark.parametrize("dtype", ["f32", "i8"])
    def test_sequences_share_the_blocks_of_a_prefix(
        self, device: Device, rng: np.random.Generator, dtype: KVDtype
    ) -> None:
        paged = Paged(device, rng, Heads(4, 2, 64, 16, dtype), length=60, seqs=3, chunk=50)
        with paged.rig:
            paged.prefill(32)
            for other in (1, 2):
                paged.tables[other][:2] = paged.tables[0][:2]
                paged.cache.share(0, other, 32)
            paged.run([(0, Part(32, 1)), (1, Part(32, 7)), (2, Part(32, 1))])
            paged.run([(2, Part(33, 1)), (1, Part(39, 1)), (0, Part(33, 2))])

    @pytest.mark.parametrize("dtype", ["f32", "i8"])
    def test_a_prefix_is_read_in_the_step_that_writes_it(
        self, device: Device, rng: np.random.Generator, dtype: KVDtype
    ) -> None:
        paged = Paged(device, rng, Heads(4, 2, 64, 16, dtype), length=40, seqs=2, chunk=40)
        with paged.rig:
            paged.tables[1][:1] = paged.tables[0][:1]
            paged.cache.share(0, 1, 16)
            paged.run([(0, Part(0, 20)), (1, Part(16, 5))])

    @pytest.mark.parametrize("dtype", ["f16", "i8"])
    def test_a_decoding_step_reads_what_it_writes_for_another(
        self, device: Device, rng: np.random.Generator, dtype: KVDtype
    ) -> None:
        """One sequence's new position is the end of the prefix that the other one stands on."""
        paged = Paged(device, rng, Heads(4, 2, 64, 16, dtype), length=40, seqs=2, chunk=40)
        with paged.rig:
            paged.tables[1][:1] = paged.tables[0][:1]
            paged.cache.share(0, 1, 16)
            paged.run([(0, Part(0, 15))])
            paged.run([(0, Part(15, 1)), (1, Part(16, 1))])

    @pytest.mark.parametrize("dtype", ["f32", "i8"])
    def test_a_rotation_that_two_attentions_read(
        self, device: Device, rng: np.random.Generator, dtype: KVDtype
    ) -> None:
        """A device that fuses the rotation with the first may not leave the second one q as it was before."""
        heads, limits, most = Heads(4, 2, 64, 16, dtype), Limits(1, 1, 1, 1), 8
        h, g, d = shape = heads[:3]
        table, (cos, sin) = rng.standard_normal((most, heads.columns)).astype(np.float32), angles(most, d)
        ops: list[Op] = [Embed("table", "qkv"), RopeAppend("qkv", 0, *shape, "cos", "sin", heads.style)]
        names = "first", "second"
        specs = [tensor("qkv", "f32", "M", heads.columns), *(tensor(name, "f32", "M", h * d) for name in names)]
        weights = {"table": dense(table), "cos": dense(cos), "sin": dense(sin)}
        program = Program(
            [*ops, *(Attention("qkv", name, 0, *shape) for name in names)],
            {spec.name: spec for spec in specs},
            weights,
            limits,
            KVSpec(1, g, d, 1, heads.block, heads.dtype),
        )
        cache, executable = oracle.Cache(heads.dtype, most), device.compile(program)
        try:
            for p, token in enumerate(rng.permutation(most).tolist()):
                run(executable, Step(StepLayout(limits), [SequenceStep([token], p + 1, [0])], block_size=heads.block))
                q, k, v = np.split(table[token].reshape(-1, d), [h, h + g])
                cache.put(0, p, oracle.rotate(k, cos[p], sin[p], heads.style), v)
                turned = oracle.rotate(q, cos[p], sin[p], heads.style)
                exact, doubt = (of(0, p, turned).reshape(1, -1) for of in (cache.attend, cache.doubt))
                bound = 2 * BOUND[heads.dtype] * abs(exact).max() + doubt  # off by those of both operations at most
                for name in names:
                    assert_within(f"the {name} attention", executable.read(name, 1), exact, bound)
        finally:
            executable.close()
