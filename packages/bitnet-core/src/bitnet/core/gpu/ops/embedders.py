"""Launches of norms of tokens, and of products whose results are some columns of a wider tensor, on every GPU API.

Each backend has kernels with these names: ``norm_values`` and ``put_columns``. No other kernel knows wider rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Buffer, Launch
from bitnet.core.gpu.ops.rows import RowOps
from bitnet.core.hal import NormTokens, TernaryMatmul

Product: TypeAlias = Callable[[Context, TernaryMatmul, Bucket, Buffer], list[Launch]]
"""A backend's ternary product, whose results go to the buffer, ``[M, N]``."""


@dataclass(frozen=True, slots=True)
class EmbedderOps:
    """The launches for work-groups of ``rows.group`` work-items, of a device that multiplies by ``product``."""

    rows: RowOps
    product: Product

    def norm_tokens(self, ctx: Context, op: NormTokens, bucket: Bucket) -> list[Launch]:
        args = (ctx.step, ctx.tensors[op.x], ctx.dense(op.weight).data, np.float32(op.eps), ctx.tensors[op.out])
        defines = {"NORM": 1} | ({"ADD": 1} if op.add else {})
        made = self.rows.launch("norm_values", bucket.tokens, (*args, np.int32(ctx.shape(op.x)[1])), defines=defines)
        return [replace(made, overlaps=True)]

    def columns(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """The product's results in rows of their own, and the launch that puts these into the columns."""
        assert op.column is not None
        rows, (tokens, width) = sum(ctx.program.weights[name].shape[0] for name in op.weights), ctx.shape(op.out)
        apart = ctx.scratch("results for columns", tokens * rows * 4)
        made = self.product(ctx, replace(op, add=False, column=None), bucket, apart)
        sizes = (np.int32(n) for n in (rows, width, op.column))
        args = (ctx.step, apart, ctx.tensors[op.out], *sizes)
        last = self.rows.launch("put_columns", bucket.tokens, args, defines={"ADD": int(op.add)})
        return [*made, replace(last, overlaps=True)]
