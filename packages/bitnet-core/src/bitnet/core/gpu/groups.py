"""Groups of neighbouring operations that a backend may launch together. A new fusion is one class here.

The fields of a group say which operations it matches, in order. :mod:`bitnet.core.gpu.plan` decides from what those
read and write whether they may be grouped; a class adds what its operations' parameters must be. A backend takes a
group by an entry of its dispatch table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias

from bitnet.core.gpu.context import Bucket
from bitnet.core.hal import (
    Attention,
    DenseMatmul,
    GluNormQuant,
    NormQuant,
    NormRows,
    Op,
    RopeAppend,
    Sample,
    TernaryMatmul,
)

Quant: TypeAlias = NormQuant | GluNormQuant


@dataclass(frozen=True, slots=True)
class Group:
    """Operations that follow one another.

    Attributes:
        KEPT: Fields whose results are in their tensors afterwards. The other operations' results are nowhere.
        AT_ONCE: One launch does the group, and its work-groups do not wait for one another: while some write the
            result, others still read the input.
    """

    KEPT: ClassVar[tuple[str, ...]] = ()
    AT_ONCE: ClassVar[bool] = False

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operations, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def kept(self) -> tuple[Op, ...]:
        """The operations whose results are in their tensors afterwards."""
        return tuple(getattr(self, name) for name in self.KEPT)

    def fits(self, bucket: Bucket) -> bool:
        """Whether the operations' parameters, and what is asked of the step, allow the group."""
        return True


@dataclass(frozen=True, slots=True)
class NormHead(Group):
    """A head that norms its rows itself."""

    norm: NormRows
    dense: DenseMatmul
    KEPT = ("dense",)
    AT_ONCE = True


@dataclass(frozen=True, slots=True)
class Choice(Group):
    """The head and the choice of tokens, where nobody reads the logits (decision 0060)."""

    dense: DenseMatmul
    sample: Sample
    norm: ClassVar[NormRows | None] = None
    KEPT = ("sample",)

    def fits(self, bucket: Bucket) -> bool:
        return not bucket.logits


@dataclass(frozen=True, slots=True)
class NormChoice(Group):
    """The last norm, the head and the choice of tokens, where nobody reads the logits (decision 0060)."""

    norm: NormRows
    dense: DenseMatmul
    sample: Sample
    KEPT = ("sample",)

    def fits(self, bucket: Bucket) -> bool:
        return not bucket.logits


@dataclass(frozen=True, slots=True)
class RopeAttention(Group):
    """Attention that rotates its queries and the new key, and appends to the cache; ``qkv`` stays as it was.

    Each token reads only what was in the cache and what it appends itself, so no other token of the step may need that.
    """

    rope: RopeAppend
    attention: Attention
    KEPT = ("attention",)
    AT_ONCE = True

    def fits(self, bucket: Bucket) -> bool:
        return bucket.apart and self.rope.layer == self.attention.layer


@dataclass(frozen=True, slots=True)
class RopeAttentionProduct(Group):
    """Attention as in :class:`RopeAttention`, and the product after it, which merges attention's parts."""

    rope: RopeAppend
    attention: Attention
    norm: NormQuant
    product: TernaryMatmul
    KEPT = ("product",)

    def fits(self, bucket: Bucket) -> bool:
        return self.rope.layer == self.attention.layer


@dataclass(frozen=True, slots=True)
class NormProduct(Group):
    """A product that norms and quantises its input itself."""

    norm: NormQuant
    product: TernaryMatmul
    KEPT = ("product",)
    AT_ONCE = True


@dataclass(frozen=True, slots=True)
class GatedProduct(Group):
    """A product that applies the activation between its gates and ups, and the norm after it."""

    up: TernaryMatmul
    glu: GluNormQuant
    norm: ClassVar[NormQuant | None] = None
    KEPT = ("glu",)

    def fits(self, bucket: Bucket) -> bool:
        return not self.up.add


@dataclass(frozen=True, slots=True)
class NormGatedProduct(Group):
    """A :class:`GatedProduct` that norms and quantises its input itself."""

    norm: NormQuant
    up: TernaryMatmul
    glu: GluNormQuant
    KEPT = ("glu",)

    def fits(self, bucket: Bucket) -> bool:
        return not self.up.add


@dataclass(frozen=True, slots=True)
class FeedForward(Group):
    """A feed-forward block as two products: the first norms and activates, the second norms."""

    norm: NormQuant
    up: TernaryMatmul
    glu: GluNormQuant
    down: TernaryMatmul
    KEPT = ("down",)

    def fits(self, bucket: Bucket) -> bool:
        return not self.up.add


@dataclass(frozen=True, slots=True)
class Layer(Group):
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
        """Each product behind what quantises for it."""
        return (self.qkv_norm, self.qkv), (self.o_norm, self.o), (self.up_norm, self.up), (self.glu, self.down)

    def fits(self, bucket: Bucket) -> bool:
        adds = (self.qkv.add, self.o.add, self.up.add, self.down.add) == (False, True, False, True)
        residual = self.qkv_norm.x == self.o.out == self.up_norm.x == self.down.out
        return adds and residual and self.rope.layer == self.attention.layer


GROUPS: tuple[type[Group], ...] = (
    Layer,
    RopeAttentionProduct,
    FeedForward,
    NormChoice,
    NormGatedProduct,
    Choice,
    NormHead,
    RopeAttention,
    NormProduct,
    GatedProduct,
)
"""Every group, in the order in which a backend is offered them: the longer first."""
