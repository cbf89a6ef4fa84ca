"""An operation of models for embeddings, and of others with norms between products.

Like those of :mod:`bitnet.core.hal.program`, which lists it with the others, it is specified in ``kernels/README.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormTokens:
    """``out[m] = RMSNorm(x[m])`` f32, for every token; with ``add``, added to ``out``.

    Needs :data:`~bitnet.core.hal.EMBEDDERS`.
    """

    x: str
    weight: str
    eps: float
    out: str
    add: bool = False
