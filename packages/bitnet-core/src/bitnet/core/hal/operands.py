"""The operands that each operation needs, as specified in ``kernels/README.md``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal.embedders import NormTokens
from bitnet.core.hal.experts import ExpertMatmul, Route
from bitnet.core.hal.program import (
    BLOCK_SIZES,
    AddBias,
    Attention,
    BlockWeight,
    CenterRows,
    DenseMatmul,
    DenseWeight,
    Dim,
    Embed,
    GluNormQuant,
    NormQuant,
    NormRows,
    Op,
    Program,
    RopeAppend,
    Sample,
    TensorSpec,
    TernaryMatmul,
    TernaryWeight,
    Weight,
)
from bitnet.core.hal.recurrent import CausalConv, DeltaGates, DeltaRule, GatedQuant, StateSpec, Transform

MAX_K = 131_072
"""Maximum K, the row length of a ternary matrix: up to it, every partial sum stays within 2²⁴, exact in float32."""
MAX_TAPS = 64
"""Maximum taps of a causal convolution; models have 4."""


class Lookup:
    """Looks up a program's operands by name; errors say which operand is missing or of the wrong kind."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def columns(self, tensor: str) -> int:
        spec = self.program.tensors.get(tensor)
        if spec is None or len(spec.shape) != 2 or not isinstance(spec.shape[1], int):
            raise InvalidInputError(f"needs a matrix {tensor!r} but finds {described(spec)}.")
        return spec.shape[1]

    def dense(self, name: str, *shape: int | None, f16: bool = False) -> DenseWeight:
        weight = self.program.weights.get(name)
        fits = isinstance(weight, DenseWeight) and len(weight.shape) == len(shape)
        fits = fits and all(n in (None, have) for n, have in zip(shape, weight.shape, strict=True))  # type: ignore[union-attr]
        if not isinstance(weight, DenseWeight) or not fits or (weight.dtype != "f32" and not f16):
            wanted = f"f32{' or f16' if f16 else ''}[{', '.join('any' if n is None else str(n) for n in shape)}]"
            raise InvalidInputError(f"needs weight {name!r} as {wanted} but finds {described(weight)}.")
        return weight

    def table(self, name: str, columns: int | None) -> tuple[int, int]:
        """The shape of an embedding or head matrix: dense, in blocks, or ternary with groups."""
        weight = self.program.weights.get(name)
        if isinstance(weight, BlockWeight):
            rows, width = weight.shape
            if width != (width if columns is None else columns) or width % BLOCK_SIZES[weight.dtype][0]:
                raise InvalidInputError(f"needs weight {name!r} of {columns} columns but finds {described(weight)}.")
            return rows, width
        if not isinstance(weight, TernaryWeight):
            rows, width = self.dense(name, None, columns, f16=True).shape
            return rows, width
        if weight.group is None:
            raise InvalidInputError(
                f"weight {name!r} has one scale; a ternary embedding or head needs scales of groups."
            )
        return self.ternary(name, weight.shape[1] if columns is None else columns).shape

    def ternary(self, name: str, columns: int) -> TernaryWeight:
        weight = self.program.weights.get(name)
        if not isinstance(weight, TernaryWeight) or weight.shape[1] != columns:
            raise InvalidInputError(
                f"needs ternary weight {name!r} of {columns} columns but finds {described(weight)}."
            )
        group = weight.group
        if group is not None and group != columns and (group < 32 or group & (group - 1) or columns % group):
            raise InvalidInputError(
                f"weight {name!r} has groups of {group} columns of {columns}; a group has all of them, or a power of "
                "two from 32 on that divides them."
            )
        if weight.binary and (group is None or columns % 128):
            raise InvalidInputError(
                f"weight {name!r} of {columns} columns is binary, and has {'no ' if group is None else ''}groups; "
                "it needs them, and a multiple of 128 columns."
            )
        return weight

    def stacked(self, names: Sequence[str], columns: int) -> list[TernaryWeight]:
        """Ternary weights that are stacked along N in one product."""
        if _multiple_of_4(columns, "K") > MAX_K:
            raise InvalidInputError(f"K is {columns}; the limit is {MAX_K}.")
        weights = [self.ternary(name, columns) for name in names]
        if len(groups := {weight.group for weight in weights}) > 1:
            raise InvalidInputError(f"its weights have groups of different sizes: {groups}.")
        return weights

    def state(self, name: str, dimensions: int) -> StateSpec:
        state = self.program.states.get(name)
        if state is None or len(state.shape) != dimensions:
            raise InvalidInputError(f"needs a state {name!r} of {dimensions} dimensions but finds {state}.")
        return state

    def transform(self, transform: Transform | None, columns: int) -> None:
        if transform is None:
            return
        block = transform.block
        if block < 4 or block & (block - 1) or columns % block:
            raise InvalidInputError(
                f"its transform has blocks of {block} of {columns} columns; a block is a power of two from 4 on that "
                "divides them."
            )
        if transform.signs is not None:
            self.dense(transform.signs, columns)

    def heads(self, op: RopeAppend | Attention) -> None:
        kv = self.program.kv
        if kv is None or not 0 <= op.layer < kv.layers or (op.kv_heads, op.head_dim) != (kv.kv_heads, kv.head_dim):
            raise InvalidInputError(f"does not fit the cache, {kv}: {op}.")
        if not 0 <= op.table < self.program.limits.tables:
            raise InvalidInputError(f"names block table {op.table} of {self.program.limits.tables}: {op}.")
        if op.heads % op.kv_heads:
            raise InvalidInputError(f"{op.heads} heads are not a multiple of {op.kv_heads} key/value heads.")
        _multiple_of_4(op.head_dim, "head_dim")


