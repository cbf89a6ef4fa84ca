"""Operations of a program as the structures that the native library runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bitnet.core.cpu import structures
from bitnet.core.cpu.structures import OpKind
from bitnet.core.hal import (
    AddBias,
    Attention,
    BlockWeight,
    CausalConv,
    CenterRows,
    DeltaGates,
    DeltaRule,
    DenseMatmul,
    DenseWeight,
    Embed,
    ExpertMatmul,
    GatedQuant,
    GluNormQuant,
    NormQuant,
    NormRows,
    NormTokens,
    Op,
    Program,
    RopeAppend,
    Route,
    Sample,
    TernaryMatmul,
    TernaryWeight,
    Transform,
)


class PackedMatrix(NamedTuple):
    """A repacked ternary matrix, as ``TernaryPart``: address of the codes, of the scales if several, rows, scale, and
    the address of its rows in its file if it is still to be packed.

    Matrices of several experts stand one after the other; the rows are those of one."""

    codes: int
    scales: int | None
    rows: int
    scale: float
    unpacked: int | None = None
    binary: bool = False

    @property
    def part(self) -> structures.TernaryPart:
        return structures.TernaryPart(*self[:5])


class Operands(NamedTuple):
    """Where everything is that the operations of a program name.

    Attributes:
        matrices: Tensors.
        dense: Addresses of dense weights, and of those in blocks.
        blocks: Addresses of embeddings whose rows are looked up in their file, and of what their blocks are.
        layers: Parts of the KV cache.
        slots: Addresses of the marks and of the biases.
        keep: Keeps structures alive and returns their address.
    """

    program: Program
    matrices: Mapping[str, structures.Matrix]
    dense: Mapping[str, int]
    ternary: Mapping[str, PackedMatrix]
    blocks: Mapping[str, tuple[int, int]]
    layers: Sequence[structures.KVLayer]
    states: Mapping[str, structures.State]
    slots: tuple[int, int]
    keep: Callable[[ctypes.Array[Any]], int]

    def address(self, tensor: str) -> int:
        data: int = self.matrices[tensor].data
        return data

    def vector(self, weight: str | None) -> int | None:
        """The address of a dense weight that may be missing."""
        return None if weight is None else self.dense[weight]

    def type(self, name: str) -> int:
        """The number of a dense matrix's type."""
        weight = self.program.weights[name]
        assert isinstance(weight, DenseWeight | BlockWeight)
        return structures.WEIGHT_TYPES.index(weight.dtype)

    def transform(self, transform: Transform | None) -> structures.TransformOf:
        if transform is None:
            return structures.TransformOf()
        return structures.TransformOf(self.vector(transform.signs), transform.block)

    def table_offset(self, table: int) -> int:
        """Words from the first block table to this one."""
        return table * self.program.limits.max_seqs * self.program.limits.max_blocks

    def table(self, name: str) -> tuple[structures.TernaryPart, int, int]:
        """The first fields of a ternary table's operations: the matrix, the group's columns, and a zero."""
        matrix, weight = self.ternary[name], self.program.weights[name]
        assert isinstance(weight, TernaryWeight)
        assert weight.group is not None
        return matrix.part, weight.group, 0


