"""Where transform_quant computes an operation, and codes of few tokens in the order in which products read them."""

from __future__ import annotations

from bitnet.core.gpu import Bucket, Buffer, Context
from bitnet.core.gpu.ops.recurrent import Quantising
from bitnet.core.hal import GatedQuant, GluNormQuant, NormQuant, TernaryMatmul
from bitnet.cuda.bits import GROUP, STEP
from bitnet.cuda.few import STEP as FEW_STEP
from bitnet.cuda.weights import ternary

CHUNK = 1024
"""Elements of a row that a block of transform_quant transforms at a time."""
MAX_CHUNKS = 32
"""Maximum chunks of a row; more need too many registers."""
FEWEST, ORDERED_TOKENS = 3, 8
"""Tokens of a step whose codes are put into the order of ternary_few."""
MAX_HEAD = 128
"""Maximum elements of a head that transform_quant normalises: those of a warp."""


def transforms(ctx: Context, op: Quantising) -> bool:
    """Whether transform_quant supports an operation."""
    if op.transform is not None and op.transform.block > CHUNK:
        return False
    head = ctx.program.weights[op.weight].shape[0] if isinstance(op, GatedQuant) and op.weight else 4
    return head & (head - 1) == 0 and 4 <= head <= MAX_HEAD and ctx.shape(op.out)[1] <= MAX_CHUNKS * CHUNK


def codes_of(ctx: Context, name: str, bucket: Bucket) -> Buffer | None:
    """Codes of an int8 tensor as the products of so few tokens read them, beside the tensor itself: as bits for
    ternary_bits, and in the order of ternary_few. None where they read the tensor: unless transform_quant makes it, and
    products with scales of groups read it, whole steps at a time."""
    one, width = bucket.tokens == 1, ctx.shape(name)[1]
    if width % (STEP if one else FEW_STEP) or not (one or FEWEST <= bucket.tokens <= ORDERED_TOKENS):
        return None
    made = [op for op in ctx.program.ops if isinstance(op, NormQuant | GluNormQuant | GatedQuant) and op.out == name]
    read = (op for op in ctx.program.ops if isinstance(op, TernaryMatmul) and op.x == name)
    whole = all((isinstance(op, GatedQuant) or op.transform) and transforms(ctx, op) for op in made)
    if not made or not whole or {ternary(ctx, op.weights).group for op in read} != {GROUP}:
        return None
    return ctx.scratch(f"bits of {name}", width) if one else ctx.zeroed(f"ordered {name}", ORDERED_TOKENS * width)
