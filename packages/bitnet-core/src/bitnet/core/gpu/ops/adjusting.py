"""Launches that adjust logits by slots and count chosen tokens there, for backends with these kernels."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer, KernelSpec, Launch
from bitnet.core.hal import Sample

COUNT_GROUP = 32
EACH = 8
"""Logits per work-item of ``adjust``."""


def adjustment(ctx: Context) -> tuple[Arg, ...]:
    """The kernel arguments that describe how a row's logits are adjusted; they follow the step buffer."""
    fields = ("slot", "repetition", "presence", "frequency")
    return (*(ctx.offset(f) for f in fields), *ctx.slots())


def adjust(ctx: Context, op: Sample, bucket: Bucket, group: int) -> tuple[Launch, Buffer]:
    """The launch that adjusts the logits of a ``Sample``, with work-groups of ``group`` work-items, and its output
    buffer."""
    rows, vocabulary = ctx.shape(op.logits)
    out = ctx.scratch("adjusted logits", rows * vocabulary * 4)
    args = (ctx.step, *adjustment(ctx), ctx.tensors[op.logits], out, np.int32(vocabulary))
    grid = (-(-vocabulary // (EACH * group)), bucket.rows, 1)
    return Launch(_kernel("adjust", group), grid, (group, 1, 1), args, overlaps=True), out


def count_chosen(ctx: Context) -> Launch:
    """The launch that counts the tokens of the last ``Sample`` in the slots of their rows."""
    sample = ctx.program.ops[-1]
    assert isinstance(sample, Sample)
    marks, _ = ctx.slots()
    args = (ctx.step, ctx.offset("slot"), marks, ctx.tensors[sample.out], np.int32(ctx.shape(sample.logits)[1]))
    return Launch(_kernel("count_chosen", COUNT_GROUP), (1, 1, 1), (COUNT_GROUP, 1, 1), args, overlaps=True)


def _kernel(entry: str, group: int) -> KernelSpec:
    return KernelSpec("adjust", entry, (("WG", group), ("EACH", EACH)))
