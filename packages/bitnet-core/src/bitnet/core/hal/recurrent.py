"""Operations and states of models with recurrent layers (Gated DeltaNet), and the Hadamard transform of a row.

Like those of :mod:`bitnet.core.hal.program`, which lists them with the others, they are specified in
``kernels/README.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of f32 numbers that a sequence carries from token to token; its memory layout is the device's own.

    A device keeps ``entries`` of them. A step names the entry that each sequence reads and the one that it writes
    (:class:`~bitnet.core.hal.SequenceStep`), for all states of a program alike.

    Attributes:
        shape: Of one entry.
        entries: The same number for all states of a program.
    """

    shape: tuple[int, ...]
    entries: int

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return 4 * math.prod(self.shape) * self.entries


@dataclass(frozen=True, slots=True)
class Transform:
    """A row times signs, then the normalised Walsh-Hadamard transform of each ``block`` neighbouring elements.

    Attributes:
        block: A power of two, at least 4, that divides the row's length.
        signs: Names an f32 weight ``[K]`` of 1 and -1; None: all are 1.
    """

    block: int
    signs: str | None = None


@dataclass(frozen=True, slots=True)
class CausalConv:
    """``out[m, c] = silu(Σ_j weight[c, j] · x[m - taps + 1 + j, c])``: a causal convolution of each column.

    ``weight`` names an f32 weight ``[C, taps]``. The rows of ``x[M, C]`` before a sequence's first token of the step
    are those of its ``state``, ``[taps - 1, C]``; the last ``taps - 1`` rows become its new state.
    """

    x: str
    weight: str
    state: str
    out: str


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """Decays and strengths of the delta rule from the residual stream: ``out[M, 2H]``.

    With ``y = RMSNorm(x[m])``, column ``h`` is ``rate[h] · softplus(y · alpha[h] + bias[h])``, the logarithm of the
    decay, and column ``H + h`` is ``sigmoid(y · beta[h])``. ``alpha`` and ``beta`` name f32 weights ``[H, K]``,
    ``bias`` and ``rate`` f32 weights ``[H]``.
    """

    x: str
    weight: str
    eps: float
    alpha: str
    beta: str
    bias: str
    rate: str
    out: str


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The gated delta rule on each head's matrix ``S[d_k, d_v]``, token by token: ``out[M, H d_v]``.

    ``qkv[M, 2 k_heads d_k + H d_v]`` has all query heads, then all key heads, then the ``H`` value heads; ``gates`` is
    the result of :class:`DeltaGates`. ``state`` is ``[H, d_k, d_v]``. Value head ``h`` uses query and key head
    ``h // (H / k_heads)``, or ``h % k_heads`` if ``tiled``. Heads of q and k are divided by their L2 norm, with ``eps``
    inside the root.
    """

    qkv: str
    gates: str
    state: str
    out: str
    k_heads: int
    eps: float
    tiled: bool = False


@dataclass(frozen=True, slots=True)
class GatedQuant:
    """``norm(x) · act(gate)``, then the transform if there is one, then per-token absmax int8.

    The norm is the RMSNorm of each head of ``x[M, W]``, with the f32 weight ``[head_dim]`` that ``weight`` names; None:
    there is no norm. ``gate`` is ``[M, W]``. ``out`` is ``i8[M, W]``, ``scale`` ``f32[M]``.

    Attributes:
        untile: ``x`` and ``gate`` have their heads in the order of ``DeltaRule.tiled`` for this number of key heads,
            ``out`` has them in the other order; 0: in the same order.
    """

    x: str
    gate: str
    activation: Literal["silu", "sigmoid"]
    weight: str | None
    eps: float
    out: str
    scale: str
    transform: Transform | None = None
    untile: int = 0
