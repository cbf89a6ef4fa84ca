"""The end of a program as one: norm, head and choice of tokens, where nobody reads the logits (decision 0060)."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.context import Context
from bitnet.core.gpu.driver import Arg, Buffer
from bitnet.core.gpu.groups import Choice, NormChoice, NormHead
from bitnet.core.hal import DenseMatmul, DenseWeight, Sample

COMPACT_ROWS = 8
"""Rows of x for which a head is scored from a compact copy, at most, where a backend has no limit of its own."""
COMPACT_COLS = 4096
"""Sums of 16-bit activations and 4-bit codes over more columns do not fit 32 bits."""


def compact_shape(ctx: Context, multiple: int) -> tuple[int, int] | None:
    """Rows and columns of the head that a program ends with, if a copy in 4 bits can stand for it.

    Args:
        multiple: The number of columns has to be one of this.
    """
    match ctx.program.ops[-2:]:
        case [DenseMatmul() as dense, Sample() as sample] if not ctx.keep and dense.out == sample.logits:
            weight = ctx.program.weights[dense.weight]
            if not isinstance(weight, DenseWeight):
                return None
            rows, cols = weight.shape
            if weight.dtype == "f16" and cols % multiple == 0 and cols <= COMPACT_COLS:
                return rows, cols
    return None


def choice(ctx: Context) -> tuple[Arg, ...]:
    """The arguments from which a kernel finds how a row's token is chosen."""
    fields = ("rows", "temperature", "seed_lo", "seed_hi", "token_seq", "seq_begin", "seq_len")
    return (ctx.step, *(ctx.offset(f) for f in fields))


def unnormed(ctx: Context, group: Choice | NormChoice | NormHead) -> tuple[Buffer, Buffer, np.float32]:
    """What a head that norms its rows itself reads: the rows, the norm's weight (any, without a norm), its epsilon."""
    if group.norm is None:
        x = ctx.tensors[group.dense.x]
        return x, x, np.float32(0)
    return ctx.tensors[group.norm.x], ctx.dense(group.norm.weight).data, np.float32(group.norm.eps)
