"""Fusions: neighbouring operations that a backend may launch together, one class for each.

A fusion's fields say which operations it matches, in order. :mod:`bitnet.core.gpu.plan` decides from their reads and
writes whether they may be fused; a class adds conditions on their parameters. A backend supports a fusion by an entry
in its dispatch table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias

from bitnet.core.gpu.context import Bucket
from bitnet.core.gpu.ops.variants import ExpertGlu, Transformed
from bitnet.core.hal import (
    Attention,
    CausalConv,
    DeltaGates,
    DenseMatmul,
    ExpertMatmul,
    GluNormQuant,
    NormQuant,
    NormRows,
    Op,
    RopeAppend,
    Route,
    Sample,
    TernaryMatmul,
)

Quant: TypeAlias = NormQuant | GluNormQuant


@dataclass(frozen=True, slots=True)
class Fusion:
    """Operations that follow one another.

    Attributes:
        KEPT: Fields whose results are stored in their tensors. Results of the other operations are not stored.
        AT_ONCE: Whether one launch runs the fusion without synchronising its work-groups, so that some write the result
            while others still read the input.
        TAKES: Keys of operations that the entry of the fusion lowers, although they have entries of their own
            (:func:`~bitnet.core.gpu.ops.variants.key`).
        CHAINED: Whether each operation reads all results of the one before. If not, :meth:`fits` checks what each
            reads.
    """

    KEPT: ClassVar[tuple[str, ...]] = ()
    AT_ONCE: ClassVar[bool] = False
    TAKES: ClassVar[tuple[type, ...]] = ()
    CHAINED: ClassVar[bool] = True

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operations, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def kept(self) -> tuple[Op, ...]:
        """The operations whose results are stored in their tensors."""
        return tuple(getattr(self, name) for name in self.KEPT)

    def fits(self, bucket: Bucket) -> bool:
        """Whether the operations' parameters and the bucket allow the fusion."""
        return True


def _same_cache(rope: RopeAppend, attention: Attention) -> bool:
    """Whether attention reads what the rotation stores."""
    return (rope.layer, rope.table) == (attention.layer, attention.table)


@dataclass(frozen=True, slots=True)
class NormHead(Fusion):
    """An output head that norms its rows itself."""

    norm: NormRows
    dense: DenseMatmul
    KEPT = ("dense",)
    AT_ONCE = True


class _Chosen(Fusion):
    """An output head and sampling, if nobody reads the logits (decision 0060)."""

    __slots__ = ()
    KEPT = ("sample",)

    def fits(self, bucket: Bucket) -> bool:
        return not bucket.logits


@dataclass(frozen=True, slots=True)
class Choice(_Chosen):
    """The output head and sampling."""

    dense: DenseMatmul
    sample: Sample
    norm: ClassVar[NormRows | None] = None


@dataclass(frozen=True, slots=True)
class NormChoice(_Chosen):
    """The last norm, the output head and sampling."""

    norm: NormRows
    dense: DenseMatmul
    sample: Sample


@dataclass(frozen=True, slots=True)
class RopeAttention(Fusion):
    """Attention that rotates its queries and the new key, and appends to the KV cache; ``qkv`` is left unchanged.

    Each token sees only earlier cache entries and its own, so no other token of the step may need its entry.
    """

    rope: RopeAppend
    attention: Attention
    KEPT = ("attention",)
    AT_ONCE = True

    def fits(self, bucket: Bucket) -> bool:
        return bucket.apart and _same_cache(self.rope, self.attention)


@dataclass(frozen=True, slots=True)
class RopeAttentionProduct(Fusion):
    """Attention as in :class:`RopeAttention`, and the following product, which merges attention's partial results."""

    rope: RopeAppend
    attention: Attention
    norm: NormQuant
    product: TernaryMatmul
    KEPT = ("product",)

    def fits(self, bucket: Bucket) -> bool:
        return _same_cache(self.rope, self.attention)


@dataclass(frozen=True, slots=True)
class NormProduct(Fusion):
    """A product that norms and quantises its input itself."""

    norm: NormQuant
    product: TernaryMatmul
    KEPT = ("product",)
    AT_ONCE = True


class _Gated(Fusion):
    """A fusion whose product ``up`` makes gates and ups, and does not add them to others."""

    __slots__ = ()
    KEPT = ("glu",)
    up: TernaryMatmul

    def fits(self, bucket: Bucket) -> bool:
        return not self.up.add


@dataclass(frozen=True, slots=True)
class GatedProduct(_Gated):
    """A product that applies the activation between its gates and ups, and the norm after it."""

    up: TernaryMatmul
    glu: GluNormQuant
    norm: ClassVar[NormQuant | None] = None


