"""Operations of mixtures of experts: which matrices a token's row is multiplied by, and the products.

Like those of :mod:`bitnet.core.hal.program`, which lists them with the others, they are specified in
``kernels/README.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """The ``top`` experts of each token and their shares: ``ids`` i32[M, top], ``shares`` f32[M, top].

    With ``y = RMSNorm(x[m])`` and ``router``, an f32 weight ``[E, K]``, expert ``e`` has the logit ``y · router[e]``.
    The greatest logits come first; of equal ones, the lower expert. Shares are the softmax over the chosen logits.
    ``top`` is the number of columns of ``ids``.
    """

    x: str
    weight: str
    eps: float
    router: str
    ids: str
    shares: str


@dataclass(frozen=True, slots=True)
class ExpertMatmul:
    """Products of a token's row with the matrices of its ``top`` experts, the ``weights`` stacked along N.

    Each of the ``weights`` is ``[E · N_i, K]``: expert ``e`` has the rows from ``e · N_i`` on. Either all have groups
    of the same size, or none has groups.

    Without ``shares``, every expert of a token multiplies the same row, ``x`` i8[M, K] with ``scale`` f32[M], and
    ``out[M, top · ΣN_i]`` has the results in the order of ``ids``. With ``shares``, each has its own row, ``x``
    i8[M, top · K] with ``scale`` f32[M, top], and the results times their shares are summed in the order of ``ids``
    and added to ``out[M, ΣN_i]``.
    """

    x: str
    scale: str
    ids: str
    experts: int
    weights: tuple[str, ...]
    out: str
    shares: str | None = None