def lower(op: Op, at: Operands) -> structures.Op:
    """An operation as a structure."""
    matrix, dense = at.matrices, at.dense
    if isinstance(op, Embed):
        rest = matrix[op.out], at.transform(op.transform)
        if op.table in at.ternary:
            return structures.Op(OpKind.TABLE_EMBED, table_embed=structures.TableEmbedOp(*at.table(op.table), *rest))
        if op.table in at.blocks:
            data, places = at.blocks[op.table]
            return structures.Op(OpKind.EMBED, embed=structures.EmbedOp(data, 0, 0, *rest, places))
        return structures.Op(OpKind.EMBED, embed=structures.EmbedOp(dense[op.table], at.type(op.table), 0, *rest))
    if isinstance(op, NormQuant):
        results = matrix[op.out], at.address(op.scale), at.transform(op.transform)
        norm = structures.NormQuantOp(matrix[op.x], at.vector(op.weight), op.eps, 0, *results)
        return structures.Op(OpKind.NORM_QUANT, norm_quant=norm)
    if isinstance(op, TernaryMatmul):
        return _product(op, at)
    if isinstance(op, RopeAppend):
        shape = op.heads, op.kv_heads, op.head_dim, op.style == "interleaved"
        norms, tables = (at.vector(name) for name in (op.q_norm, op.k_norm)), (dense[op.cos], dense[op.sin])
        rotated = 2 * at.program.weights[op.cos].shape[1]
        layer, blocks = at.layers[op.layer], at.table_offset(op.table)
        rope = structures.RopeAppendOp(
            matrix[op.qkv], layer, *tables, *shape, *norms, op.eps, rotated, blocks, op.norms_last
        )
        return structures.Op(OpKind.ROPE_APPEND, rope_append=rope)
    if isinstance(op, Attention):
        shape3 = op.heads, op.kv_heads, op.head_dim, op.window or 0
        layer, blocks = at.layers[op.layer], at.table_offset(op.table)
        attention = structures.AttentionOp(matrix[op.qkv], matrix[op.out], layer, *shape3, blocks)
        return structures.Op(OpKind.ATTENTION, attention=attention)
    if isinstance(op, GluNormQuant):
        quantised = matrix[op.out], matrix[op.scale], at.transform(op.transform), op.parts, op.clamp or 0.0
        number = structures.ACTIVATIONS.index(op.activation)
        glu = structures.GluNormQuantOp(matrix[op.gate_up], at.vector(op.weight), op.eps, number, *quantised)
        return structures.Op(OpKind.GLU_NORM_QUANT, glu_norm_quant=glu)
    if isinstance(op, NormRows):
        rest = matrix[op.out], at.transform(op.transform)
        rows = structures.NormRowsOp(matrix[op.x], dense[op.weight], op.eps, 0, *rest)
        return structures.Op(OpKind.NORM_ROWS, norm_rows=rows)
    if isinstance(op, AddBias):
        return structures.Op(OpKind.ADD_BIAS, add_bias=structures.AddBiasOp(matrix[op.x], dense[op.bias]))
    if isinstance(op, CenterRows):
        return structures.Op(OpKind.CENTER_ROWS, center_rows=structures.CenterRowsOp(matrix[op.x], matrix[op.out]))
    if isinstance(op, NormTokens):
        rest2 = matrix[op.out], dense[op.weight], op.eps, op.add
        return structures.Op(OpKind.NORM_TOKENS, norm_tokens=structures.NormTokensOp(matrix[op.x], *rest2))
    if isinstance(op, DenseMatmul) and op.weight in at.ternary:
        table = structures.TableMatmulOp(matrix[op.x], *at.table(op.weight), matrix[op.out])
        return structures.Op(OpKind.TABLE_MATMUL, table_matmul=table)
    if isinstance(op, DenseMatmul):
        head = structures.DenseMatmulOp(matrix[op.x], dense[op.weight], at.type(op.weight), 0, matrix[op.out])
        return structures.Op(OpKind.DENSE_MATMUL, dense_matmul=head)
    if isinstance(op, Sample):
        slots = at.slots if op is at.program.ops[-1] else (None, None)
        sample = structures.SampleOp(matrix[op.logits], at.address(op.out), *slots)
        return structures.Op(OpKind.SAMPLE, sample=sample)
    if isinstance(op, CausalConv | DeltaGates | DeltaRule | GatedQuant):
        return _recurrent(op, at)
    if isinstance(op, Route):
        tensors = matrix[op.x], matrix[op.ids], matrix[op.shares]
        experts = at.program.weights[op.router].shape[0]
        route = structures.RouteOp(*tensors, dense[op.weight], dense[op.router], op.eps, experts)
        return structures.Op(OpKind.ROUTE, route=route)
    if isinstance(op, ExpertMatmul):
        return _expert_product(op, at)
    count = at.program.tensors[op.x].shape[0]
    quantize = structures.QuantizeOp(matrix[op.x], count, 0, matrix[op.codes], at.address(op.scale))
    return structures.Op(OpKind.QUANTIZE, quantize=quantize)


