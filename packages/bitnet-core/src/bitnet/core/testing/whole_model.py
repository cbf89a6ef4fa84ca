"""Tests of a whole small model: every operation within the program, the logits, replay and ``count``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from bitnet.core.hal import (
    GREEDY,
    KV_I8,
    NO_TOKEN,
    Device,
    KVDtype,
    Limits,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing import draws, oracle
from bitnet.core.testing.attention import BOUND
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import needs
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.norms import check_codes
from bitnet.core.testing.poison import poison_step
from bitnet.core.testing.rig import Array, Rig, assert_products, assert_rel, assert_same_bits, assert_within, not_yet

END_TO_END = 0.05
"""Bound on logits against float64, of the greatest in a row. An activation near a rounding border may be quantised one
step of 127 apart, which moves the logits of models as small as these by about 1 %, and an f16 cache moves many by a
little: right implementations are off by 2.3 % at most (decision 0033). A wrong operation, block or
position gives errors of the order of 1. What is tight is the bound of each operation, checked on the same steps."""

TYPICAL = 0.03
"""Bound on the median row of a text, of two layers and an f16 cache: 1.1 % is the most that was seen."""

TYPICAL_OF_A_LAYER = 2e-5
"""Bound on the median row of a single layer with an f32 cache, where most rows have no code that falls to the other
side: what ``norm_rows`` and ``dense_matmul`` may differ together. 2.4e-7 is the most that was seen."""

INT8_CACHE, TYPICAL_OF_INT8 = 0.1, 0.04
"""Bounds on logits with an i8 cache against float64 with an exact one, for a row and for the median row of a text. The
contract's codes, computed in float64, gave at most 5.0 % and 2.4 %; f16 gave 3.3 % and 1.8 %."""

KINDS = ("bitnet", "llama", "wide", "qwen3", "qwen2", "olmo")

LIMITS = Limits(max_tokens=64, max_seqs=4, max_rows=8, max_blocks=8)


class Feed(NamedTuple):
    """Tokens fed to a sequence, and those whose logits are wanted."""

    sequence: int
    tokens: Array
    rows: Sequence[int] = ()
    sampling: SamplingParams = GREEDY


