"""Launches of recurrent layers and Hadamard transforms in OpenCL C: as on every GPU, but one kernel transforms and
quantises, and has the decays and strengths of the same rows."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.products import DECODE_TOKENS, Products
from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Arg, Buffer, Launch, launch
from bitnet.core.gpu.fusions import GatedTransform, RecurrentInputs
from bitnet.core.gpu.ops import RowOps, activation_defines, ceil_div, next_power_of_two, power_of_two
from bitnet.core.gpu.ops.pairs import pair_of
from bitnet.core.gpu.ops.products import glu_products, row_sums
from bitnet.core.gpu.ops.recurrent import Quantising, Transforming, transform_source
from bitnet.core.gpu.ops.variants import Transformed, recurrent_variants
from bitnet.core.hal import CausalConv, DeltaGates, Embed, GatedQuant, GluNormQuant, NormRows

EACH = 16
"""Elements of a row that a work-item of transform_quant has in each pass."""
MIN_GROUP, MAX_GROUPS = 32, (256, 512)
"""Minimum work-items of its work-groups, and maximum on CPUs and on GPUs."""


class RecurrentLaunches:
    """The launches for a device.

    Args:
        plain: The entries of operations without transforms.
        passes: Maximum passes over a row of transform_quant, whose elements a work-item holds in registers.
    """

    def __init__(self, abilities: Abilities, products: Products, rows: RowOps, plain: Dispatch, passes: int) -> None:
        self._group = power_of_two(min(abilities.group, MAX_GROUPS[abilities.gpu]))
        self._local, self._products, self._gpu = abilities.local_bytes, products, abilities.gpu
        self._shared, self._passes = recurrent_variants(rows, plain), passes

    def table(self) -> Dispatch:
        """The entries of operations of recurrent layers and of those with transforms."""
        return {
            **self._shared,
            GatedQuant: self.quantised,
            Transformed: self.quantised,
            GatedTransform: self.gated_transform,
            RecurrentInputs: self.inputs,
        }

    def quantised(self, ctx: Context, op: Transforming, bucket: Bucket) -> list[Launch]:
        """A quantisation with a transform or a gate, in one launch if the kernel supports its shape."""
        if not isinstance(op, NormRows | Embed) and self._transforms(ctx, op):
            return [self.transform(ctx, op, bucket)]
        return self._shared[Transformed](ctx, op, bucket) or []

    def gated_transform(self, ctx: Context, group: GatedTransform, bucket: Bucket) -> list[Launch] | None:
        """The product of gates and ups, activated, and what transforms and quantises it."""
        up, glu = group.up, group.glu
        if not self._products.gates(ctx.ternary(up.weights)) or not self._transforms(ctx, glu):
            return None
        product = glu_products(ctx, glu)
        made = self._products.ternary_matmul(ctx, up, bucket, out=product, activation=glu.activation)
        return [*made, self.transform(ctx, glu, bucket, product)]

    def inputs(self, ctx: Context, group: RecurrentInputs, bucket: Bucket) -> list[Launch] | None:
        """What a recurrent layer computes before the delta rule: decays and strengths beside the norm, then both
        products and the convolution."""
        norm = group.norm
        if bucket.tokens > DECODE_TOKENS or norm.weight is None or not self._transforms(ctx, norm):
            return None
        if self._gpu:
            made = [self.transform(ctx, norm, bucket, gates=group.gates)]
        else:  # CPUs gain nothing, and must not leave a kernel early (norm_rows.cl)
            made = [self.transform(ctx, norm, bucket), *(self._shared[DeltaGates](ctx, group.gates, bucket) or [])]
        pair = pair_of(ctx, group, *(ctx.ternary(op.weights) for op in (group.mixed, group.gate)))
        if pair is not None:
            return [*made, self._products.pair(ctx, group.mixed, bucket, pair)]
        for op in (group.mixed, group.gate):
            made += self._products.ternary_matmul(ctx, op, bucket)
        return [*made, *(self._shared[CausalConv](ctx, group.conv, bucket) or [])]

    def transform(
        self,
        ctx: Context,
        op: Quantising,
        bucket: Bucket,
        product: Buffer | None = None,
        gates: DeltaGates | None = None,
    ) -> Launch:
        """The launch of transform_quant.

        Args:
            product: ``act(gate) · up`` of a ``GluNormQuant``, if another kernel has computed it.
            gates: Decays and strengths of the same rows with the same norm, to compute in the same launch.
        """
        width, weight, transform = ctx.shape(op.out)[1], op.weight, op.transform
        kind, x, gate = transform_source(ctx, op, product)
        signs = None if transform is None else transform.signs
        group = self._work_items(width)
        passes = ceil_div(width, group * EACH)
        bits = 0 if transform is None else transform.block.bit_length() - 1
        defines = {"WG": group, "DIM": width, "PASSES": passes, "BITS": bits}
        defines |= {"SIGNS": int(signs is not None), "KIND": kind, "NORM": int(weight is not None), "GATES": 0}
        if isinstance(op, GatedQuant):
            head = width if weight is None else ctx.program.weights[weight].shape[0]
            defines |= {"HEAD": head, "SILU": int(op.activation == "silu"), "UNTILE": op.untile}
        elif isinstance(op, GluNormQuant) and kind:
            defines |= activation_defines(op.activation)
        factors = (ctx.dense(name).data if name else ctx.step for name in (weight, signs))
        outs = ctx.tensors[op.out], ctx.tensors[op.scale], row_sums(ctx, op.out)
        args: tuple[Arg, ...] = (ctx.step, x, gate, *factors, np.float32(op.eps), *outs)
        groups = bucket.tokens
        if gates is not None:
            heads = ctx.program.weights[gates.alpha].shape[0]
            named = (ctx.dense(name).data for name in (gates.alpha, gates.beta, gates.bias, gates.rate))
            args = (*args, *named, ctx.tensors[gates.out], np.int32(heads))
            defines |= {"GATES": 1, "TOKENS": bucket.tokens}
            groups += heads * bucket.tokens
        return launch("transform_quant", (groups, 1, 1), group, args, defines)

    def _work_items(self, width: int) -> int:
        """The work-items of a work-group that has a row."""
        return min(self._group, max(MIN_GROUP, next_power_of_two(ceil_div(width, EACH))))

    def _transforms(self, ctx: Context, op: Quantising) -> bool:
        """Whether transform_quant supports an operation: its vectors, blocks and heads, its registers and memory."""
        width, group = ctx.shape(op.out)[1], self._work_items(ctx.shape(op.out)[1])
        block = 1 if op.transform is None else op.transform.block
        heads = 0
        if isinstance(op, GatedQuant) and op.weight is not None:
            head = ctx.program.weights[op.weight].shape[0]
            heads = width // head
            if head % EACH:
                return False
        local = 4 * group * (EACH + 1) + 8 * group + 4 * heads
        fits = block <= group * EACH and ceil_div(width, group * EACH) <= self._passes and local <= self._local
        return width % EACH == 0 and group >= MIN_GROUP and fits
