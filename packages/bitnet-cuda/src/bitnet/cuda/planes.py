"""Where transform_quant computes an operation, and the bits of one token's codes that it leaves for ternary_bits."""

from __future__ import annotations

from bitnet.core.gpu import Bucket, Buffer, Context
from bitnet.core.gpu.ops.recurrent import Quantising
from bitnet.core.hal import GatedQuant, GluNormQuant, NormQuant, TernaryMatmul
from bitnet.cuda.bits import GROUP, STEP
from bitnet.cuda.weights import ternary

CHUNK = 1024
"""Elements of a row that a block of transform_quant transforms at a time."""
MAX_CHUNKS = 32
"""Maximum chunks of a row; more need too many registers."""
MAX_HEAD = 128
"""Maximum elements of a head that transform_quant normalises: those of a warp."""


def transforms(ctx: Context, op: Quantising) -> bool:
    """Whether transform_quant supports an operation."""
    if op.transform is not None and op.transform.block > CHUNK:
        return False
    head = ctx.program.weights[op.weight].shape[0] if isinstance(op, GatedQuant) and op.weight else 4
    return head & (head - 1) == 0 and 4 <= head <= MAX_HEAD and ctx.shape(op.out)[1] <= MAX_CHUNKS * CHUNK


def planes_of(ctx: Context, name: str, bucket: Bucket) -> Buffer | None:
    """Bits of the codes of an int8 tensor with one row, a byte a code; None unless each operation that makes the tensor
    leaves them, and a product reads them."""
    made = [op for op in ctx.program.ops if isinstance(op, NormQuant | GluNormQuant | GatedQuant) and op.out == name]
    whole = all((isinstance(op, GatedQuant) or op.transform) and transforms(ctx, op) for op in made)
    read = (op for op in ctx.program.ops if isinstance(op, TernaryMatmul) and op.x == name)
    width = ctx.shape(name)[1]
    if bucket.tokens > 1 or not made or not whole or width % STEP:
        return None
    if not any(ternary(ctx, op.weights).group == GROUP for op in read):
        return None
    return ctx.scratch(f"planes of {name}", width)