class Running:
    """The model on a device. Each operation is checked against its bound, on its actual inputs."""

    def __init__(self, device: Device, model: TinyModel, kv_dtype: KVDtype) -> None:
        self.model, self.bound = model, BOUND[kv_dtype]
        program = model.program(LIMITS, 4 * LIMITS.max_blocks, kv_dtype)
        self.rig = Rig(device, program.ops, program.tensors.values(), program.weights, limits=LIMITS, kv=program.kv)
        order = model.rng.permutation(4 * LIMITS.max_blocks).reshape(4, LIMITS.max_blocks)
        self.tables: list[list[int]] = order.tolist()
        self.texts: list[list[int]] = [[] for _ in self.tables]
        self.caches = [oracle.Cache(kv_dtype, LIMITS.max_blocks * BLOCK) for _ in range(model.layers)]

    def step(self, feeds: Sequence[Feed]) -> list[SequenceStep]:
        parts = []
        for feed in feeds:
            self.texts[feed.sequence] += feed.tokens.tolist()
            length, blocks = len(self.texts[feed.sequence]), self.tables[feed.sequence]
            parts.append(SequenceStep(feed.tokens, length, blocks, feed.rows, feed.sampling))
        return parts

    def run(self, feeds: Sequence[Feed]) -> Array:
        """Run a step, check everything, and return the logits of its rows."""
        step = self.step(feeds)
        t = self.rig.run(step, {}, list(self.rig.program.tensors))
        model, (h, g, d) = self.model, (self.model.heads, self.model.kv_heads, self.model.head_dim)
        owner = [
            (f.sequence, s.length - len(s.tokens) + i)
            for f, s in zip(feeds, step, strict=True)
            for i in range(len(s.tokens))
        ]
        x = model.dense["embd"][np.concatenate([f.tokens for f in feeds])].astype(np.float32)
        for i in range(model.layers):
            self._codes(t, f"a.{i}", self._norm(t, f"ca.{i}", x, f"attn_norm.{i}"))
            qkv = self._product(t, f"a.{i}", f"q.{i}", f"k.{i}", f"v.{i}")
            qkv = (qkv + model.dense.get(f"bias.{i}", np.float32(0))).reshape(len(x), h + 2 * g, d)
            exact, doubt = np.empty((2, len(x), h * d))
            rotated = t[f"qkv.{i}"].reshape(len(x), h + 2 * g, d)[:, :h]
            turned = np.stack([self._turn(qkv[m, : h + g], i, p) for m, (_, p) in enumerate(owner)])
            assert_rel(f"rotated q, layer {i}", rotated.reshape(len(x), -1), turned[:, :h].reshape(len(x), -1), 1e-6)
            for m, (s, p) in enumerate(owner):
                self.caches[i].put(s, p, turned[m, h:], qkv[m, h + g :])
            for m, (s, p) in enumerate(owner):
                exact[m] = self.caches[i].attend(s, p, rotated[m]).reshape(-1)
                doubt[m] = self.caches[i].doubt(s, p, rotated[m]).reshape(-1)
            bound = self.bound * abs(exact).max(axis=-1, keepdims=True) + doubt
            assert_within(f"attention, layer {i}", t[f"att.{i}"], exact, bound)
            self._codes(t, f"b.{i}", oracle.rms_norm(t[f"att.{i}"], model.dense.get(f"attn_sub.{i}"), model.eps))
            x = x + self._product(t, f"b.{i}", f"o.{i}")
            self._codes(t, f"c.{i}", self._norm(t, f"cf.{i}", x, f"ffn_norm.{i}"))
            assert_same_bits(
                f"gate and up, layer {i}", t[f"gu.{i}"], self._product(t, f"c.{i}", f"gate.{i}", f"up.{i}")
            )
            act = oracle.glu(t[f"gu.{i}"], model.activation)
            self._codes(t, f"e.{i}", oracle.rms_norm(act, model.dense.get(f"ffn_sub.{i}"), model.eps))
            x = x + self._product(t, f"e.{i}", f"down.{i}")
        assert_rel("residual", t["x"], x.astype(np.float64), 1e-6)
        if len(t["y"]):
            self._check_rows(t, step)
        return t["logits"]

    def _check_rows(self, t: dict[str, Array], step: Sequence[SequenceStep]) -> None:
        begins = np.cumsum([0, *(len(s.tokens) for s in step)])
        wanted = [int(b) + row for b, s in zip(begins, step, strict=False) for row in s.rows]
        assert_rel("norm_rows", t["y"], self._norm(t, "cy", t["x"], "norm")[wanted], 1e-5)
        assert_products("logits", t["logits"], t["y"], self.model.dense["head"])
        rows = [(s.sampling, s.length - len(s.tokens) + row) for s in step for row in s.rows]
        for r, (params, position) in enumerate(rows):
            assert t["token"][r] in draws.allowed(t["logits"][r], params, position)

    def _norm(self, t: dict[str, Array], name: str, x: Array, weight: str) -> oracle.F64:
        """A norm of the residual stream, applied to the device's centred rows if the model has LayerNorms."""
        if self.model.centered:
            bound = 2e-6 * abs(x.astype(np.float64)).max(axis=1, keepdims=True)
            assert_within(f"centered rows {name}", t[name], oracle.center(x), bound)
            x = t[name]
        return oracle.rms_norm(x, self.model.dense[weight], self.model.eps)

    def _codes(self, t: dict[str, Array], name: str, y: oracle.F64) -> None:
        kind, layer = name.split(".")
        check_codes(t[name], t[f"{kind}s.{layer}"], oracle.absmax(y))

    def _product(self, t: dict[str, Array], name: str, *weights: str) -> oracle.F32:
        kind, layer = name.split(".")
        scale, own = t[f"{kind}s.{layer}"], [self.model.ternary[w] for w in weights]
        if self.model.group is None:
            return oracle.ternary_matmul(t[name], scale, [(m, unit) for m, unit in own if isinstance(unit, float)])
        return oracle.group_matmul(t[name], scale, [(m, unit) for m, unit in own if isinstance(unit, np.ndarray)])

    def _turn(self, heads: Array, layer: int, position: int) -> oracle.F64:
        tables = self.model.dense["cos"][position], self.model.dense["sin"][position]
        return oracle.rotate(self.model.normed(heads, layer), *tables, self.model.style)


