"""When operations may be made into one kernel: what the one writes, the other reads, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet.core.hal import GluNormQuant, NormQuant, Op, TernaryMatmul


def read_again(name: str, later: Sequence[Op]) -> bool:
    """Whether a later operation reads a product, or a gate and up, before one makes it anew."""
    for op in later:
        if isinstance(op, GluNormQuant) and op.gate_up == name:
            return True
        if isinstance(op, TernaryMatmul) and op.out == name:
            return op.add
    return False


def feeds(quant: NormQuant | GluNormQuant, op: TernaryMatmul, later: Sequence[Op]) -> bool:
    """Whether ``op`` takes what ``quant`` makes, and nothing later does before it is made anew."""
    if (quant.out, quant.scale) != (op.x, op.scale):
        return False
    for other in later:
        if isinstance(other, TernaryMatmul) and quant.out == other.x:
            return False
        if isinstance(other, NormQuant | GluNormQuant) and quant.out == other.out:
            return True
    return True
