"""A second matrix in the launch of a product, and the convolution of the first one's results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu.context import Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer
from bitnet.core.gpu.fusions import RecurrentInputs
from bitnet.core.gpu.weights import TernaryBuffer

ROWS = 16
"""Rows of a tile, which must not have rows of both matrices."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two matrices with the same columns, which multiply the same activations.

    Attributes:
        first: Its results are convolved; ``convolved`` gets what becomes of them.
        second: Its results go to ``out``.
        taps: Taps of the convolution.
        where: Offsets of the step's fields that the convolution reads, its weight and its state.
    """

    first: TernaryBuffer
    second: TernaryBuffer
    convolved: Buffer
    out: Buffer
    taps: int
    where: tuple[Arg, ...]

    @property
    def defines(self) -> dict[str, int]:
        """Preprocessor constants, besides those of the first product."""
        return {"PAIR": 1, "TAPS": self.taps}

    def args(self, codes: Arg) -> tuple[Arg, ...]:
        """The arguments after those of the first product, with the second matrix's codes as the kernel reads them."""
        return (codes, self.second.scales, self.out, np.int32(self.second.rows), *self.where)


def pair_of(ctx: Context, group: RecurrentInputs, first: TernaryBuffer, second: TernaryBuffer) -> Pair | None:
    """The products of a recurrent layer's inputs by these matrices, or None if kernels cannot take them together."""
    conv = group.conv
    if (first.cols, first.group) != (second.cols, second.group) or first.group is None or first.rows % ROWS:
        return None
    where = tuple(ctx.offset(name) for name in ("token_seq", "state_from", "state_to"))
    taps = ctx.program.weights[conv.weight].shape[1]
    memory = ctx.dense(conv.weight).data, ctx.state(conv.state)
    return Pair(first, second, ctx.tensors[conv.out], ctx.tensors[group.gate.out], taps, (*where, *memory))