def models(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    return {
        "bitnet": {},
        "llama": {"sub_norms": False, "activation": "silu", "style": "interleaved", "kv_heads": 1},
        "wide": {"heads": 3, "kv_heads": 3, "head_dim": 100, "ffn": 260, "activation": "silu", "vocab": 97},
        "qwen3": {"sub_norms": False, "activation": "silu", "ffn": 256, "group": 32, "head_norms": True},
        "qwen2": {"sub_norms": False, "activation": "silu", "heads": 6, "head_dim": 20, "biased": True},
        "olmo": {"sub_norms": False, "activation": "silu", "style": "interleaved", "kv_heads": 4, "centered": True},
    }


def errors_of_logits(
    device: Device,
    model: TinyModel,
    kv_dtype: KVDtype,
    *,
    against: KVDtype | None = None,
    stand_in: bool = False,
) -> list[float]:
    """Errors of rows in a chunked prefill and decode, each relative to the largest logit of its row.

    The exact values are in float64, with a cache of the type ``against`` or else the device's type. With ``stand_in``,
    the recording prepared for the largest step runs all steps.
    """
    text = model.rng.choice(model.calm(), 60).astype(np.int32)
    exact, layout, errors, done = model.logits(text, against or kv_dtype), StepLayout(LIMITS), list[float](), 0
    with not_yet():
        executable = device.compile(model.program(LIMITS, 8, kv_dtype))
    try:
        if stand_in:
            tokens, rows = LIMITS.max_tokens, [*range(LIMITS.max_rows)]
            largest = SequenceStep([0] * tokens, LIMITS.max_blocks * BLOCK, range(LIMITS.max_blocks), rows)
            executable.prepare(Step(layout, [largest], block_size=BLOCK), stands_in=True)
        for count in (33, 1, 1, 5, 1, 1, 3, 2, 8, 1, 3, 1):
            rows = sorted({0, count // 2, count - 1})
            executable.write("logits", np.full((LIMITS.max_rows, model.vocab), np.nan, np.float32))
            fed = SequenceStep(text[done : done + count], done + count, [4, 1, 6, 0, 2, 7, 3, 5], rows)
            run(executable, poison_step(Step(layout, [fed], block_size=BLOCK)))
            for row, logits in zip(rows, executable.read("logits", len(rows)), strict=True):
                right = exact[done + row]
                errors.append(float(abs(logits - right).max() / abs(right).max()))
            done += count
    finally:
        executable.close()
    return errors


class WholeModelTests(DeviceTests):
    @pytest.mark.parametrize("kv_dtype", ["f32", "f16", "i8"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_model(self, device: Device, rng: np.random.Generator, kind: str, kv_dtype: KVDtype) -> None:
        """Chunked prefill of one sequence, mixed steps, decode: each operation, and the logits of the whole."""
        model = TinyModel(rng, **models(rng)[kind])
        with not_yet():
            running = Running(device, model, kv_dtype)

        def some(count: int) -> Array:
            return rng.integers(0, model.vocab, count).astype(np.int32)

        sampled = SamplingParams(0.8, top_k=40, top_p=0.95, seed=11)
        steps = [
            [Feed(0, some(1), [0])],
            [Feed(1, some(40), [0, 17, 39]), Feed(0, some(1), [0], sampled)],
            [Feed(2, some(25)), Feed(1, some(1), [0]), Feed(3, some(3), [2]), Feed(0, some(9), [8, 2], sampled)],
            [Feed(2, some(7), [6], sampled), Feed(0, some(1), [0])],
            [Feed(s, some(1), [0], sampled) for s in (3, 1, 0, 2)],
        ]
        with running.rig:
            for feeds in steps if self.run_size != "small" else steps[:1] + steps[-2:]:
                logits, row = running.run(feeds), 0
                for feed in feeds:
                    text = np.array(running.texts[feed.sequence])
                    begin = len(text) - len(feed.tokens)
                    exact = model.logits(text, kv_dtype)[[begin + r for r in feed.rows]] if feed.rows else logits[:0]
                    assert_rel("logits end to end", logits[row : row + len(feed.rows)], exact, END_TO_END)
                    row += len(feed.rows)

    @pytest.mark.parametrize("kv_dtype", ["f16", "i8"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_model_free_to_fuse(self, device: Device, rng: np.random.Generator, kind: str, kv_dtype: KVDtype) -> None:
        """The logits where only they are asked for: what the device makes of neighbouring operations is its own."""
        errors = errors_of_logits(device, TinyModel(rng, **models(rng)[kind]), kv_dtype)
        assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"
        assert np.median(errors) <= TYPICAL, f"errors of the rows are {errors}"

    def test_the_largest_size_stands_in(self, device: Device, rng: np.random.Generator) -> None:
        """As above, with each step run by the recording of the largest size."""
        errors = errors_of_logits(device, TinyModel(rng, **models(rng)["bitnet"]), "f16", stand_in=True)
        assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"
        assert np.median(errors) <= TYPICAL, f"errors of the rows are {errors}"

    @needs(KV_I8)
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_an_int8_cache_costs(self, device: Device, rng: np.random.Generator, kind: str) -> None:
        """The logits against those with an exact cache."""
        errors = errors_of_logits(device, TinyModel(rng, **models(rng)[kind]), "i8", against="f32")
        assert np.max(errors) <= INT8_CACHE, f"errors of the rows are {errors}"
        assert np.median(errors) <= TYPICAL_OF_INT8, f"errors of the rows are {errors}"

    @pytest.mark.parametrize("kind", KINDS)
    def test_layer_free_to_fuse(self, device: Device, rng: np.random.Generator, kind: str) -> None:
        """Most rows are exact: in a single layer a code on a rounding border moves the row of its own token only, but
        for the codes that k and v come from, which are clear of borders in this text."""
        errors = errors_of_logits(device, TinyModel(rng, **models(rng)[kind] | {"layers": 1}), "f32")
        assert np.max(errors) <= END_TO_END, f"errors of the rows are {errors}"
        assert np.median(errors) <= TYPICAL_OF_A_LAYER, f"errors of the rows are {errors}"

    @pytest.mark.parametrize("kv_dtype", ["f16", "i8"])
    def test_a_step_run_again_gives_the_same_bits(
        self, device: Device, rng: np.random.Generator, kv_dtype: KVDtype
    ) -> None:
        model = TinyModel(rng)
        running = Running(device, model, kv_dtype)
        with running.rig:
            first = [
                Feed(0, rng.integers(0, 301, 33).astype(np.int32)),
                Feed(1, np.arange(20, dtype=np.int32), [3, 19]),
            ]
            second = [Feed(0, np.array([5], np.int32), [0]), Feed(1, np.array([7], np.int32), [0], SamplingParams(1.0))]
            running.run(first)
            step = running.rig.step(running.step(second))
            runs = []
            for _ in range(3):
                run(running.rig.executable, step)
                runs.append({name: running.rig.executable.read(name, 2) for name in ("x", "att.1", "logits", "token")})
            for again in runs[1:]:
                for name, array in again.items():
                    assert_same_bits(f"{name} of a step run again", array, runs[0][name])

    @pytest.mark.parametrize(
        "sampling", [GREEDY, SamplingParams(0.9, top_p=0.95, seed=2**63 + 5)], ids=["greedy", "drawn"]
    )
    def test_count_is_that_many_steps(self, device: Device, rng: np.random.Generator, sampling: SamplingParams) -> None:
        """``run(step, k)`` gives what ``k`` runs give whose tokens the caller feeds back, over block borders."""
        model, count = TinyModel(rng), 9
        program, layout = model.program(LIMITS, 32), StepLayout(LIMITS)
        tables, lengths = [[3, 9, 0], [7, 1, 30]], [12, 30]
        prompts = [rng.integers(0, model.vocab, n).astype(np.int32) for n in lengths]
        rig = Rig(device, program.ops, program.tensors.values(), program.weights, limits=LIMITS, kv=program.kv)
        with rig:
            fed = zip(prompts, tables, strict=True)
            run(rig.executable, rig.step([SequenceStep(p, len(p), blocks) for p, blocks in fed]))

            def decode(tokens: Sequence[int], at: int, k: int) -> Array:
                parts = zip(tokens, lengths, tables, strict=True)
                step = [SequenceStep([t], n + at + 1, blocks, [0], sampling) for t, n, blocks in parts]
                return run(rig.executable, rig.step(step), k)

            at_once = decode([11, 12], 0, count)
            one_by_one, tokens = [], [11, 12]
            for i in range(count):
                tokens = decode(tokens, i, 1)[0].tolist()
                one_by_one.append(tokens)
        assert layout.words == rig.layout.words
        assert at_once.dtype == np.int32
        assert at_once.tolist() == one_by_one

    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.9, top_k=20, seed=7)], ids=["greedy", "drawn"])
    def test_a_nan_among_the_steps(self, device: Device, rng: np.random.Generator, sampling: SamplingParams) -> None:
        """A sequence whose embedding is NaN has no token, and feeds token 0 on; the other one is as without it."""
        model, count = TinyModel(rng), 5
        odd = int(rng.integers(1, model.vocab))
        layout, outputs = StepLayout(LIMITS), []
        for value in (model.dense["embd"][odd].copy(), np.nan):
            model.dense["embd"] = model.dense["embd"].copy()
            model.dense["embd"][odd] = value
            executable = device.compile(model.program(LIMITS, 8))
            try:
                parts = [SequenceStep([t], 1, [block], [0], sampling) for t, block in ((odd, 3), ((odd + 1) % 97, 5))]
                outputs.append(run(executable, Step(layout, parts, block_size=BLOCK), count))
            finally:
                executable.close()
        sound, broken = outputs
        assert broken[0, 0] == NO_TOKEN
        assert (sound[:, 0] >= 0).all()
        if odd not in sound[:, 1]:
            assert broken[:, 1].tolist() == sound[:, 1].tolist()