def operands(op: Op, look: Lookup) -> Iterator[TensorSpec]:
    """The activation tensors that ``op`` needs; also checks its weights."""
    if isinstance(op, Embed):
        width = look.table(op.table, None)[1]
        look.transform(op.transform, width)
        yield TensorSpec(op.out, "f32", ("M", _multiple_of_4(width, "D")))
    elif isinstance(op, NormQuant | GluNormQuant):
        parts = 1
        if isinstance(op, NormQuant):
            k = look.columns(op.x)
            yield TensorSpec(op.x, "f32", ("M", k))
        else:
            parts = op.parts
            if parts < 1 or (op.clamp is not None and not 0 < op.clamp < math.inf):
                raise InvalidInputError(f"parts is {parts}, clamp {op.clamp}; both must be positive numbers.")
            k = look.columns(op.gate_up) // (2 * parts)
            yield TensorSpec(op.gate_up, "f32", ("M", 2 * k * parts))
        if op.weight is not None:
            look.dense(op.weight, k)
        look.transform(op.transform, k)
        yield TensorSpec(op.out, "i8", ("M", _multiple_of_4(k, "K") * parts))
        yield TensorSpec(op.scale, "f32", ("M",) if parts == 1 else ("M", parts))
    elif isinstance(op, TernaryMatmul):
        k = look.columns(op.x)
        n = sum(weight.shape[0] for weight in look.stacked(op.weights, k))
        yield TensorSpec(op.x, "i8", ("M", k))
        yield TensorSpec(op.scale, "f32", ("M",))
        if op.column is None:
            yield TensorSpec(op.out, "f32", ("M", n))
            return
        columns = look.columns(op.out)
        if not 0 <= _multiple_of_4(op.column, "column") <= columns - n:
            raise InvalidInputError(f"the {n} columns from {op.column} on are not among the {columns} of {op.out!r}.")
        yield TensorSpec(op.out, "f32", ("M", columns))
    elif isinstance(op, RopeAppend | Attention):
        look.heads(op)
        yield TensorSpec(op.qkv, "f32", ("M", (op.heads + 2 * op.kv_heads) * op.head_dim))
        if isinstance(op, Attention):
            if op.window is not None and op.window < 1:
                raise InvalidInputError(f"its window is {op.window}; a token attends at least to itself.")
            yield TensorSpec(op.out, "f32", ("M", op.heads * op.head_dim))
        else:
            positions, pairs = look.dense(op.cos, None, None).shape
            look.dense(op.sin, positions, pairs)
            if not 1 <= pairs <= op.head_dim // 2:
                raise InvalidInputError(f"rotates {pairs} pairs of heads that have {op.head_dim} elements.")
            if (op.q_norm is None) != (op.k_norm is None):
                raise InvalidInputError("either both q_norm and k_norm must be given, or neither.")
            if op.norms_last and op.q_norm is None:
                raise InvalidInputError("norms_last needs q_norm and k_norm.")
            for norm in (op.q_norm, op.k_norm):
                if norm is not None:
                    look.dense(norm, op.head_dim)
    elif isinstance(op, NormRows):
        d = look.columns(op.x)
        look.dense(op.weight, d)
        look.transform(op.transform, d)
        yield TensorSpec(op.x, "f32", ("M", _multiple_of_4(d, "D")))
        out, limits = look.program.tensors.get(op.out), look.program.limits
        input_too = out is not None and out.shape == ("M", d) and limits.max_rows <= limits.max_tokens
        yield TensorSpec(op.out, "f32", ("M" if input_too else "R", d))
    elif isinstance(op, DenseMatmul):
        k = _multiple_of_4(look.columns(op.x), "K")
        n = look.table(op.weight, k)[0]
        if op.x == op.out:
            raise InvalidInputError(f"{op.x!r} is both an operand and the result.")
        yield TensorSpec(op.x, "f32", ("R", k))
        yield TensorSpec(op.out, "f32", ("R", n))
    elif isinstance(op, AddBias):
        n = _multiple_of_4(look.columns(op.x), "N")
        look.dense(op.bias, n)
        yield TensorSpec(op.x, "f32", ("M", n))
    elif isinstance(op, CenterRows):
        d = _multiple_of_4(look.columns(op.x), "D")
        if op.x == op.out:
            raise InvalidInputError(f"{op.x!r} is both the operand and the result.")
        yield TensorSpec(op.x, "f32", ("M", d))
        yield TensorSpec(op.out, "f32", ("M", d))
    elif isinstance(op, NormTokens):
        d = _multiple_of_4(look.columns(op.x), "D")
        look.dense(op.weight, d)
        if op.x == op.out:
            raise InvalidInputError(f"{op.x!r} is both the operand and the result.")
        yield TensorSpec(op.x, "f32", ("M", d))
        yield TensorSpec(op.out, "f32", ("M", d))
    elif isinstance(op, CausalConv | DeltaGates | DeltaRule | GatedQuant):
        yield from _recurrent(op, look)
    elif isinstance(op, Route | ExpertMatmul):
        yield from _experts(op, look)
    elif isinstance(op, Sample):
        yield TensorSpec(op.logits, "f32", ("R", look.columns(op.logits)))
        yield TensorSpec(op.out, "i32", ("R",))
    else:
        x = look.program.tensors.get(op.x)
        shape: tuple[Dim, ...] = x.shape if x is not None else ()
        if len(shape) != 2 or any(isinstance(n, str) for n in shape):
            raise InvalidInputError(f"needs a matrix {op.x!r} of a fixed shape but finds {described(x)}.")
        yield TensorSpec(op.x, "f32", shape)
        yield TensorSpec(op.codes, "i8", shape)
        yield TensorSpec(op.scale, "f32", (1,))


