"""Launches for ternary embeddings and output heads; backends have kernels with these names and arguments.

They are never part of a fused group, and need a device with the feature
:data:`~bitnet.core.hal.TERNARY_TABLES`.
"""

from __future__ import annotations

import numpy as np

from bitnet.core.errors import UnsupportedProgramError
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.driver import KernelSpec, Launch
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import TERNARY_TABLES, DenseMatmul, DeviceInfo, Embed, Op, Program, TernaryWeight

GROUP, LANES = 64, 16
"""Work-items of a work-group, and how many of them share rows of the table."""
EACH = 2
"""Rows of the table that those share."""
MOST_ROWS = 8
"""Rows of activations computed per read of the table."""


def ternary_table(program: Program, op: Op) -> str | None:
    """The name of the ternary weight of an embedding or a head, if it has one."""
    name = op.table if isinstance(op, Embed) else op.weight if isinstance(op, DenseMatmul) else None
    return name if name is not None and isinstance(program.weights.get(name), TernaryWeight) else None


def check_tables(program: Program, info: DeviceInfo) -> None:
    """Refuse ternary tables on a device without kernels for them.

    Raises:
        UnsupportedProgramError: The program has a ternary table.
    """
    if TERNARY_TABLES not in info.features and any(ternary_table(program, op) for op in program.ops):
        what = f"it lacks the feature {TERNARY_TABLES!r}: it supports only float embeddings and heads."
        raise UnsupportedProgramError(what, device=info.name)


def table_launches(ctx: Context, op: Embed | DenseMatmul, name: str, bucket: Bucket) -> list[Launch]:
    """``embed`` or ``dense_matmul`` of a ternary table."""
    w = ctx.ternary((name,))
    if isinstance(op, Embed):
        args = (ctx.step, ctx.offset("tokens"), w.codes, w.scales, ctx.tensors[op.out])
        spec = KernelSpec("table_embed", "table_embed", _shape(w))
        return [Launch(spec, (bucket.tokens, 1, 1), (GROUP, 1, 1), args)]
    rows = min(bucket.rows, MOST_ROWS)
    defines = (*_shape(w), ("WG", GROUP), ("LANES", LANES), ("EACH", EACH), ("TOKENS", rows))
    head = (ctx.step, ctx.tensors[op.x], w.codes, w.scales, ctx.tensors[op.out], np.int32(w.rows))
    grid = (ceil_div(w.rows, GROUP // LANES * EACH), ceil_div(bucket.rows, rows), 1)
    return [Launch(KernelSpec("table_matmul", "table_matmul", defines), grid, (GROUP, 1, 1), head)]


def _shape(w: TernaryBuffer) -> tuple[tuple[str, int], ...]:
    """What both kernels are compiled for: the row and its groups."""
    assert w.group is not None
    return ("COLS", w.cols), ("ROW_BYTES", w.row_bytes), ("GROUP", w.group)
