"""A layer of a program as one: for backends that do all of it in a single launch, in a step of one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from bitnet.core.gpu.fusion import feeds, read_again, rotates_for
from bitnet.core.hal import Attention, GluNormQuant, NormQuant, Op, RopeAppend, TernaryMatmul

Quant: TypeAlias = NormQuant | GluNormQuant
LAYER_OPS = 10
"""Operations of a layer."""


class Layer(NamedTuple):
    """The operations of one: the products q, k and v; o; gates and ups; down; and what quantises before each."""

    quants: tuple[NormQuant, NormQuant, NormQuant, GluNormQuant]
    products: tuple[TernaryMatmul, TernaryMatmul, TernaryMatmul, TernaryMatmul]
    rope: RopeAppend
    attention: Attention

    @property
    def pairs(self) -> list[tuple[Quant, TernaryMatmul]]:
        """Each product behind what quantises for it."""
        return list(zip(self.quants, self.products, strict=True))


def layer_at(ops: Sequence[Op]) -> Layer | None:
    """The layer that the operations begin with, if each takes what the one before it makes, and no other does."""
    match ops[:LAYER_OPS]:
        case [
            NormQuant() as n0,
            TernaryMatmul() as qkv,
            RopeAppend() as rope,
            Attention() as attention,
            NormQuant() as n1,
            TernaryMatmul() as o,
            NormQuant() as n2,
            TernaryMatmul() as up,
            GluNormQuant() as n3,
            TernaryMatmul() as down,
        ]:
            layer = Layer((n0, n1, n2, n3), (qkv, o, up, down), rope, attention)
            return layer if _chained(layer, ops) else None
    return None


def _chained(layer: Layer, ops: Sequence[Op]) -> bool:
    (n0, n1, n2, n3), (qkv, o, up, down), rope, attention = layer
    return (
        all(feeds(quant, op, ops[at:]) for quant, op, at in ((n0, qkv, 2), (n1, o, 6), (n2, up, 8), (n3, down, 10)))
        and (qkv.add, o.add, up.add, down.add) == (False, True, False, True)
        and (o.out, n2.x, down.out) == (n0.x,) * 3
        and qkv.out == rope.qkv
        and rotates_for(rope, attention, ops[4:])
        and n1.x == attention.out
        and up.out == n3.gate_up
        and not read_again(up.out, ops[9:])
        and not _attention_read_again(attention.out, ops[5:])
    )


def _attention_read_again(name: str, later: Sequence[Op]) -> bool:
    """Whether a quantisation reads attention's tensor before attention makes it anew."""
    for op in later:
        if isinstance(op, NormQuant) and op.x == name:
            return True
        if isinstance(op, Attention) and op.out == name:
            return False
    return False
