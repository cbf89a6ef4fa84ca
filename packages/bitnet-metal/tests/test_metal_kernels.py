"""Each Metal kernel, run on the CPU by the shim, against the operation in float64. Outputs are poisoned before.

Long, because each kernel has a test of its own, and all share the poisoned steps and bounds.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from metal_steps import BLOCK, OWN, Array, Steps, packed, poisoned, run

from bitnet.core.gpu.ops.rows import activation_defines
from bitnet.core.hal import Adjustment, HeaderWord, Logprobs, SamplingParams
from bitnet.core.hal.program import Activation
from bitnet.core.testing import draws, oracle
from bitnet.core.testing.logprobs import check as check_logprobs
from bitnet.core.testing.penalties import exactly_adjusted, random_biases, random_marks

WG = 64
STYLES: tuple[Literal["interleaved"], Literal["neox"]] = ("interleaved", "neox")


pytestmark = pytest.mark.nightly(unless_changed=OWN)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def near(out: Array, exact: Array, bound: float) -> None:
    """``max|out - exact| / max|exact|`` of each row is at most ``bound``."""
    assert not np.isnan(out).any()
    greatest = np.maximum(abs(exact).max(axis=-1), 1e-30)
    assert (abs(out - exact).max(axis=-1) / greatest).max() <= bound


def quantised(out: Array, scale: Array, sums: Array, y: Array, tokens: int) -> None:
    """Rows up to ``tokens`` are the absmax int8 of ``y``; the others are poison still."""
    wanted = oracle.absmax(y)
    assert abs(scale[:tokens] / wanted.scale - 1).max() <= 1e-5
    assert abs(out[:tokens] - wanted.quotient).max() <= 0.5 + 2e-3
    assert (sums[:tokens] == out[:tokens].astype(np.int64).sum(axis=1)).all()
    assert (out[tokens:] == -1).all()
    assert np.isnan(scale[tokens:]).all()
    assert (sums[tokens:] == -1).all()


@pytest.mark.parametrize("f16", [0, 1])
def test_embed(rng: np.random.Generator, f16: int) -> None:
    step = Steps(rng, [(3, 3)])
    table = rng.standard_normal((5, 37)).astype(np.float16 if f16 else np.float32)
    out = poisoned((5, 37))
    run("embed", {"WG": WG, "WEIGHT_F16": f16}, (5,), WG, step.words, step.at["tokens"], table, out, 37)
    chosen = step.words[step.at["tokens"] :][:3]
    assert (out[:3] == table[chosen].astype(np.float32)).all()
    assert np.isnan(out[3:]).all()


@pytest.mark.parametrize(("norm", "dim"), [(0, 20), (1, 20), (1, 772)])
def test_norm_quant(rng: np.random.Generator, norm: int, dim: int) -> None:
    step = Steps(rng, [(3, 3)])
    x, weight = rng.standard_normal((5, dim)).astype(np.float32) * 9, rng.random(dim, np.float32) + 0.5
    x[3:] = np.nan
    out, scale, sums = poisoned((5, dim), np.int8), poisoned((5,)), poisoned((5,), np.int32)
    arguments = (step.words, x, weight if norm else x, 1e-5, out, scale, sums, dim)
    run("norm_quant", {"WG": WG, "NORM": norm}, (5,), WG, *arguments)
    quantised(out, scale, sums, oracle.rms_norm(x[:3], weight if norm else None, 1e-5), 3)


@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu_tanh"])
@pytest.mark.parametrize("norm", [0, 1])
def test_glu_norm_quant(rng: np.random.Generator, activation: Activation, norm: int) -> None:
    dim = 132
    step = Steps(rng, [(2, 2)])
    x, weight = rng.standard_normal((4, 2 * dim)).astype(np.float32) * 4, rng.random(dim, np.float32) + 0.5
    out, scale, sums = poisoned((4, dim), np.int8), poisoned((4,)), poisoned((4,), np.int32)
    arguments = (step.words, x, weight if norm else x, 1e-6, out, scale, sums, dim, poisoned((4, dim)))
    run("glu_norm_quant", {"WG": WG, "NORM": norm, **activation_defines(activation)}, (4,), WG, *arguments)
    y = oracle.glu(x[:2], activation)
    quantised(out, scale, sums, oracle.rms_norm(y, weight if norm else None, 1e-6), 2)


def test_norm_rows_and_row_sums(rng: np.random.Generator) -> None:
    step = Steps(rng, [(4, 4)], rows=[3, 1])
    x, weight = rng.standard_normal((4, 51)).astype(np.float32), rng.random(51, np.float32)
    out = poisoned((3, 51))
    run("norm_rows", {"WG": WG}, (3,), WG, step.words, step.at["rows"], x, weight, 1e-5, out, 51)
    near(out[:2], oracle.rms_norm(x[[3, 1]], weight, 1e-5), 1e-5)
    assert np.isnan(out[2]).all()
    codes, sums = rng.integers(-128, 128, (6, 148), np.int8), poisoned((6,), np.int32)
    run("row_sums", {"WG": WG, "COLS": 148}, (6,), WG, step.words, codes, sums)
    assert (sums[:4] == codes[:4].astype(np.int64).sum(axis=1)).all()
    assert (sums[4:] == -1).all()


@pytest.mark.parametrize("add", [0, 1])
def test_norm_values_and_put_columns(rng: np.random.Generator, add: int) -> None:
    step, dim = Steps(rng, [(3, 3)]), 132
    x, weight = rng.standard_normal((4, dim)).astype(np.float32), rng.random(dim, np.float32) + 0.5
    out, wide = poisoned((4, dim)), rng.standard_normal((4, dim + 9)).astype(np.float32)
    exact, before = oracle.rms_norm(x[:3], weight, 1e-5), wide.copy()
    if add:
        out[:3] = rng.standard_normal((3, dim))
        exact = exact + out[:3]
    constants = {"WG": WG, "ADD": add}
    run("norm_values", constants | {"NORM": 1}, (4,), WG, step.words, x, weight, 1e-5, out, dim)
    near(out[:3], exact, 1e-6)
    assert np.isnan(out[3]).all()
    run("put_columns", constants, (4,), WG, step.words, x, wide, dim, dim + 9, 4)
    before[:3, 4 : 4 + dim] = x[:3] + (before[:3, 4 : 4 + dim] if add else 0)
    assert (wide == before).all()


def test_quantize(rng: np.random.Generator) -> None:
    x, partial, scale = rng.standard_normal(1999).astype(np.float32), poisoned((7,)), poisoned((1,))
    codes = poisoned((2000,), np.int8)
    run("quantize", {"WG": WG}, (7,), WG, x, 1999, partial, kernel="absmean_partial")
    run("quantize", {"WG": WG}, (1,), WG, partial, 7, 1999, scale, kernel="absmean_scale")
    run("quantize", {"WG": WG}, (7,), WG, x, 1999, scale, codes, kernel="ternary_codes")
    quotient, exact = oracle.absmean(x)
    assert abs(scale[0] / exact - 1) <= 1e-6
    sure = abs(abs(quotient) - 0.5) > 1e-5
    assert (codes[:1999][sure] == np.clip(np.rint(quotient), -1, 1)[sure]).all()
    assert codes[1999] == -1


Kind = Literal["f32", "f16", "i8"]


def poisoned_cache(kv: Kind, blocks: int, kv_heads: int, dim: int) -> Array:
    """Blocks of NaN; of int8, bytes, whose scales are NaN."""
    if kv != "i8":
        return np.full((blocks, BLOCK, kv_heads, dim), np.nan, np.float16 if kv == "f16" else np.float32)
    return np.full((blocks, BLOCK * kv_heads * (dim + 4)), -1, np.int8)


class Attention:
    """A step with its cache, queries, and what attention of them is."""

    def __init__(
        self,
        rng: np.random.Generator,
        sequences: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        kv: Kind,
        neox: int | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.kv = heads, kv_heads, dim, kv
        blocks = sum(-(-length // BLOCK) for _, length in sequences) + 3
        self.step = step = Steps(rng, sequences, blocks=blocks)
        self.k, self.v = (poisoned_cache(kv, blocks, kv_heads, dim) for _ in range(2))
        self.qkv = rng.standard_normal((step.tokens + 1, heads + 2 * kv_heads, dim)).astype(np.float32)
        self.qkv[-1] = np.nan
        self.cos, self.sin = (f(rng.random((300, dim // 2)) * 7).astype(np.float32) for f in (np.cos, np.sin))
        cache = oracle.Cache(kv, 300)
        style = None if neox is None else STYLES[neox]
        self.rotated: list[Array] = []
        own = {where: m for m, where in enumerate(step.where)}
        for s, length in enumerate(step.lengths):
            for p in range(length):
                m = own.get((s, p))
                if m is None or style is None:
                    k, v = rng.standard_normal((2, kv_heads, dim)).astype(np.float32)
                    self._store(step.place(s, p), k, v)
                else:
                    k = oracle.rotate(self.qkv[m, heads : heads + kv_heads], self.cos[p], self.sin[p], style)
                    v = self.qkv[m, heads + kv_heads :]
                cache.put(s, p, k, v)
        self.exact = np.empty((step.tokens, heads, dim))
        self.slack = np.zeros((step.tokens, heads, dim))
        for m, (s, p) in enumerate(step.where):
            q: Array = self.qkv[m, :heads]
            q = q if style is None else oracle.rotate(q, self.cos[p], self.sin[p], style)
            self.rotated.append(q)
            self.exact[m], self.slack[m] = cache.attend(s, p, q), cache.doubt(s, p, q)
        self.out = poisoned((step.tokens + 1, heads, dim))

    def _store(self, place: tuple[int, int], *rows: Array) -> None:
        for cache, row in zip((self.k, self.v), rows, strict=True):
            if self.kv == "i8":
                codes, scales = self._codes(cache, place)
                quotient, scale = oracle.int8_rows(row)
                codes[:], scales[:] = np.rint(quotient), scale
            else:
                cache[place] = row

    def _codes(self, cache: Array, place: tuple[int, int]) -> tuple[Array, Array]:
        """Codes ``[kv_heads, dim]`` and scales ``[kv_heads]`` of a position."""
        codes, scales = np.split(cache[place[0]], [BLOCK * self.kv_heads * self.dim])
        shape = (BLOCK, self.kv_heads)
        return codes.reshape(*shape, self.dim)[place[1]], scales.view(np.float32).reshape(shape)[place[1]]

    def stored(self, sequence: int, position: int) -> list[Array]:
        """The key and the value of a position, ``[kv_heads, dim]``."""
        place = self.step.place(sequence, position)
        if self.kv != "i8":
            return [cache[place].astype(np.float64) for cache in (self.k, self.v)]
        read = (self._codes(cache, place) for cache in (self.k, self.v))
        return [codes * scales[:, None].astype(np.float64) for codes, scales in read]

    @property
    def defines(self) -> dict[str, int]:
        kind = {"KV_F16": int(self.kv == "f16"), "KV_I8": int(self.kv == "i8")}
        return {"DIM": self.dim, "BLOCK": BLOCK, **kind, "HEAD_GROUP": self.heads // self.kv_heads}

    def check(self) -> None:
        made, exact = self.out[:-1], self.exact
        greatest = abs(exact).max(axis=-1, keepdims=True)
        bound = (2e-3 if self.kv == "f16" else 1e-5) * greatest + self.slack
        assert not np.isnan(made).any()
        assert (abs(made - exact) <= bound).all()
        assert np.isnan(self.out[-1]).all()


SHAPES: list[tuple[int, int, int, Kind]] = [
    (4, 2, 32, "f16"),
    (3, 3, 20, "f32"),
    (5, 1, 128, "f16"),
    (4, 2, 36, "i8"),
    (5, 1, 128, "i8"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "kv"), SHAPES)
def test_attention(rng: np.random.Generator, heads: int, kv_heads: int, dim: int, kv: Kind) -> None:
    a = Attention(rng, [(3, 9), (1, 270), (2, 2)], heads=heads, kv_heads=kv_heads, dim=dim, kv=kv)
    arguments = (a.step.words, *a.step.positions, a.qkv, a.k, a.v, a.out, heads, kv_heads)
    run("attention", {"WG": WG, **a.defines}, (7, heads), WG, *arguments)
    a.check()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("neox", [None, 0, 1])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "kv"), SHAPES)
def test_attention_decode(
    rng: np.random.Generator, heads: int, kv_heads: int, dim: int, kv: Kind, neox: int | None, splits: int
) -> None:
    sequences = [(1, 37), (1, 1), (1, 70)] if neox is not None else [(2, 37), (1, 1), (3, 70)]
    a = Attention(rng, sequences, heads=heads, kv_heads=kv_heads, dim=dim, kv=kv, neox=neox)
    defines = {"WG": WG, **a.defines, "ROPE": int(neox is not None), "NEOX": int(neox or 0)}
    tables = (a.cos, a.sin) if neox is not None else (a.step.words, a.step.words)
    parts = a.out if splits == 1 else poisoned((a.step.tokens, heads, splits, dim + 2))
    tokens = a.step.tokens + 1
    arguments = (a.step.words, *a.step.positions, a.qkv, a.k, a.v, *tables, parts, heads, kv_heads)
    run("attention_decode", defines, (kv_heads, tokens, splits), WG, *arguments)
    if splits > 1:
        merged = (a.step.words, parts, a.out, splits)
        run("attention_decode", defines, (heads, tokens), WG, *merged, kernel="attention_merge")
    a.check()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kv"),
    [(4, 2, 32, "f16"), (5, 1, 128, "f16"), (2, 2, 36, "f32"), (2, 2, 36, "i8"), (5, 1, 128, "i8")],
)
def test_attention_prefill(rng: np.random.Generator, heads: int, kv_heads: int, dim: int, kv: Kind) -> None:
    """Without matrices, and with them where heads are a whole number of them."""
    a = Attention(rng, [(19, 40), (1, 33), (15, 15)], heads=heads, kv_heads=kv_heads, dim=dim, kv=kv)
    tiles = -(-(a.step.tokens + 40) // (32 // (heads // kv_heads)))
    arguments = (a.step.words, *a.step.positions, a.qkv, a.k, a.v, a.out, heads, kv_heads)
    run("attention_prefill", a.defines, (kv_heads, tiles), 256, *arguments)
    a.check()
    if dim % 8 == 0 and kv != "i8":
        a.out[:] = np.nan
        run("attention_matrix", a.defines, (kv_heads, tiles), 128, *arguments)
        a.check()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("neox", "kv"), [(0, "f32"), (1, "f16"), (0, "i8"), (1, "i8")])
def test_rope_append(rng: np.random.Generator, neox: int, kv: Kind, normed: bool) -> None:
    a = Attention(rng, [(3, 9), (2, 2)], heads=3, kv_heads=1, dim=20, kv=kv, neox=neox)
    before, (of_q, of_k) = a.qkv.copy(), rng.random((2, 20), np.float32) + 0.5
    defines = {"WG": 32, **a.defines, "NEOX": neox} | ({"NORMS_LAST": 1} if normed else {})
    arguments = (a.step.words, *a.step.positions, a.qkv, a.k, a.v, a.cos, a.sin, 3, 1)
    run("rope_append", defines, (6, 5), 32, *arguments, *((of_q, of_k, 1e-5) if normed else ()))
    for m, (s, p) in enumerate(a.step.where):
        queries = oracle.rms_norm(a.rotated[m], of_q, 1e-5) if normed else a.rotated[m]
        near(a.qkv[m, :3], queries, 1e-6)
        key = oracle.rotate(before[m, 3:4], a.cos[p], a.sin[p], STYLES[neox])
        key = oracle.rms_norm(key, of_k, 1e-5) if normed else key
        k, v = a.stored(s, p)
        if kv == "i8":
            near(k, key, 0.501 / 127)
            near(v, before[m, 4:], 0.501 / 127)
        else:
            near(k, key, 1e-3 if kv == "f16" else 1e-6)
            assert (v == before[m, 4:].astype(a.v.dtype)).all()


class Product:
    """A ternary matrix with int8 rows of it, and their product."""

    def __init__(self, rng: np.random.Generator, tokens: int, rows: int, cols: int) -> None:
        self.rows, self.cols, self.tokens = rows, cols, tokens
        self.step = Steps(rng, [(tokens, tokens)])
        self.matrix = rng.integers(-1, 2, (rows, cols), np.int8)
        self.matrix[0] = 1
        self.codes = packed(self.matrix)
        self.x = rng.integers(-128, 128, (tokens + 1, cols), np.int8)
        self.x[0] = -128  # the greatest sums
        self.scale, self.w_scale = rng.random(tokens + 1, np.float32), rng.random(rows, np.float32)
        self.sums = self.x.sum(axis=1, dtype=np.int32)
        acc = self.x[:-1].astype(np.int64) @ self.matrix.T.astype(np.int64)
        self.exact = acc.astype(np.float32) * (self.scale[:-1, None] * self.w_scale)
        self.defines = {"COLS": cols, "ROW_BYTES": self.codes.shape[1]}

    def check(self, out: Array, exact: Array, addend: Array | None) -> None:
        made = out[: len(exact)]
        if addend is None:
            assert (made == exact).all()
        else:
            both = addend[: len(exact)]
            assert (abs(made - (both + exact)) <= np.spacing(np.maximum(abs(both), abs(exact)) * 2)).all()
        assert (out[len(exact) :].view(np.int32) == -1).all()


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "most", "rows", "cols", "lanes", "each"),
    [(1, 1, 9, 36, 32, 1), (3, 8, 70, 260, 8, 2), (8, 8, 13, 1028, 16, 1), (2, 2, 37, 516, 32, 4)],
)
def test_ternary_decode(
    rng: np.random.Generator, tokens: int, most: int, rows: int, cols: int, lanes: int, each: int, add: int
) -> None:
    p = Product(rng, tokens, rows, cols)
    out = poisoned((tokens + 1, rows))
    addend = rng.standard_normal(out.shape).astype(np.float32) if add else None
    if addend is not None:
        out[:-1] = addend[:-1]
    shape = {"TOKENS": most, "INPUT": 0, "GLU": 0, "ADD": add, "LANES": lanes, "EACH": each}
    groups = -(-rows * lanes // (WG * each))
    nothing = np.zeros(0, np.float32)
    arguments = (p.step.words, p.x, p.scale, p.sums, nothing, 0.0, p.codes, p.w_scale, out, rows)
    run("ternary_decode", {"WG": WG, **p.defines, **shape}, (groups,), WG, *arguments)
    p.check(out, p.exact, addend)


@pytest.mark.parametrize(("kind", "relu2", "each", "cols"), [(1, 0, 1, 260), (2, 1, 2, 1540), (2, 0, 4, 132)])
@pytest.mark.parametrize("glu", [0, 1])
def test_ternary_decode_quantises(
    rng: np.random.Generator, kind: int, relu2: int, each: int, cols: int, glu: int
) -> None:
    p = Product(rng, 1, 74, cols)
    x, norm = rng.standard_normal((1, cols)).astype(np.float32) * 3, rng.random(cols, np.float32) + 0.5
    made = poisoned((1, cols), np.int8), poisoned((1,)), poisoned((1,), np.int32)
    run("norm_quant", {"WG": WG, "NORM": int(kind == 2)}, (1,), WG, p.step.words, x, norm, 1e-5, *made, cols)
    codes, scale, _ = made
    acc = codes.astype(np.int64) @ p.matrix.T.astype(np.int64)
    exact = acc.astype(np.float32) * (scale[:, None] * p.w_scale)
    outs = 37 if glu else 74
    out = poisoned((1, outs))
    shape = {"TOKENS": 1, "INPUT": kind, "GLU": glu, "RELU2": relu2, "ADD": 0, "LANES": 32, "EACH": each}
    arguments = (p.step.words, x, scale, p.sums, norm, 1e-5, p.codes, p.w_scale, out, 74)
    run("ternary_decode", {"WG": WG, **p.defines, **shape}, (-(-outs * 32 // (WG * each)),), WG, *arguments)
    if glu:
        near(out, oracle.glu(exact, "relu2" if relu2 else "silu"), 1e-5)
    else:
        assert (out == exact).all()


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "most", "rows", "cols", "group", "lanes", "held"),
    [
        (1, 1, 9, 192, 32, 4, 2),
        (5, 4, 37, 1024, 64, 16, 1),
        (3, 2, 70, 640, 128, 8, 1),
        (2, 2, 13, 2048, 512, 4, 2),
        (1, 1, 5, 132, 132, 1, 2),
    ],
)
def test_ternary_groups(
    rng: np.random.Generator, tokens: int, most: int, rows: int, cols: int, group: int, lanes: int, held: int, add: int
) -> None:
    p = Product(rng, tokens, rows, cols)
    units = (rng.standard_normal((rows, cols // group)) * 10 ** rng.uniform(-2, 0, (rows, 1))).astype(np.float16)
    exact = oracle.group_matmul(p.x[:-1], p.scale[:-1], [(p.matrix, units)])
    out = poisoned((tokens + 1, rows))
    addend = rng.standard_normal(out.shape).astype(np.float32) if add else None
    if addend is not None:
        out[:-1] = addend[:-1]
        exact = addend[:-1] + exact
    shape = {"GROUP": group, "EACH": max(128 // group, 1) if group < cols else 1, "LANES": lanes, "HELD": held}
    groups = -(-rows // (WG // lanes * held)), -(-tokens // most) + 1
    arguments = (p.step.words, p.x, p.scale, p.codes, units, out, rows)
    run("ternary_groups", {"WG": WG, **p.defines, **shape, "TOKENS": most, "ADD": add}, groups, WG, *arguments)
    assert (out[:-1].view(np.int32) == exact.view(np.int32)).all()
    assert (out[-1].view(np.int32) == -1).all()


@pytest.mark.parametrize(("dim", "threads"), [(128, 32), (20, 4), (48, 16)])
def test_head_norms(rng: np.random.Generator, dim: int, threads: int) -> None:
    heads, kv_heads, step = 3, 2, Steps(rng, [(2, 2)])
    qkv = rng.standard_normal((3, heads + 2 * kv_heads, dim)).astype(np.float32) * 9
    norms = rng.uniform(-2, 2, (2, dim)).astype(np.float32)
    qkv[-1], before = np.nan, qkv.copy()
    arguments = (step.words, qkv, *norms, 1e-5, heads, kv_heads)
    run("head_norms", {"WG": threads, "DIM": dim}, (3, heads + kv_heads), threads, *arguments)
    for first, end, norm in ((0, heads, norms[0]), (heads, heads + kv_heads, norms[1])):
        wanted = oracle.rms_norm(before[:2, first:end].reshape(-1, dim), norm, 1e-5)
        near(qkv[:2, first:end].reshape(-1, dim), wanted, 1e-6)
    assert (qkv[:2, heads + kv_heads :] == before[:2, heads + kv_heads :]).all()
    assert np.isnan(qkv[-1]).all()


@pytest.mark.parametrize("dim", [4, 132, 772])
def test_add_bias_and_center_rows(rng: np.random.Generator, dim: int) -> None:
    step = Steps(rng, [(3, 3)])
    x, bias = rng.standard_normal((5, dim)).astype(np.float32) * 9 + 5, rng.standard_normal(dim).astype(np.float32)
    x[3:] = np.nan
    out, before = poisoned((5, dim)), x.copy()
    run("center_rows", {"WG": WG}, (5,), WG, step.words, x, out, dim)
    assert (abs(out[:3] - oracle.center(before[:3])) <= 2e-6 * abs(before[:3]).max(axis=1, keepdims=True)).all()
    assert np.isnan(out[3:]).all()
    assert np.array_equal(x, before, equal_nan=True)
    run("add_bias", {"WG": WG}, (5,), WG, step.words, x, bias, dim)
    assert (x[:3] == before[:3] + bias).all()
    assert np.isnan(x[3:]).all()


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("file", ["ternary_gemm", "ternary_gemm_matrix"])
@pytest.mark.parametrize(("tokens", "rows", "cols"), [(9, 70, 132), (70, 65, 516)])
def test_ternary_gemm(rng: np.random.Generator, file: str, tokens: int, rows: int, cols: int, add: int) -> None:
    p = Product(rng, tokens, rows, cols)
    out = poisoned((tokens + 1, rows))
    addend = rng.standard_normal(out.shape).astype(np.float32) if add else None
    if addend is not None:
        out[:-1] = addend[:-1]
    plain = file == "ternary_gemm"
    tile_m, tile_n, threads = (32, 128, 256) if plain else (32, 64, 128)
    defines = {**p.defines, "ADD": add, **({"TX": 16, "TY": 16, "EACH_M": 2} if plain else {})}
    groups = -(-rows // tile_n), -(-tokens // tile_m) + 1
    run(file, defines, groups, threads, p.step.words, p.x, p.scale, p.sums, p.codes, p.w_scale, out, rows)
    p.check(out, p.exact, addend)


@pytest.mark.parametrize(("f16", "rows", "cols"), [(1, 9, 132), (0, 33, 36), (1, 40, 388)])
def test_dense_matmul_matrix(rng: np.random.Generator, f16: int, rows: int, cols: int) -> None:
    """Equal rows of the head have equal logits, and a row's logits the same bits in another place of another step."""
    n = 71
    weight = rng.standard_normal((n, cols)).astype(np.float16 if f16 else np.float32)
    weight[66] = weight[2]
    x, outs = rng.standard_normal((rows, cols)).astype(np.float32), []
    for y in (x, x[::-1][:9].copy()):
        step, out = Steps(rng, [(len(y), len(y))], rows=range(len(y))), poisoned((len(y) + 1, n))
        groups = -(-n // 64), -(-len(y) // 32) + 1
        run("dense_matmul_matrix", {"WEIGHT_F16": f16}, groups, 128, step.words, y, weight, out, cols, n)
        assert np.isnan(out[-1]).all()
        outs.append(out[:-1])
    a, b = x.astype(np.float64), weight.astype(np.float64).T
    assert (abs(outs[0] - a @ b) <= 1e-6 * (abs(a) @ abs(b))).all()
    assert (outs[0][:, 66] == outs[0][:, 2]).all()
    assert (outs[0][::-1][:9] == outs[1]).all()


@pytest.mark.parametrize(("cols", "group"), [(132, 132), (640, 32)])
def test_ternary_tables(rng: np.random.Generator, cols: int, group: int) -> None:
    """Embeddings are exact; logits are products in float64, and have the same bits in a step of one row."""
    n, rows, most = 71, 5, 4
    step, one = Steps(rng, [(rows, rows)], rows=range(rows)), Steps(rng, [(1, 1)], rows=[0])
    matrix = rng.integers(-1, 2, (n, cols), np.int8)
    units = (rng.standard_normal((n, cols // group)) * 10 ** rng.uniform(-2, 0, (n, 1))).astype(np.float16)
    exact = matrix * np.repeat(units.astype(np.float64), group, axis=1)
    codes, shape = packed(matrix), {"COLS": cols, "ROW_BYTES": -(-cols // 128) * 32, "GROUP": group}
    embedded = poisoned((rows + 1, cols))
    run("table_embed", shape, (rows + 1,), 64, step.words, step.at["tokens"], codes, units, embedded)
    assert (embedded[:-1] == exact[step.words[step.at["tokens"] :][:rows]]).all()
    assert np.isnan(embedded[-1]).all()
    x, out, alone = rng.standard_normal((rows, cols)).astype(np.float32), poisoned((rows + 1, n)), poisoned((2, n))
    for s, y, to, tokens in ((step, x, out, most), (one, x[4:], alone, 1)):
        groups, defines = (-(-n // 8), -(-len(y) // tokens)), {**shape, "LANES": 16, "EACH": 2, "TOKENS": tokens}
        run("table_matmul", {"WG": WG, **defines}, groups, WG, s.words, y, codes, units, to, n)
    a = x.astype(np.float64)
    assert (abs(out[:-1] - a @ exact.T) <= 1e-6 * (abs(a) @ abs(exact.T))).all()
    assert (out[4].view(np.int32) == alone[0].view(np.int32)).all()
    assert np.isnan(out[-1]).all()
    assert np.isnan(alone[-1]).all()


@pytest.mark.parametrize(("f16", "rows", "cols", "each"), [(1, 5, 132, 1), (0, 1, 36, 4), (1, 3, 388, 4)])
def test_dense_matmul(rng: np.random.Generator, f16: int, rows: int, cols: int, each: int) -> None:
    step = Steps(rng, [(rows, rows)], rows=range(rows))
    weight = rng.standard_normal((71, cols)).astype(np.float16 if f16 else np.float32)
    x, out = rng.standard_normal((rows, cols)).astype(np.float32), poisoned((rows + 1, 71))
    defines = {"WG": WG, "WEIGHT_F16": f16, "EACH": each, "TOKENS": 2}
    groups = -(-71 // (WG // 32 * each)), rows
    run("dense_matmul", defines, groups, WG, step.words, x, weight, out, cols, 71)
    a, b = x.astype(np.float64), weight.astype(np.float64).T
    assert (abs(out[:-1] - a @ b) <= 1e-6 * (abs(a) @ abs(b))).all()
    assert np.isnan(out[-1]).all()


def sampling(rng: np.random.Generator, params: list[SamplingParams], positions: list[int]) -> Steps:
    """A step with a sequence a row."""

    def bits(values: list[float]) -> Array:
        return np.array(values, np.float32).view(np.int32)

    seeds = np.array([p.seed for p in params], np.uint64)
    choice = {
        "temperature": bits([p.temperature for p in params]),
        "top_k": np.array([p.top_k for p in params]),
        "top_p": bits([p.top_p for p in params]),
        "min_p": bits([p.min_p for p in params]),
        "seed_lo": (seeds & np.uint64(0xFFFFFFFF)).astype(np.int64),
        "seed_hi": (seeds >> np.uint64(32)).astype(np.int64),
    }
    return Steps(rng, [(1, p + 1) for p in positions], rows=range(len(params)), choice=choice)


@pytest.mark.parametrize("vocabulary", [3, 1003])
def test_sample(rng: np.random.Generator, vocabulary: int) -> None:
    rows = 10
    logits = (rng.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    logits[1] = logits[1].round()
    params = [SamplingParams(), SamplingParams(), SamplingParams()]
    for _ in range(rows - 3):
        one = rng.choice([1.0, 2.0, 4.0]), rng.choice([0, 2, 40]), rng.choice([1.0, 0.9, 0.3]), rng.choice([0.0, 0.3])
        params.append(
            SamplingParams(float(one[0]), int(one[1]), float(one[2]), float(one[3]), int(rng.integers(2**63)))
        )
    logits[2, -1] = np.nan
    logits[5, 0] = np.nan
    positions = [int(p) for p in rng.integers(0, 4000, rows)]
    step, out = sampling(rng, params, positions), poisoned((rows + 2,), np.int32)
    fields = (
        "rows",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed_lo",
        "seed_hi",
        "token_seq",
        "seq_begin",
        "seq_len",
    )
    run("sample", {"WG": WG}, (rows + 2,), WG, step.words, *(step.at[f] for f in fields), logits, out, vocabulary)
    for r in range(rows):
        wanted = [-1] if np.isnan(logits[r]).any() else draws.allowed(logits[r], params[r], positions[r])
        assert out[r] in wanted
    assert (out[rows:] == -1).all()


def offsets(cols: int) -> Array:
    """What decision 0060's dither is for each column, by 32-bit integers of numpy."""
    a = (np.arange(cols, dtype=np.uint32) + np.uint32(1)) * np.uint32(0x9E3779B9)
    for factor, by in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        a = (a ^ a >> np.uint32(by)) * np.uint32(factor)
    made: Array = 7.5 + ((a ^ a >> np.uint32(16)) >> np.uint32(8)) / 2**24 - 0.5
    return made


@pytest.mark.parametrize(("cols", "rows"), [(64, 1), (1056, 3)])
def test_compact_head(rng: np.random.Generator, cols: int, rows: int) -> None:
    """Its tokens are those of the logits that dense_matmul makes, and few rows of the head are scored in full."""
    n, sampled = 403, rng.random(rows) < 0.5
    sampled[0] = False
    weight = (rng.standard_normal((n, cols)) * 0.02 * rng.choice([1, 5], cols)).astype(np.float16)
    params = [SamplingParams(0.7, seed=int(rng.integers(2**63))) if s else SamplingParams() for s in sampled]
    step = sampling(rng, params, [int(p) for p in rng.integers(0, 900, rows)])
    x, gain = rng.standard_normal((rows, cols)).astype(np.float32) * 3, rng.random(cols, np.float32) + 0.5
    weight[[67, 380, 20]] = (x[0] * gain * 0.1).astype(
        np.float16
    )  # the first row's winners, of which the lowest counts
    column, codes, size = poisoned((cols,)), poisoned((n, cols // 8), np.uint32), poisoned((n, 2))
    run("head_pack", {"WG": WG, "COLS": cols}, (cols // 32,), WG, weight, column, n, kernel="head_columns")
    run("head_pack", {"WG": WG, "COLS": cols}, (100, 5), WG, weight, column, codes, size, n)
    normed, planes, bounds = poisoned((rows, cols)), poisoned((rows, cols)), poisoned((rows, 4))
    state, scores, each = poisoned((rows,), np.uint32), poisoned((rows, n)), 2
    tail = (step.words, x, gain, column, normed, planes, bounds, state, step.at["rows"], 1e-5)
    run("head_rows", {"WG": WG, "COLS": cols, "NORM": 1}, (rows,), WG, *tail)
    y = poisoned((rows, cols))
    run("norm_rows", {"WG": WG}, (rows,), WG, step.words, step.at["rows"], x, gain, 1e-5, y, cols)
    assert (normed == y).all()
    at = [step.at[f] for f in ("rows", "temperature", "seed_lo", "seed_hi", "token_seq", "seq_begin", "seq_len")]
    score = {"WG": WG, "COLS": cols, "TOKENS": 8, "EACH": 4}
    arguments = (step.words, codes, size, planes, bounds, scores, state, *at, n)
    run("head_score", score, (-(-n // 8),), WG, *arguments)
    shifts = 4 * np.arange(8, dtype=np.uint32)
    each_code = (codes[:, :, None] >> shifts & np.uint32(15)).reshape(n, cols).astype(np.float64)
    from_offset = each_code - offsets(cols)
    stored = from_offset * size[:, :1] * column  # off by half a step and by what the greatest is short of the last code
    assert (abs(stored - weight) <= 0.51 * size[:, :1] * column).all()
    assert abs(size[:, 1] / size[:, 0] / np.linalg.norm(from_offset, axis=1) - 1).max() < 2e-4
    whole = planes * 16.0 ** (np.arange(cols) % 8)
    assert (whole == whole.round()).all()
    rough = (each_code @ whole.T - bounds[:, 1]).T * bounds[:, :1].astype(np.float64) * size[:, 0]
    near(scores, rough, 1e-4)
    lost = np.linalg.norm(normed.astype(np.float64) * column - whole * bounds[:, :1], axis=1)
    assert (lost <= bounds[:, 3]).all()
    assert (bounds[:, 3] <= lost * 1.1).all()
    exact = normed.astype(np.float64) @ weight.T.astype(np.float64)
    doubt = bounds[:, 2:3] * size[:, 0] + bounds[:, 3:] * size[:, 1]
    assert (abs(scores - exact) <= doubt).all()
    assert doubt.max() < abs(exact).max() * 0.6  # a bound that tells something
    parts = -(-n // (each * WG))
    found, chosen = poisoned((parts, 8, 2), np.uint32), poisoned((rows + 1,), np.int32)
    arguments = (step.words, size, bounds, scores, state, weight, normed, found, *at, n)
    run("head_choose", {"WG": WG, "COLS": cols, "EACH": each}, (parts,), WG, *arguments)
    last = {"WG": WG, "COLS": cols, "EACH": each}
    run("head_choose", last, (1,), WG, step.words, found, chosen, parts, kernel="head_pick")
    logits, wanted = poisoned((rows, n)), poisoned((rows,), np.int32)
    dense = {"WG": WG, "WEIGHT_F16": 1, "EACH": 1, "TOKENS": 1}
    run("dense_matmul", dense, (-(-n // 2), rows), WG, step.words, normed, weight, logits, cols, n)
    fields = (
        "rows",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed_lo",
        "seed_hi",
        "token_seq",
        "seq_begin",
        "seq_len",
    )
    run("sample", {"WG": WG}, (rows,), WG, step.words, *(step.at[f] for f in fields), logits, wanted, n)
    assert (chosen[:rows] == wanted).all()
    assert chosen[rows] == -1
    assert chosen[0] == 20
    assert (logits.argmax(axis=1)[~sampled] == wanted[~sampled]).all()


def test_adjust(rng: np.random.Generator) -> None:
    """Rows with slots and one without; then the chosen tokens are counted, of which one is none."""
    rows, slots, n, each = 3, 4, 300, 2
    given = [Adjustment(2, 1.3, 0.4, 0.25), None, Adjustment(0, 0.8, -0.5, 0.0)]
    choice = {"slot": np.array([0 if a is None else a.slot + 1 for a in given])}
    for field in ("repetition", "presence", "frequency"):
        choice[field] = np.array([getattr(a, field, 1.0) for a in given], np.float32).view(np.int32)
    step = Steps(rng, [(1, 4), (1, 9), (1, 2)], rows=list(range(rows)), choice=choice)
    marks = np.stack([random_marks(rng, n) for _ in range(slots)])
    biases = np.stack([random_biases(rng, n) for _ in range(slots)])
    logits, out = rng.normal(0, 3, (rows + 1, n)).astype(np.float32), poisoned((rows + 1, n), np.float32)
    fields = [step.at[field] for field in ("slot", "repetition", "presence", "frequency")]
    grid = (-(-n // (WG * each)), rows + 1)
    run("adjust", {"WG": WG, "EACH": each}, grid, WG, step.words, *fields, marks, biases, logits, out, n)
    for r, adjustment in enumerate(given):
        wanted = logits[r].astype(np.float64)
        if adjustment is not None:
            wanted = exactly_adjusted(logits[r], marks[adjustment.slot], biases[adjustment.slot], adjustment)
        assert (np.isneginf(out[r]) == np.isneginf(wanted)).all()
        allowed = np.isfinite(wanted)
        assert abs(out[r][allowed] - wanted[allowed]).max() <= 1e-5
    assert np.isnan(out[rows]).all()
    chosen, before = np.array([7, 9, -1, 5], np.int32), marks.copy()
    run("adjust", {"WG": 32, "EACH": each}, (1,), 32, step.words, fields[0], marks, chosen, n, kernel="count_chosen")
    before[2, 7] += 2
    assert (marks == before).all()


def test_logprobs(rng: np.random.Generator) -> None:
    """Rows with ties, and with fewer tokens in a part than are asked for; the second pass of a run."""
    rows, n, each, k = 3, 300, 2, 5
    step = Steps(rng, [(1, 4), (1, 9), (1, 2)], rows=list(range(rows)))
    step.words[HeaderWord.LOGPROBS], step.words[HeaderWord.DONE] = 1 + k, 1
    logits = rng.normal(0, 3, (rows + 1, n)).astype(np.float32)
    logits[1] = logits[1].round()
    logits[2, 20:] = -np.inf
    chosen = rng.integers(0, 20, rows + 1).astype(np.int32)
    count = -(-n // (WG * each))
    parts, history = poisoned((rows + 1, count, 42), np.int32), poisoned((3, rows, 1 + 2 * k), np.int32)
    defines = {"WG": WG, "EACH": each}
    run("logprobs", defines, (count, rows + 1), WG, step.words, logits, parts, n, count, kernel="logprobs_parts")
    run("logprobs", defines, (rows + 1,), WG, step.words, logits, parts, chosen, history, n, count)
    assert (parts[rows] == -1).all()
    assert (history[[0, 2]] == -1).all()
    likeliest = Logprobs.of_words(history)
    for r in range(rows):
        check_logprobs(likeliest, 1, r, logits[r], int(chosen[r]), k)


def test_advance(rng: np.random.Generator) -> None:
    step = Steps(rng, [(1, 4), (1, 9), (1, 2)], rows=[0, 1, 2])
    before, history = step.words.copy(), poisoned((4, 3), np.int32)
    step.words[3] = 2
    sampled = np.array([7, -1, 4], np.int32)
    run("advance", {}, (1,), 32, step.words, step.at["tokens"], step.at["seq_len"], sampled, history)
    wanted = before.copy()
    wanted[3] = 3
    wanted[step.at["tokens"] :][:3] = [7, 0, 4]
    wanted[step.at["seq_len"] :][:3] += 1
    assert (step.words == wanted).all()
    assert (history[2] == sampled).all()
    assert (np.delete(history, 2, axis=0) == -1).all()
