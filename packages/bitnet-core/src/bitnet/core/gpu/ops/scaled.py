"""Launches for weights with scales of groups, and for normalised heads, on every GPU API.

Each backend has kernels with these names. Those of :func:`group_product` and :func:`head_norms` fuse nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops.rows import ROPE_GROUP, ceil_div, head_norm_inputs, next_power_of_two, power_of_two
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Op, Program, RopeAppend, TernaryMatmul, TernaryWeight

BLOCK = 128
"""Columns of a block of codes; a work-item multiplies at least one."""
GROUP = 64
"""Work-items of a work-group."""
LANES = 16
"""Work-items that share a row."""
MAX_TOKENS = 8
"""Tokens that a work-item multiplies its codes with."""
TERMS = 4096
"""Terms of groups held by a work-group: 16 KiB of the 32 KiB that every GPU API supports."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How the groups of a row lie in its blocks of 128 columns.

    A kernel multiplies a unit of columns at a time: a block of ``sets`` groups, of ``planes`` bit pairs each, or one
    group of ``blocks`` blocks. A row has ``count`` groups; its last block may be filled in part.
    """

    count: int
    sets: int
    planes: int
    blocks: int


def group_layout(w: TernaryBuffer) -> GroupLayout:
    """The layout of a weight that has scales of groups, for the lowering of every family."""
    assert w.group is not None
    count = w.cols // w.group
    sets = max(BLOCK // w.group, 1) if count > 1 else 1
    return GroupLayout(count, sets, 4 // sets, ceil_div(w.group, BLOCK))


def in_groups(program: Program, op: Op) -> bool:
    """Whether an operation is a product of weights with a scale for each group of columns."""
    if not isinstance(op, TernaryMatmul):
        return False
    weight = program.weights.get(op.weights[0])
    return isinstance(weight, TernaryWeight) and weight.group is not None


def norms_heads(op: Op) -> bool:
    """Whether an operation normalises heads before it rotates them."""
    return isinstance(op, RopeAppend) and op.q_norm is not None and not op.norms_last


def group_shape(w: TernaryBuffer, tokens: int) -> dict[str, int]:
    """How work-groups of GROUP work-items share a product whose activations are int8, as preprocessor constants."""
    assert w.group is not None
    layout = group_layout(w)
    count, groups = layout.count, layout.sets
    lanes = min(next_power_of_two(ceil_div(count, groups)), LANES)
    while lanes < GROUP and GROUP // lanes * count > TERMS:
        lanes *= 2
    held = 2 if tokens == 1 and 2 * GROUP // lanes * count <= TERMS else 1
    room = TERMS // (GROUP // lanes * held * count)
    most = min(tokens, MAX_TOKENS, power_of_two(max(room, 1)))
    shape = {"WG": GROUP, "COLS": w.cols, "ROW_BYTES": w.row_bytes, "GROUP": w.group, "EACH": groups}
    return shape | {"LANES": lanes, "HELD": held, "TOKENS": most}


def group_grid(w: TernaryBuffer, tokens: int, defines: Mapping[str, int]) -> tuple[int, int, int]:
    """Work-groups of a product whose shape is ``defines``."""
    rows = defines["WG"] // defines["LANES"] * defines["HELD"]
    return ceil_div(w.rows, rows), ceil_div(tokens, defines["TOKENS"]), 1


def group_product(ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer | None = None) -> list[Launch]:
    """``ternary_matmul`` by kernels that store the terms of a row's groups, then add them in order; in ``out``, if the
    results are not to be in the operation's tensor."""
    w, out = ctx.ternary(op.weights), out or ctx.tensors[op.out]
    defines = group_shape(w, bucket.tokens) | {"ADD": int(op.add)}
    spec = KernelSpec("ternary_groups", "ternary_groups", tuple(defines.items()))
    args = (ctx.step, ctx.tensors[op.x], ctx.tensors[op.scale], w.codes, w.scales, out)
    return [Launch(spec, group_grid(w, bucket.tokens, defines), (GROUP, 1, 1), (*args, np.int32(w.rows)))]


def head_norms(ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
    """RMSNorm of each head of q and k, in place, where the operation begins with it. All work-items have equally many
    elements of a head."""
    if not norms_heads(op):
        return []
    norms = head_norm_inputs(ctx, op, ctx.step)
    sizes = np.int32(op.heads), np.int32(op.kv_heads)
    group = math.gcd(op.head_dim, ROPE_GROUP)
    spec = KernelSpec("head_norms", "head_norms", (("WG", group), ("DIM", op.head_dim)))
    grid = (bucket.tokens, op.heads + op.kv_heads, 1)
    return [Launch(spec, grid, (group, 1, 1), (ctx.step, ctx.tensors[op.qkv], *norms, *sizes))]
