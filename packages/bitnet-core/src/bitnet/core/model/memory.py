"""What a model's weights take in a device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from bitnet.core.gguf.ternary import row_bytes
from bitnet.core.hal import BlockWeight, TernaryWeight, Weight
from bitnet.core.model.experts import EXPERTS, Experts


def weight_bytes(weights: Mapping[str, Weight]) -> int:
    """Bytes of all weights as devices accept them: two bits for a ternary weight, besides its scale.

    The formats of files can be smaller (PTQ1_0 takes 1.75 bits) or larger. A tied head counts once.
    """
    return sum(_bytes(weight) for weight in {id(weight): weight for weight in weights.values()}.values())


def spared_bytes(weights: Mapping[str, Weight]) -> int:
    """How many fewer bytes there are where binary weights take one bit. Embeddings and heads take two."""
    products = (weight for name, weight in weights.items() if name.startswith("blk."))
    return sum(prod(weight.shape) // 8 for weight in products if isinstance(weight, TernaryWeight) and weight.binary)


def token_bytes(weights: Mapping[str, Weight], experts: Experts | None) -> int:
    """Bytes of the weights that a decoded token reads: of embeddings one row, of experts those that it is routed to."""
    total = 0
    for name, weight in weights.items():
        if name == "token_embd":
            total += _bytes(weight) // weight.shape[0]
        elif experts is not None and name.endswith(EXPERTS):
            total += _bytes(weight) * experts.used // experts.count
        else:
            total += _bytes(weight)
    return total


def _bytes(weight: Weight) -> int:
    if isinstance(weight, BlockWeight):
        return weight.shape[0] * weight.row_bytes
    if not isinstance(weight, TernaryWeight):
        return prod(weight.shape) * (4 if weight.dtype == "f32" else 2)
    n, k = weight.shape
    return n * row_bytes(k) + (4 if weight.group is None else 2 * n * k // weight.group)