@dataclass(frozen=True, slots=True)
class GatedTransform(GatedProduct):
    """A :class:`GatedProduct` whose result is transformed before it is quantised."""

    TAKES = (Transformed,)

    def fits(self, bucket: Bucket) -> bool:
        return not self.up.add and self.glu.transform is not None


@dataclass(frozen=True, slots=True)
class NormGatedProduct(_Gated):
    """A :class:`GatedProduct` that norms and quantises its input itself."""

    norm: NormQuant
    up: TernaryMatmul
    glu: GluNormQuant


@dataclass(frozen=True, slots=True)
class FeedForward(_Gated):
    """A feed-forward block as two products: the first norms and activates, the second norms."""

    norm: NormQuant
    up: TernaryMatmul
    glu: GluNormQuant
    down: TernaryMatmul
    KEPT = ("down",)


@dataclass(frozen=True, slots=True)
class ExpertFeedForward(Fusion):
    """A mixture of experts: the router, a norm of the same rows, and the experts' two products, the last of which adds
    to those rows."""

    route: Route
    norm: NormQuant
    up: ExpertMatmul
    glu: GluNormQuant
    down: ExpertMatmul
    KEPT = ("down",)
    TAKES = (ExpertGlu,)
    CHAINED = False

    def fits(self, bucket: Bucket) -> bool:
        route, norm, up, glu, down = self.route, self.norm, self.up, self.glu, self.down
        rows = (route.x, route.weight, route.eps) == (norm.x, norm.weight, norm.eps) and route.x == down.out
        products = (up.x, up.scale, glu.gate_up) == (norm.out, norm.scale, up.out) and up.shares is None
        last = (down.x, down.scale, down.shares) == (glu.out, glu.scale, route.shares)
        chosen = up.ids == down.ids == route.ids and up.experts == down.experts
        return rows and products and last and chosen and norm.transform is None and glu.transform is None


@dataclass(frozen=True, slots=True)
class RecurrentInputs(Fusion):
    """What a recurrent layer computes from its rows before the delta rule: their norm, two products of it, the first of
    which is convolved, and the decays and strengths. For steps in which each token is a sequence of its own."""

    norm: NormQuant
    mixed: TernaryMatmul
    gate: TernaryMatmul
    gates: DeltaGates
    conv: CausalConv
    KEPT = ("gate", "gates", "conv")
    TAKES = (Transformed,)
    CHAINED = False

    def fits(self, bucket: Bucket) -> bool:
        norm, mixed, gate, gates = self.norm, self.mixed, self.gate, self.gates
        rows = (norm.x, norm.weight, norm.eps) == (gates.x, gates.weight, gates.eps)
        products = (mixed.x, mixed.scale) == (gate.x, gate.scale) == (norm.out, norm.scale)
        plain = not mixed.add and not gate.add and mixed.column is None and gate.column is None
        return bucket.apart and rows and products and plain and self.conv.x == mixed.out != gate.out


@dataclass(frozen=True, slots=True)
class Layer(Fusion):
    """A whole layer, whose products ``o`` and ``down`` add to the tensor that its norms read."""

    qkv_norm: NormQuant
    qkv: TernaryMatmul
    rope: RopeAppend
    attention: Attention
    o_norm: NormQuant
    o: TernaryMatmul
    up_norm: NormQuant
    up: TernaryMatmul
    glu: GluNormQuant
    down: TernaryMatmul
    KEPT = ("o", "down")

    @property
    def pairs(self) -> tuple[tuple[Quant, TernaryMatmul], ...]:
        """Each product with the operation that quantises its input."""
        return (self.qkv_norm, self.qkv), (self.o_norm, self.o), (self.up_norm, self.up), (self.glu, self.down)

    def fits(self, bucket: Bucket) -> bool:
        adds = (self.qkv.add, self.o.add, self.up.add, self.down.add) == (False, True, False, True)
        residual = self.qkv_norm.x == self.o.out == self.up_norm.x == self.down.out
        return adds and residual and _same_cache(self.rope, self.attention)


FUSIONS: tuple[type[Fusion], ...] = (
    Layer,
    ExpertFeedForward,
    RecurrentInputs,
    RopeAttentionProduct,
    FeedForward,
    NormChoice,
    NormGatedProduct,
    Choice,
    NormHead,
    RopeAttention,
    NormProduct,
    GatedTransform,
    GatedProduct,
)
"""Every fusion, in the order in which they are tried: longer ones first."""
