"""The end of a program as one: norm, head and choice of tokens, where nobody reads the logits (decision 0060)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.driver import Arg
from bitnet.core.hal import DenseMatmul, DenseWeight, NormRows, Op, Sample

COMPACT_ROWS = 8
"""Rows of x for which a head is scored from a compact copy, at most, where a backend has no limit of its own."""
COMPACT_COLS = 4096
"""Sums of 16-bit activations and 4-bit codes over more columns do not fit 32 bits."""


@dataclass(frozen=True, slots=True)
class Head:
    """The operations that end a program; ``norm`` is there where the one before the head makes its input."""

    norm: NormRows | None
    dense: DenseMatmul
    sample: Sample

    @property
    def ops(self) -> int:
        """How many operations these are."""
        return 2 if self.norm is None else 3


def head_at(ops: Sequence[Op], bucket: Bucket, rows: int = COMPACT_ROWS) -> Head | None:
    """The head that the operations are, if the step has no use for its logits and at most so many rows."""
    if not bucket.logits and bucket.rows <= rows:
        match ops:
            case [NormRows() as norm, DenseMatmul() as dense, Sample() as sample] if norm.out == dense.x:
                return Head(norm, dense, sample)
            case [DenseMatmul() as dense, Sample() as sample]:
                return Head(None, dense, sample)
    return None


def compact_shape(ctx: Context, multiple: int) -> tuple[int, int] | None:
    """Rows and columns of the head that a program ends with, if a copy in 4 bits can stand for it.

    Args:
        multiple: The number of columns has to be one of this.
    """
    match ctx.program.ops[-2:]:
        case [DenseMatmul() as dense, Sample() as sample] if not ctx.program.keep and dense.out == sample.logits:
            weight = ctx.program.weights[dense.weight]
            assert isinstance(weight, DenseWeight)
            rows, cols = weight.shape
            if weight.dtype == "f16" and cols % multiple == 0 and cols <= COMPACT_COLS:
                return rows, cols
    return None


def choice(ctx: Context) -> tuple[Arg, ...]:
    """The arguments from which a kernel finds how a row's token is chosen."""
    fields = ("rows", "temperature", "seed_lo", "seed_hi", "token_seq", "seq_begin", "seq_len")
    return (ctx.step, *(ctx.offset(f) for f in fields))
