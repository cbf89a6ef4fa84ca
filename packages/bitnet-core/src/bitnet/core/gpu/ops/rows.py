"""Operations that are launched alike on every GPU API: each backend has kernels with these names and arguments.

A backend creates a :class:`RowOps` with its work-group size, adds its matrix products to the table, and lowers with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from bitnet.core.errors import InvalidInputError
from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Arg, Buffer, KernelSpec, Launch
from bitnet.core.gpu.ops.adjusting import adjust
from bitnet.core.hal import (
    AddBias,
    Attention,
    CenterRows,
    Embed,
    GatedQuant,
    GluNormQuant,
    NormQuant,
    NormRows,
    Quantize,
    RopeAppend,
    Sample,
)

ROPE_GROUP = 32
ADVANCE_GROUP = 32
PARTIALS = 256
"""Work-groups that compute partial sums for the mean in ``quantize``."""
MAX_QUANTIZED = 2**31 - 2**20
"""Maximum elements of ``quantize``, whose kernels count up to one stride beyond them in 32 bits."""


def ceil_div(n: int, by: int) -> int:
    """``n / by``, rounded up."""
    return -(-n // by)


def power_of_two(n: int) -> int:
    """The greatest that is no larger than ``n``."""
    return 1 << (n.bit_length() - 1)


def next_power_of_two(n: int) -> int:
    """The least that is no smaller than ``n``."""
    return 1 << (n - 1).bit_length()


def positions(ctx: Context, table: int = 0) -> tuple[Arg, ...]:
    """The kernel arguments for a token's position and its cache blocks in a block table."""
    limits, fields = ctx.program.limits, ("token_seq", "seq_begin", "seq_len")
    blocks = np.int32(ctx.offset("block_table") + table * limits.max_seqs * limits.max_blocks)
    return (ctx.step, *(ctx.offset(f) for f in fields), blocks, np.int32(limits.max_blocks))


def kv_defines(ctx: Context, op: RopeAppend | Attention) -> dict[str, int]:
    """Preprocessor constants of kernels that read or write the KV cache."""
    cache = ctx.cache
    codes = {"KV_I8": 1} if cache.dtype == "i8" else {}  # omitted otherwise: most devices have no kernels for it
    return {"DIM": op.head_dim, "BLOCK": cache.block_size, "KV_F16": int(cache.dtype == "f16")} | codes


def activation_defines(activation: str) -> dict[str, int]:
    """Preprocessor constants of kernels that activate gates."""
    gelu = {"GELU": 1} if activation == "gelu_tanh" else {}  # omitted otherwise: most devices have no kernels for it
    return {"RELU2": int(activation == "relu2")} | gelu


def rope_defines(rope: RopeAppend | None) -> dict[str, int]:
    """Preprocessor constants that make an attention kernel also rotate and update the KV cache."""
    return {"ROPE": int(rope is not None), "NEOX": int(rope is not None and rope.style == "neox")}


def part_defines(ctx: Context, rope: RopeAppend) -> dict[str, int]:
    """Preprocessor constants of kernels that rotate a part of each head: ``PAIRS``, the pairs that it has."""
    pairs = ctx.program.weights[rope.cos].shape[1]
    return {} if 2 * pairs == rope.head_dim else {"PAIRS": pairs}


def attention_inputs(ctx: Context, op: Attention, rope: RopeAppend | None, unused: Buffer) -> tuple[Buffer, ...]:
    """Inputs of attention that may rotate: rows, keys, values, cosines and sines (or ``unused``, twice)."""
    tables = (ctx.dense(rope.cos).data, ctx.dense(rope.sin).data) if rope else (unused, unused)
    return ctx.tensors[op.qkv], ctx.kv("k", op.layer), ctx.kv("v", op.layer), *tables


