"""A small random model: its program, and its logits in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import (
    AddBias,
    Attention,
    CenterRows,
    DenseMatmul,
    Embed,
    GluNormQuant,
    KVDtype,
    KVSpec,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    RopeAppend,
    Sample,
    TensorSpec,
    TernaryMatmul,
    Weight,
)
from bitnet.core.testing import oracle
from bitnet.core.testing.attention import angles
from bitnet.core.testing.rig import Array, dense, random_ternary, tensor, ternary

BLOCK = 16


@dataclass
class TinyModel:
    """A small BitNet b1.58. ``dense`` and ``ternary`` hold its weights by name.

    ``group``: number of columns that share a scale. ``head_norms``: heads of q and k are normalised, as in Qwen3.
    ``biased``: q, k and v have biases, as in Qwen2. ``centered``: the norms of the residual stream are LayerNorms, as
    in OLMo, but with weights.
    """

    rng: np.random.Generator
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 196
    vocab: int = 301
    positions: int = 192
    activation: Literal["relu2", "silu"] = "relu2"
    style: Literal["neox", "interleaved"] = "neox"
    sub_norms: bool = True
    group: int | None = None
    head_norms: bool = False
    biased: bool = False
    centered: bool = False
    eps: float = 1e-5
    dense: dict[str, Array] = field(default_factory=dict)
    ternary: dict[str, tuple[oracle.I8, float | npt.NDArray[np.float16]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, width, d = self.rng, self.heads * self.head_dim, self.head_dim
        self.width = width
        cos, sin = angles(self.positions, d)
        self.dense |= {"cos": cos, "sin": sin, "embd": rng.standard_normal((self.vocab, width)).astype(np.float16)}
        self.dense["head"] = rng.standard_normal((self.vocab, width)).astype(np.float16)
        norms = {"norm": width}
        for i in range(self.layers):
            norms |= {f"attn_norm.{i}": width, f"ffn_norm.{i}": width}
            norms |= {f"attn_sub.{i}": width, f"ffn_sub.{i}": self.ffn} if self.sub_norms else {}
            shapes = {"q": (width, width), "k": (self.kv_heads * d, width), "v": (self.kv_heads * d, width)}
            shapes |= {"o": (width, width), "gate": (self.ffn, width), "up": (self.ffn, width)}
            shapes |= {"down": (width, self.ffn)}
            norms |= {f"q_norm.{i}": d, f"k_norm.{i}": d} if self.head_norms else {}
            for name, (n, k) in shapes.items():
                self.ternary[f"{name}.{i}"] = random_ternary(rng, n, k), self._scale(n, k)
        self.dense |= {name: rng.uniform(0.5, 1.5, n).astype(np.float32) for name, n in norms.items()}
        for i in range(self.layers if self.biased else 0):
            self.dense[f"bias.{i}"] = rng.standard_normal(width + 2 * self.kv_heads * d).astype(np.float32)

    def _scale(self, n: int, k: int) -> float | npt.NDArray[np.float16]:
        if self.group is None:
            return float(self.rng.uniform(0.8, 1.2) / k**0.5)
        units: npt.NDArray[np.float16] = (self.rng.uniform(0.5, 1.5, (n, k // self.group)) / k**0.5).astype(np.float16)
        return units

    def sub(self, name: str) -> str | None:
        return name if self.sub_norms else None

    def head_norm(self, name: str) -> str | None:
        return name if self.head_norms else None

    def stream(self, name: str) -> tuple[str, list[CenterRows]]:
        """The tensor that a norm of the residual stream reads, and the ops that compute it."""
        return (name, [CenterRows("x", name)]) if self.centered else ("x", [])

    def program(self, limits: Limits, blocks: int, kv_dtype: KVDtype = "f16") -> Program:
        """The program. Each layer has tensors of its own, so that all can be read after a step."""
        width, d, h, g, f = self.width, self.head_dim, self.heads, self.kv_heads, self.ffn
        ops: list[Op] = [Embed("embd", "x")]
        specs: list[TensorSpec] = [tensor("x", "f32", "M", width)]
        for i in range(self.layers):
            (for_attn, center_attn), (for_ffn, center_ffn) = self.stream(f"ca.{i}"), self.stream(f"cf.{i}")
            ops += [
                *center_attn,
                NormQuant(for_attn, f"attn_norm.{i}", self.eps, f"a.{i}", f"as.{i}"),
                TernaryMatmul(f"a.{i}", f"as.{i}", (f"q.{i}", f"k.{i}", f"v.{i}"), f"qkv.{i}"),
                *([AddBias(f"qkv.{i}", f"bias.{i}")] if self.biased else []),
                RopeAppend(
                    *(f"qkv.{i}", i, h, g, d, "cos", "sin", self.style),
                    *(self.head_norm(f"q_norm.{i}"), self.head_norm(f"k_norm.{i}"), self.eps),
                ),
                Attention(f"qkv.{i}", f"att.{i}", i, h, g, d),
                NormQuant(f"att.{i}", self.sub(f"attn_sub.{i}"), self.eps, f"b.{i}", f"bs.{i}"),
                TernaryMatmul(f"b.{i}", f"bs.{i}", (f"o.{i}",), "x", add=True),
                *center_ffn,
                NormQuant(for_ffn, f"ffn_norm.{i}", self.eps, f"c.{i}", f"cs.{i}"),
                TernaryMatmul(f"c.{i}", f"cs.{i}", (f"gate.{i}", f"up.{i}"), f"gu.{i}"),
                GluNormQuant(f"gu.{i}", self.sub(f"ffn_sub.{i}"), self.eps, self.activation, f"e.{i}", f"es.{i}"),
                TernaryMatmul(f"e.{i}", f"es.{i}", (f"down.{i}",), "x", add=True),
            ]
            for name, k in (("a", width), ("b", width), ("c", width), ("e", f)):
                specs += [tensor(f"{name}.{i}", "i8", "M", k), tensor(f"{name}s.{i}", "f32", "M")]
            specs += [tensor(f"qkv.{i}", "f32", "M", (h + 2 * g) * d), tensor(f"att.{i}", "f32", "M", width)]
            specs += [tensor(f"gu.{i}", "f32", "M", 2 * f)]
            specs += [tensor(op.out, "f32", "M", width) for op in (*center_attn, *center_ffn)]
        last, center = self.stream("cy")
        ops += [*center, NormRows(last, "norm", self.eps, "y"), DenseMatmul("y", "head", "logits")]
        ops += [Sample("logits", "token")]
        specs += [tensor(op.out, "f32", "M", width) for op in center]
        specs += [tensor("y", "f32", "R", width), tensor("logits", "f32", "R", self.vocab), tensor("token", "i32", "R")]
        weights: dict[str, Weight] = {name: dense(array) for name, array in self.dense.items()}
        weights |= {name: ternary(*weight) for name, weight in self.ternary.items()}
        kv = KVSpec(self.layers, g, d, blocks, BLOCK, kv_dtype)
        return Program(ops, {s.name: s for s in specs}, weights, limits, kv, "tiny model")

    def calm(self) -> Array:
        """Tokens whose codes before the first attention are far from rounding boundaries, relative to float32's
        precision."""
        y = self.norm(self.dense["embd"], "attn_norm.0")
        quotient = oracle.absmax(y).quotient
        tokens: Array = np.flatnonzero(abs(quotient - np.floor(quotient) - 0.5).min(axis=1) > 5e-4)
        return tokens

    def linear(self, y: oracle.F64, *names: str) -> oracle.F64:
        """Quantise rows and multiply: a BitLinear in float64."""
        exact = oracle.absmax(y)
        codes = np.rint(exact.quotient)
        parts = [codes @ weights_of(*self.ternary[n]).T for n in names]
        out: oracle.F64 = np.concatenate(parts, axis=1) * exact.scale[:, None]
        return out

    def norm(self, x: Array, name: str) -> oracle.F64:
        """A norm of rows of the residual stream."""
        return oracle.rms_norm(oracle.center(x) if self.centered else x, self.dense[name], self.eps)

    def normed(self, heads: Array, layer: int) -> Array:
        """Heads of q and k ``[H + G, d]``, normalised before the rotation."""
        if not self.head_norms:
            return heads
        q, k = np.split(heads, [self.heads])
        norms = (self.dense[f"{which}_norm.{layer}"] for which in "qk")
        return np.concatenate([oracle.rms_norm(x, norm, self.eps) for x, norm in zip((q, k), norms, strict=True)])

    def logits(self, tokens: Array, kv_dtype: KVDtype) -> oracle.F64:
        """Logits ``[n, V]`` of a whole text, in float64 throughout except for the cache's type."""
        h, g, d = self.heads, self.kv_heads, self.head_dim
        x = self.dense["embd"][tokens].astype(np.float64)
        for i in range(self.layers):
            qkv = self.linear(self.norm(x, f"attn_norm.{i}"), f"q.{i}", f"k.{i}", f"v.{i}")
            qkv = (qkv + self.dense.get(f"bias.{i}", 0)).reshape(len(x), h + 2 * g, d)
            cache, att = oracle.Cache(kv_dtype, len(x)), np.empty((len(x), h * d))
            for p in range(len(x)):
                normed = self.normed(qkv[p, : h + g], i)
                turned = oracle.rotate(normed, self.dense["cos"][p], self.dense["sin"][p], self.style)
                cache.put(0, p, turned[h:], qkv[p, h + g :])
                att[p] = cache.attend(0, p, turned[:h]).reshape(-1)
            x = x + self.linear(oracle.rms_norm(att, self.dense.get(f"attn_sub.{i}"), self.eps), f"o.{i}")
            y = self.norm(x, f"ffn_norm.{i}")
            act = oracle.glu(self.linear(y, f"gate.{i}", f"up.{i}"), self.activation)
            x = x + self.linear(oracle.rms_norm(act, self.dense.get(f"ffn_sub.{i}"), self.eps), f"down.{i}")
        out: oracle.F64 = self.norm(x, "norm") @ self.dense["head"].T.astype(np.float64)
        return out


def weights_of(matrix: oracle.I8, scale: float | npt.NDArray[np.float16]) -> oracle.F64:
    """The values of ``matrix[N, K]``, scales included, in float64."""
    units = np.reshape(np.float64(scale), (-1, 1)) if isinstance(scale, float) else scale.astype(np.float64)
    out: oracle.F64 = matrix * np.repeat(units, matrix.shape[1] // units.shape[1], axis=1)
    return out
