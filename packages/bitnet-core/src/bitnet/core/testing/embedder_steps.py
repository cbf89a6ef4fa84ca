"""Programs of small models, rewritten so that they have the operations of embedders and of HunYuan's models."""

from __future__ import annotations

from dataclasses import replace

from bitnet.core.hal import GluNormQuant, NormTokens, Op, Program, RopeAppend, TernaryMatmul
from bitnet.core.testing.rig import tensor


def norms_last(program: Program) -> Program:
    """The program with norms of heads after their rotation."""
    ops: list[Op] = [
        replace(op, norms_last=op.q_norm is not None) if isinstance(op, RopeAppend) else op for op in program.ops
    ]
    assert ops != list(program.ops), "no heads are normed"
    return replace(program, ops=ops)


def gelu(program: Program) -> Program:
    """The program with gates that GELU activates, and norms of its first rows that are added to them."""
    width = program.tensors["x"].shape[1]
    ops = [replace(op, activation="gelu_tanh") if isinstance(op, GluNormQuant) else op for op in program.ops]
    ops[1:1] = [NormTokens("x", "norm", 1e-5, "normed"), NormTokens("normed", "norm", 1e-5, "x", add=True)]
    return replace(program, ops=ops, tensors={**program.tensors, "normed": tensor("normed", "f32", "M", width)})


def in_columns(program: Program) -> Program:
    """The program with a product for each matrix."""
    ops = list[Op]()
    for op in program.ops:
        if isinstance(op, TernaryMatmul) and len(op.weights) > 1:
            column = 0
            for name in op.weights:
                ops.append(replace(op, weights=(name,), column=column))
                column += program.weights[name].shape[0]
        else:
            ops.append(op)
    return replace(program, ops=ops)
