"""Plans, for every GPU backend, which neighbouring operations are launched together.

A group may replace its operations if no later operation needs a result that the group does not store. Only this module
decides that, from what each operation reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_type_hints

from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.drivers.interface import Launch
from bitnet.core.gpu.fusions import FUSIONS, Fusion
from bitnet.core.gpu.ops.variants import key
from bitnet.core.hal import (
    AddBias,
    Attention,
    CausalConv,
    CenterRows,
    DeltaGates,
    DeltaRule,
    DenseMatmul,
    Embed,
    ExpertMatmul,
    GatedQuant,
    GluNormQuant,
    NormQuant,
    NormRows,
    NormTokens,
    Op,
    Program,
    Quantize,
    RopeAppend,
    Route,
    Sample,
    TernaryMatmul,
)

ROW_OPS = (NormRows, DenseMatmul, Sample)
"""Operations on the rows that need logits; skipped in steps without such rows."""

_READS: Mapping[type, tuple[str, ...]] = {
    Embed: (),
    NormQuant: ("x",),
    TernaryMatmul: ("x", "scale"),
    RopeAppend: ("qkv",),
    Attention: ("qkv",),
    GluNormQuant: ("gate_up",),
    NormRows: ("x",),
    DenseMatmul: ("x",),
    Sample: ("logits",),
    Quantize: ("x",),
    AddBias: ("x",),
    CenterRows: ("x",),
    NormTokens: ("x",),
    CausalConv: ("x",),
    DeltaGates: ("x",),
    DeltaRule: ("qkv", "gates"),
    GatedQuant: ("x", "gate"),
    Route: ("x",),
    ExpertMatmul: ("x", "scale", "ids"),
}
_WRITES: Mapping[type, tuple[str, ...]] = {
    Embed: ("out",),
    NormQuant: ("out", "scale"),
    TernaryMatmul: ("out",),
    RopeAppend: ("qkv",),
    Attention: ("out",),
    GluNormQuant: ("out", "scale"),
    NormRows: ("out",),
    DenseMatmul: ("out",),
    Sample: ("out",),
    Quantize: ("codes", "scale"),
    AddBias: ("x",),
    CenterRows: ("out",),
    NormTokens: ("out",),
    CausalConv: ("out",),
    DeltaGates: ("out",),
    DeltaRule: ("out",),
    GatedQuant: ("out", "scale"),
    Route: ("ids", "shares"),
    ExpertMatmul: ("out",),
}


def _types(kind: type[Fusion]) -> tuple[Any, ...]:
    """The operation type of each field of a group."""
    hints = get_type_hints(kind)
    return tuple(hints[field.name] for field in fields(kind))


_TYPES = {kind: _types(kind) for kind in FUSIONS}


def reads(op: Op) -> frozenset[str]:
    """The tensors whose contents an operation depends on."""
    added = {op.out} if isinstance(op, TernaryMatmul | NormTokens) and op.add else set()
    if isinstance(op, TernaryMatmul) and op.column is not None:
        added = {op.out}  # whose other columns stay
    if isinstance(op, ExpertMatmul) and op.shares is not None:
        added = {op.out, op.shares}
    return frozenset({getattr(op, name) for name in _READS[type(op)]} | added)


def writes(op: Op) -> frozenset[str]:
    """The tensors that an operation creates or changes."""
    return frozenset(getattr(op, name) for name in _WRITES[type(op)])


def lower(ctx: Context, bucket: Bucket, table: Dispatch) -> list[Launch]:
    """The launches of the context's program for a bucket: those of groups in the table, else of single operations."""
    program = ctx.program
    ops = step_ops(program, bucket)
    launches: list[Launch] = []
    at = 0
    while at < len(ops):
        for group in () if ctx.keep else candidates(ops, at, bucket):
            keys = {key(program, op): type(op) for op in group.ops}
            if any(table.get(own) != table.get(kind) for own, kind in keys.items() if own not in group.TAKES):
                continue
            entry = table.get(type(group))
            made = entry(ctx, group, bucket) if entry else None
            if made is not None:
                launches += made
                at += len(group.ops)
                break
        else:
            launches += table[key(program, ops[at])](ctx, ops[at], bucket) or []
            at += 1
    return launches


def step_ops(program: Program, bucket: Bucket) -> list[Op]:
    """The operations needed by steps of the bucket."""
    return [op for op in program.ops if bucket.rows or not isinstance(op, ROW_OPS)]


def candidates(ops: Sequence[Op], at: int, bucket: Bucket) -> Iterator[Fusion]:
    """The groups that may replace the operations from ``at`` on, longer ones first."""
    for kind, types in _TYPES.items():
        here = ops[at : at + len(types)]
        if len(here) == len(types) and all(map(isinstance, here, types)):
            group = kind(*here)
            if (not kind.CHAINED or _chained(here)) and group.fits(bucket) and _safe(group, ops[at + len(here) :]):
                yield group


def _chained(ops: Sequence[Op]) -> bool:
    """Whether each operation consumes everything that the previous one produces."""
    return all(writes(first) <= reads(second) for first, second in pairwise(ops))


def _safe(group: Fusion, later: Sequence[Op]) -> bool:
    """Whether nothing needs a result that the group does not store, and no part of it reads memory that another
    overwrites."""
    kept = {name for op in group.kept for name in writes(op)}
    left_out = {name for op in group.ops for name in writes(op)} - kept
    if any(_read_first(name, later) for name in left_out):
        return False
    return not (group.AT_ONCE and kept & _inputs(group))


def _inputs(group: Fusion) -> set[str]:
    """The tensors that a group reads but does not produce, except those its products add to element by element."""
    found: set[str] = set()
    made: set[str] = set()
    for op in group.ops:
        inputs = reads(op) - writes(op) if isinstance(op, TernaryMatmul) else reads(op)
        found |= inputs - made
        made |= writes(op)
    return found


def _read_first(name: str, later: Sequence[Op]) -> bool:
    """Whether a later operation reads a tensor before another overwrites it. The host reads no tensors of fused
    programs."""
    for op in later:
        if name in reads(op):
            return True
        if name in writes(op):
            return False
    return False