def head_norm_inputs(ctx: Context, rope: RopeAppend | None, unused: Buffer) -> tuple[Buffer, Buffer, np.float32]:
    """Inputs of kernels that may norm heads: the norms of q and k (or ``unused``, twice), and their epsilon."""
    if rope is None or rope.q_norm is None or rope.k_norm is None:
        return unused, unused, np.float32(0)
    return ctx.dense(rope.q_norm).data, ctx.dense(rope.k_norm).data, np.float32(rope.eps)


@dataclass(frozen=True, slots=True)
class RowOps:
    """Launches of the operations that use one work-group of ``group`` work-items per row."""

    group: int

    def table(self) -> Dispatch:
        """The operations this class knows."""
        return {
            Embed: self.embed,
            NormQuant: self.norm_quant,
            GluNormQuant: self.glu_norm_quant,
            RopeAppend: self.rope_append,
            NormRows: self.norm_rows,
            Sample: self.sample,
            Quantize: self.quantize,
            AddBias: self.add_bias,
            CenterRows: self.center_rows,
        }

    def launch(
        self,
        file: str,
        groups: int,
        args: tuple[Arg, ...],
        *,
        entry: str | None = None,
        defines: Mapping[str, int] = MappingProxyType({}),
    ) -> Launch:
        """``groups`` work-groups of ``entry`` (default: named as its file), compiled for the group's size as WG."""
        spec = KernelSpec(file, entry or file, (("WG", self.group), *defines.items()))
        return Launch(spec, (groups, 1, 1), (self.group, 1, 1), args)

    def embed(self, ctx: Context, op: Embed, bucket: Bucket) -> list[Launch]:
        table = ctx.dense(op.table)
        args = (ctx.step, ctx.offset("tokens"), table.data, ctx.tensors[op.out], np.int32(table.shape[1]))
        return [self.launch("embed", bucket.tokens, args, defines={"WEIGHT_F16": int(table.dtype == "f16")})]

    def norm_quant(self, ctx: Context, op: NormQuant, bucket: Bucket) -> list[Launch]:
        x = ctx.tensors[op.x]
        weight = ctx.dense(op.weight).data if op.weight else x
        args = (ctx.step, x, weight, np.float32(op.eps), ctx.tensors[op.out], ctx.tensors[op.scale])
        dim = np.int32(ctx.shape(op.x)[1])
        return [self.launch("norm_quant", bucket.tokens, (*args, dim), defines={"NORM": int(op.weight is not None)})]

    def absmax(self, ctx: Context, op: NormQuant | GluNormQuant | GatedQuant, x: Buffer, bucket: Bucket) -> Launch:
        """The int8 codes and scales of the operation's result, from rows that hold it in f32."""
        dim = np.int32(ctx.shape(op.out)[1])
        args = (ctx.step, x, x, np.float32(0), ctx.tensors[op.out], ctx.tensors[op.scale], dim)
        return self.launch("norm_quant", bucket.tokens, args, defines={"NORM": 0})

    def glu_norm_quant(self, ctx: Context, op: GluNormQuant, bucket: Bucket) -> list[Launch]:
        gate_up = ctx.tensors[op.gate_up]
        weight = ctx.dense(op.weight).data if op.weight else gate_up
        tokens, width = ctx.shape(op.gate_up)
        products = ctx.scratch("glu products", tokens * width // 2 * 4)
        args = (ctx.step, gate_up, weight, np.float32(op.eps), ctx.tensors[op.out], ctx.tensors[op.scale])
        defines = {"NORM": int(op.weight is not None)} | activation_defines(op.activation)
        return [self.launch("glu_norm_quant", bucket.tokens, (*args, np.int32(width // 2), products), defines=defines)]

    def rope_append(self, ctx: Context, op: RopeAppend, bucket: Bucket) -> list[Launch]:
        args = (
            *positions(ctx, op.table),
            ctx.tensors[op.qkv],
            ctx.kv("k", op.layer),
            ctx.kv("v", op.layer),
            ctx.dense(op.cos).data,
            ctx.dense(op.sin).data,
            np.int32(op.heads),
            np.int32(op.kv_heads),
        )
        defines = kv_defines(ctx, op) | {"NEOX": int(op.style == "neox")} | part_defines(ctx, op)
        if op.norms_last:
            args, defines = (*args, *head_norm_inputs(ctx, op, ctx.step)), defines | {"NORMS_LAST": 1}
        spec = KernelSpec("rope_append", "rope_append", tuple(defines.items()))
        return [Launch(spec, (bucket.tokens, op.heads + 2 * op.kv_heads, 1), (ROPE_GROUP, 1, 1), args)]

    def norm_rows(self, ctx: Context, op: NormRows, bucket: Bucket) -> list[Launch]:
        args = (ctx.step, ctx.offset("rows"), ctx.tensors[op.x], ctx.dense(op.weight).data, np.float32(op.eps))
        return [self.launch("norm_rows", bucket.rows, (*args, ctx.tensors[op.out], np.int32(ctx.shape(op.x)[1])))]

    def sample(self, ctx: Context, op: Sample, bucket: Bucket) -> list[Launch]:
        choice = ("rows", "temperature", "top_k", "top_p", "min_p", "seed_lo", "seed_hi")
        position = ("token_seq", "seq_begin", "seq_len")
        logits, before = ctx.tensors[op.logits], list[Launch]()
        if bucket.adjusted and op is ctx.program.ops[-1]:
            launch, logits = adjust(ctx, op, bucket, self.group)
            before = [launch]
        args = (ctx.step, *(ctx.offset(f) for f in choice + position), logits, ctx.tensors[op.out])
        return [*before, self.launch("sample", bucket.rows, (*args, np.int32(ctx.shape(op.logits)[1])))]

    def add_bias(self, ctx: Context, op: AddBias, bucket: Bucket) -> list[Launch]:
        bias = ctx.dense(op.bias)
        args = (ctx.step, ctx.tensors[op.x], bias.data, np.int32(bias.shape[0]))
        return [self.launch("add_bias", bucket.tokens, args)]

    def center_rows(self, ctx: Context, op: CenterRows, bucket: Bucket) -> list[Launch]:
        args = (ctx.step, ctx.tensors[op.x], ctx.tensors[op.out], np.int32(ctx.shape(op.x)[1]))
        return [self.launch("center_rows", bucket.tokens, args)]

    def quantize(self, ctx: Context, op: Quantize, bucket: Bucket) -> list[Launch]:
        x, scale = ctx.tensors[op.x], ctx.tensors[op.scale]
        elements = math.prod(ctx.shape(op.x))
        if elements > MAX_QUANTIZED:
            raise InvalidInputError(
                f"{op.x!r} has {elements:,} elements; the limit on a GPU is {MAX_QUANTIZED:,}.",
                hint="Quantise it on the CPU.",
            )
        n, count = np.int32(elements), np.int32(PARTIALS)
        partial = ctx.scratch("absmean partials", PARTIALS * 4)
        return [
            self.launch("quantize", PARTIALS, (x, n, partial), entry="absmean_partial"),
            self.launch("quantize", 1, (partial, count, n, scale), entry="absmean_scale"),
            self.launch("quantize", PARTIALS, (x, n, scale, ctx.tensors[op.codes]), entry="ternary_codes"),
        ]


def advance(ctx: Context) -> Launch:
    """The launch that ends a decode step of a program whose last operation is ``Sample``.

    It copies the sampled tokens to row ``DONE`` (a word of the header) of ``history``, makes them the next tokens,
    lengthens every sequence by one, and increments ``DONE``.
    """
    sample = ctx.program.ops[-1]
    assert isinstance(sample, Sample)  # otherwise no step is ever advanced
    args = (ctx.step, ctx.offset("tokens"), ctx.offset("seq_len"), ctx.tensors[sample.out], ctx.history)
    return Launch(KernelSpec("advance", "advance"), (1, 1, 1), (ADVANCE_GROUP, 1, 1), args, overlaps=True)
