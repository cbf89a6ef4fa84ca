"""Launches of operations of models for embeddings: norms of tokens, and products whose results are some columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bitnet.core.gpu import Bucket, Context, Dispatch, KernelSpec, Launch
from bitnet.core.gpu.ops.variants import ColumnMatmul
from bitnet.core.hal import NormTokens, TernaryMatmul
from bitnet.cuda.products import Products
from bitnet.cuda.weights import ternary

GROUP = 256
"""Threads of a block."""


@dataclass(frozen=True, slots=True)
class EmbedderOps:
    """Launches for a device that multiplies by ``products``."""

    products: Products

    def table(self) -> Dispatch:
        """The operations this class knows."""
        return {NormTokens: self.norm_tokens, ColumnMatmul: self.columns}

    def norm_tokens(self, ctx: Context, op: NormTokens, bucket: Bucket) -> list[Launch]:
        args = (ctx.step, ctx.tensors[op.x], ctx.dense(op.weight).data, np.float32(op.eps), ctx.tensors[op.out])
        spec = KernelSpec("norm_values", "norm_values", (("NORM", 1), ("ADD", int(op.add))))
        dim = np.int32(ctx.shape(op.x)[1])
        return [Launch(spec, (bucket.tokens, 1, 1), (GROUP, 1, 1), (*args, dim), overlaps=True)]

    def columns(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """The product's results in rows of their own, and the launch that puts these into the columns."""
        assert op.column is not None
        rows, (tokens, width) = ternary(ctx, op.weights).rows, ctx.shape(op.out)
        apart = ctx.scratch("results for columns", tokens * rows * 4)
        made = self.products.ternary_matmul(ctx, replace(op, add=False, column=None), bucket, apart)
        spec = KernelSpec("put_columns", "put_columns", (("ADD", int(op.add)),))
        sizes = (np.int32(n) for n in (rows, width, op.column))
        args = (ctx.step, apart, ctx.tensors[op.out], *sizes)
        return [*made, Launch(spec, (bucket.tokens, 1, 1), (GROUP, 1, 1), args, overlaps=True)]