def _recurrent(op: CausalConv | DeltaGates | DeltaRule | GatedQuant, look: Lookup) -> Iterator[TensorSpec]:
    """The same for the operations of recurrent layers."""
    if isinstance(op, CausalConv):
        c = _multiple_of_4(look.columns(op.x), "C")
        taps = look.dense(op.weight, c, None).shape[1]
        if not 2 <= taps <= MAX_TAPS:
            raise InvalidInputError(f"its convolution has {taps} taps; it must have 2 … {MAX_TAPS}.")
        if (shape := look.state(op.state, 2).shape) != (taps - 1, c):
            raise InvalidInputError(f"its state {op.state!r} is {list(shape)}; it must be {[taps - 1, c]}.")
        if op.x == op.out:
            raise InvalidInputError(f"{op.x!r} is both the operand and the result.")
        yield TensorSpec(op.x, "f32", ("M", c))
        yield TensorSpec(op.out, "f32", ("M", c))
    elif isinstance(op, DeltaGates):
        k = _multiple_of_4(look.columns(op.x), "K")
        heads = look.dense(op.rate, None).shape[0]
        look.dense(op.weight, k)
        look.dense(op.bias, heads)
        for matrix in (op.alpha, op.beta):
            look.dense(matrix, heads, k)
        yield TensorSpec(op.x, "f32", ("M", k))
        yield TensorSpec(op.out, "f32", ("M", 2 * heads))
    elif isinstance(op, DeltaRule):
        heads, d_k, d_v = look.state(op.state, 3).shape
        _multiple_of_4(d_k, "d_k")
        _multiple_of_4(d_v, "d_v")
        if op.k_heads < 1 or heads % op.k_heads:
            raise InvalidInputError(f"{heads} value heads are not a multiple of {op.k_heads} key heads.")
        if op.out in (op.qkv, op.gates):
            raise InvalidInputError(f"{op.out!r} is both an operand and the result.")
        yield TensorSpec(op.qkv, "f32", ("M", 2 * op.k_heads * d_k + heads * d_v))
        yield TensorSpec(op.gates, "f32", ("M", 2 * heads))
        yield TensorSpec(op.out, "f32", ("M", heads * d_v))
    else:
        width = _multiple_of_4(look.columns(op.x), "W")
        head = width if op.weight is None else _multiple_of_4(look.dense(op.weight, None).shape[0], "head_dim")
        if width % head or op.untile < 0 or (op.untile and width // head % op.untile):
            raise InvalidInputError(f"{width} columns are not heads of {head}, or not a multiple of {op.untile} heads.")
        look.transform(op.transform, width)
        yield TensorSpec(op.x, "f32", ("M", width))
        yield TensorSpec(op.gate, "f32", ("M", width))
        yield TensorSpec(op.out, "i8", ("M", width))
        yield TensorSpec(op.scale, "f32", ("M",))


def _experts(op: Route | ExpertMatmul, look: Lookup) -> Iterator[TensorSpec]:
    """The same for the operations of mixtures of experts."""
    top = look.columns(op.ids)
    if isinstance(op, Route):
        k = _multiple_of_4(look.columns(op.x), "K")
        look.dense(op.weight, k)
        experts = look.dense(op.router, None, k).shape[0]
        yield TensorSpec(op.x, "f32", ("M", k))
    else:
        experts, width = op.experts, look.columns(op.x)
        rows = 1 if op.shares is None else top
        if width % rows:
            raise InvalidInputError(f"{op.x!r} has {width} columns for {rows} experts of a token.")
        weights = look.stacked(op.weights, width // rows)
        if experts < 1 or any(weight.shape[0] % experts for weight in weights):
            raise InvalidInputError(f"its weights have rows that are no multiple of {experts} experts.")
        n = sum(weight.shape[0] // experts for weight in weights)
        if op.out in (op.x, op.scale, op.ids, op.shares):
            raise InvalidInputError(f"{op.out!r} is both an operand and the result.")
        yield TensorSpec(op.x, "i8", ("M", width))
        yield TensorSpec(op.scale, "f32", ("M",) if rows == 1 else ("M", rows))
        yield TensorSpec(op.out, "f32", ("M", top * n if op.shares is None else n))
    if not 1 <= top <= experts:
        raise InvalidInputError(f"{op.ids!r} has {top} of {experts} experts.")
    yield TensorSpec(op.ids, "i32", ("M", top))
    if op.shares is not None:
        yield TensorSpec(op.shares, "f32", ("M", top))


def _multiple_of_4(n: int, name: str) -> int:
    if n % 4:
        raise InvalidInputError(f"{name} is {n}; it must be a multiple of 4.")
    return n


def described(operand: TensorSpec | Weight | None) -> str:
    if operand is None:
        return "none"
    dtype = "ternary" if isinstance(operand, TernaryWeight) else operand.dtype
    name = f"{operand.name!r} " if isinstance(operand, TensorSpec) else ""
    return f"{name}{dtype}[{', '.join(str(n) for n in operand.shape)}]"
