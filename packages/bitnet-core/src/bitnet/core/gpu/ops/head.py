"""The fused end of a program: norm, output head and sampling, if nobody reads the logits (decision 0060)."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.context import Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer
from bitnet.core.gpu.fusions import Choice, NormChoice, NormHead
from bitnet.core.hal import DenseMatmul, DenseWeight, Sample

COMPACT_ROWS = 8
"""Default maximum rows of x for which a compact copy of the head is used."""
COMPACT_COLS = 4096
"""Maximum columns: sums of products of 16-bit activations and 4-bit codes over more columns may overflow 32 bits."""


def compact_shape(ctx: Context, multiple: int) -> tuple[int, int] | None:
    """Rows and columns of the program's final head, if a 4-bit copy can stand in for it.

    Args:
        multiple: The number of columns must be a multiple of this.
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
    """The kernel arguments that describe how a row's token is sampled."""
    fields = ("rows", "temperature", "seed_lo", "seed_hi", "token_seq", "seq_begin", "seq_len")
    return (ctx.step, *(ctx.offset(f) for f in fields))


def unnormed(ctx: Context, group: Choice | NormChoice | NormHead) -> tuple[Buffer, Buffer, np.float32]:
    """Inputs of a head that norms its own rows: the rows, the norm's weight (any buffer if there is no norm), the
    epsilon."""
    if group.norm is None:
        x = ctx.tensors[group.dense.x]
        return x, x, np.float32(0)
    return ctx.tensors[group.norm.x], ctx.dense(group.norm.weight).data, np.float32(group.norm.eps)