def _product(op: TernaryMatmul, at: Operands) -> structures.Op:
    matrices, first = [at.ternary[name] for name in op.weights], at.program.weights[op.weights[0]]
    operands = at.matrices[op.x], at.address(op.scale)
    assert isinstance(first, TernaryWeight)
    parts = (structures.TernaryPart * len(matrices))(*(matrix.part for matrix in matrices))
    where = at.keep(parts), len(parts), op.add, _from_column(at.matrices[op.out], op.column or 0)
    kind = OpKind.TERNARY_MATMUL if first.group is None else OpKind.GROUP_MATMUL
    kind = OpKind.BINARY_MATMUL if matrices[0].binary else kind
    how = first.group or 0, matrices[0].binary
    return structures.Op(kind, ternary_matmul=structures.TernaryMatmulOp(*operands, *where, *how))


def _from_column(matrix: structures.Matrix, first: int) -> structures.Matrix:
    """The columns of a matrix of floats from one on."""
    return structures.Matrix(matrix.data + 4 * first, matrix.columns - first, matrix.stride)


def _expert_product(op: ExpertMatmul, at: Operands) -> structures.Op:
    matrices, first = [at.ternary[name] for name in op.weights], at.program.weights[op.weights[0]]
    assert isinstance(first, TernaryWeight)
    parts = (structures.TernaryPart * len(matrices))(*(matrix.part for matrix in matrices))
    shares = structures.Matrix() if op.shares is None else at.matrices[op.shares]
    tensors = at.matrices[op.x], at.matrices[op.scale], at.matrices[op.ids], shares
    where = at.keep(parts), len(parts), op.experts, at.matrices[op.out]
    each = sum(matrix.rows for matrix in matrices)
    product = structures.ExpertMatmulOp(*tensors, *where, first.group or 0, each)
    return structures.Op(OpKind.EXPERT_MATMUL, expert_matmul=product)


def _recurrent(op: CausalConv | DeltaGates | DeltaRule | GatedQuant, at: Operands) -> structures.Op:
    matrix, dense = at.matrices, at.dense
    if isinstance(op, CausalConv):
        taps = at.program.weights[op.weight].shape[1]
        conv = structures.CausalConvOp(matrix[op.x], matrix[op.out], dense[op.weight], at.states[op.state], taps)
        return structures.Op(OpKind.CAUSAL_CONV, causal_conv=conv)
    if isinstance(op, DeltaGates):
        weights = (dense[name] for name in (op.weight, op.alpha, op.beta, op.bias, op.rate))
        heads = at.program.weights[op.rate].shape[0]
        gates = structures.DeltaGatesOp(matrix[op.x], matrix[op.out], *weights, op.eps, heads)
        return structures.Op(OpKind.DELTA_GATES, delta_gates=gates)
    if isinstance(op, DeltaRule):
        operands = matrix[op.qkv], matrix[op.gates], matrix[op.out], at.states[op.state]
        shape = op.k_heads, *at.program.states[op.state].shape
        delta = structures.DeltaRuleOp(*operands, *shape, op.eps, op.tiled)
        return structures.Op(OpKind.DELTA_RULE, delta_rule=delta)
    width = matrix[op.x].columns if op.weight is None else at.program.weights[op.weight].shape[0]
    where = matrix[op.x], matrix[op.gate], matrix[op.out], at.vector(op.weight), at.address(op.scale)
    shape4 = width, op.activation == "silu", op.untile
    gated = structures.GatedQuantOp(*where, op.eps, *shape4, at.transform(op.transform))
    return structures.Op(OpKind.GATED_QUANT, gated_quant=gated)
