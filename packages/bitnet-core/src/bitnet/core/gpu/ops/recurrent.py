"""Launches of recurrent layers and Hadamard transforms, for backends that have kernels with these names and arguments.

A quantisation with a transform takes three or four launches: what it transforms goes to working memory as f32 (files
``norm_values``, ``glu_values`` and ``gated_values``), is transformed there (``hadamard``), and is then quantised
(``norm_quant`` without a norm). CUDA, OpenCL C and Vulkan have a kernel for all of it, where it supports the shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Buffer, Launch, launch
from bitnet.core.gpu.ops.rows import RowOps, activation_defines, ceil_div
from bitnet.core.hal import (
    CausalConv,
    DeltaGates,
    DeltaRule,
    Embed,
    GatedQuant,
    GluNormQuant,
    NormQuant,
    NormRows,
    Transform,
)

COLUMNS, MAX_PARTS = 32, 8
"""Columns of a state that a work-group of ``delta_rule`` takes, and maximum work-items that share the rows of each."""
SIGNS_BEFORE, SIGNS_AFTER = 1, 2
"""When ``hadamard`` multiplies by signs; 0: never."""

Quantising: TypeAlias = NormQuant | GluNormQuant | GatedQuant
Transforming: TypeAlias = Quantising | NormRows | Embed
Absmax: TypeAlias = Callable[[Context, Quantising, Buffer, Bucket], Launch]
"""As :meth:`RowOps.absmax`."""


def transform_source(ctx: Context, op: Quantising, product: Buffer | None = None) -> tuple[int, Buffer, Buffer]:
    """What a kernel that transforms and quantises reads: its KIND, and two buffers.

    Kinds: 0, rows as they are; 1, gates and ups; 2, rows, and their gates in the second buffer, which others leave.

    Args:
        product: ``act(gate) · up`` of a ``GluNormQuant``, if another kernel has computed it.
    """
    if isinstance(op, GatedQuant):
        return 2, ctx.tensors[op.x], ctx.tensors[op.gate]
    if isinstance(op, NormQuant):
        return 0, ctx.tensors[op.x], ctx.step
    return (1, ctx.tensors[op.gate_up], ctx.step) if product is None else (0, product, ctx.step)


@dataclass(frozen=True, slots=True)
class RecurrentOps:
    """The launches for work-groups of ``rows.group`` work-items.

    Attributes:
        absmax: Quantises rows.
        plain: Launches of ``Embed`` and ``NormRows`` without their transforms.
    """

    rows: RowOps
    absmax: Absmax
    plain: Callable[[Context, Embed | NormRows, Bucket], list[Launch]]

    def table(self) -> Dispatch:
        """The operations of recurrent layers. :meth:`transformed` belongs under the key ``Transformed``."""
        return {
            CausalConv: self.causal_conv,
            DeltaGates: self.delta_gates,
            DeltaRule: self.delta_rule,
            GatedQuant: self.quantised,
        }

    def causal_conv(self, ctx: Context, op: CausalConv, bucket: Bucket) -> list[Launch]:
        """A work-item has a column of a token whose taps are all within the step. That of a sequence's first token has
        all tokens before those, too, and the state, which nobody else touches."""
        channels, taps = ctx.program.weights[op.weight].shape
        where = (ctx.step, *(ctx.offset(f) for f in ("token_seq", "seq_begin", "state_from", "state_to")))
        data = ctx.tensors[op.x], ctx.dense(op.weight).data, ctx.state(op.state), ctx.tensors[op.out]
        grid, defines = (ceil_div(channels, self.rows.group), bucket.tokens, 1), {"WG": self.rows.group, "TAPS": taps}
        return [launch("causal_conv", grid, self.rows.group, (*where, *data, np.int32(channels)), defines)]

    def delta_gates(self, ctx: Context, op: DeltaGates, bucket: Bucket) -> list[Launch]:
        """A work-group has a head of a token."""
        heads, width = ctx.program.weights[op.alpha].shape
        named = (ctx.dense(name).data for name in (op.alpha, op.beta, op.bias, op.rate))
        x = (ctx.step, ctx.tensors[op.x], ctx.dense(op.weight).data, np.float32(op.eps))
        args = (*x, *named, ctx.tensors[op.out], np.int32(width), np.int32(heads))
        return [launch("delta_gates", (heads, bucket.tokens, 1), self.rows.group, args, {"WG": self.rows.group})]

    def delta_rule(self, ctx: Context, op: DeltaRule, bucket: Bucket) -> list[Launch]:
        """A work-group has ``COLUMNS`` columns of a head, through all tokens of a sequence."""
        heads, d_k, d_v = ctx.program.states[op.state].shape
        where = (ctx.step, *(ctx.offset(f) for f in ("seq_begin", "state_from", "state_to")))
        data = ctx.tensors[op.qkv], ctx.tensors[op.gates], ctx.state(op.state), ctx.tensors[op.out]
        parts = min(MAX_PARTS, self.rows.group // COLUMNS)
        defines = {
            "D_K": d_k,
            "D_V": d_v,
            "HEADS": heads,
            "K_HEADS": op.k_heads,
            "TILED": int(op.tiled),
            "COLUMNS": COLUMNS,
            "PARTS": parts,
        }
        grid = (ceil_div(d_v, COLUMNS), heads, min(bucket.tokens, ctx.program.limits.max_seqs))
        return [launch("delta_rule", grid, COLUMNS * parts, (*where, *data, np.float32(op.eps)), defines)]

    def quantised(self, ctx: Context, op: Quantising, bucket: Bucket) -> list[Launch]:
        """The codes of an operation's result, transformed if it has a transform."""
        tokens, width = ctx.shape(op.out)
        memory = ctx.scratch("transformed rows", tokens * width * 4)
        made = self._values(ctx, op, memory, bucket)
        if op.transform is not None:
            made.append(self.hadamard(ctx, op.transform, memory, width, bucket.tokens))
        return [*made, self.absmax(ctx, op, memory, bucket)]

    def transformed(self, ctx: Context, op: Transforming, bucket: Bucket) -> list[Launch]:
        """Any operation with a transform."""
        if not isinstance(op, Embed | NormRows):
            return self.quantised(ctx, op, bucket)
        assert op.transform is not None
        out, width, inverse = ctx.tensors[op.out], ctx.shape(op.out)[1], isinstance(op, Embed)
        count = bucket.tokens if inverse else bucket.rows
        last = self.hadamard(ctx, op.transform, out, width, count, rows=not inverse, inverse=inverse)
        return [*self.plain(ctx, op, bucket), last]

    def hadamard(
        self,
        ctx: Context,
        transform: Transform,
        data: Buffer,
        width: int,
        count: int,
        *,
        rows: bool = False,
        inverse: bool = False,
    ) -> Launch:
        """Transforms ``count`` rows of tokens, or of logits if ``rows``, in place. A work-group has a block, and each
        work-item at least one pair of it."""
        group = min(self.rows.group, transform.block // 2)
        signs = SIGNS_AFTER if inverse else SIGNS_BEFORE
        defines = {"WG": group, "BLOCK": transform.block, "ROWS": int(rows)}
        defines["SIGNS"] = signs if transform.signs else 0
        named = ctx.dense(transform.signs).data if transform.signs else ctx.step
        grid = (width // transform.block, count, 1)
        return launch("hadamard", grid, group, (ctx.step, named, data, np.int32(width)), defines)

    def _values(self, ctx: Context, op: Quantising, out: Buffer, bucket: Bucket) -> list[Launch]:
        """The launches that compute what an operation transforms or quantises, as f32."""
        (tokens, width), group, weight = ctx.shape(op.out), self.rows.group, op.weight
        x, row, made = ctx.tensors[op.gate_up if isinstance(op, GluNormQuant) else op.x], (bucket.tokens, 1, 1), []
        gain, eps, dim = ctx.step if weight is None else ctx.dense(weight).data, np.float32(op.eps), np.int32(width)
        if isinstance(op, GatedQuant):
            head = width if weight is None else ctx.program.weights[weight].shape[0]
            defines = {"WG": group, "HEAD": head, "NORM": int(weight is not None)}
            defines |= {"SILU": int(op.activation == "silu"), "UNTILE": op.untile}
            args = (ctx.step, x, ctx.tensors[op.gate], gain, eps, out, dim)
            return [launch("gated_values", (width // head, bucket.tokens, 1), group, args, defines)]
        if isinstance(op, GluNormQuant):
            product = out if weight is None else ctx.scratch("activated rows", tokens * width * 4)
            defines = {"WG": group, **activation_defines(op.activation)}
            made.append(launch("glu_values", row, group, (ctx.step, x, product, dim), defines))
            x = product
            if weight is None:
                return made
        defines = {"WG": group, "NORM": int(weight is not None)}
        return [*made, launch("norm_values", row, group, (ctx.step, x, gain, eps, out, dim), defines)]
