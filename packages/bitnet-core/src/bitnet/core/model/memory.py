"""What a model's weights take in a device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from bitnet.core.gguf.ternary import row_bytes
from bitnet.core.hal import TernaryWeight, Weight


def weight_bytes(weights: Mapping[str, Weight]) -> int:
    """Bytes of all weights as devices accept them: two bits for a ternary weight, besides its scale.

    The formats of files can be smaller (PTQ1_0 takes 1.75 bits) or larger. A tied head counts once.
    """
    return sum(_bytes(weight) for weight in {id(weight): weight for weight in weights.values()}.values())


def _bytes(weight: Weight) -> int:
    if not isinstance(weight, TernaryWeight):
        return prod(weight.shape) * (4 if weight.dtype == "f32" else 2)
    n, k = weight.shape
    return n * row_bytes(k) + (4 if weight.group is None else 2 * n * k // weight.group)
