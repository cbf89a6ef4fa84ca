"""Checks that every device makes of programs and steps, so that kernels see only input that the contract allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal.features import DETERMINISTIC, KV_I8, TERNARY_TABLES
from bitnet.core.hal.probe import DeviceInfo
from bitnet.core.hal.program import (
    NUMPY_DTYPES,
    AddBias,
    Attention,
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
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
)
from bitnet.core.hal.step import MAX_COUNT, HeaderWord, Step

_ADJUST, _LOGPROBS = HeaderWord.ADJUST.value, HeaderWord.LOGPROBS.value
"""Looked up once, because steps are checked thousands of times a second."""
MAX_K = 131_072
"""Maximum K, the row length of a ternary matrix: up to it, every partial sum stays within 2²⁴, exact in float32."""


def check_features(program: Program, info: DeviceInfo) -> None:
    """Refuse a program that needs a feature the device does not list.

    Raises:
        UnsupportedProgramError: The program is deterministic, its cache is ``i8``, or its embedding or head is ternary,
            and the device does not list :data:`~bitnet.core.hal.DETERMINISTIC`, :data:`~bitnet.core.hal.KV_I8` or
            :data:`~bitnet.core.hal.TERNARY_TABLES`.
    """
    if program.deterministic and DETERMINISTIC not in info.features:
        hint = "Leave deterministic out (BITNET_DETERMINISTIC=0), or use a device that 'bitnet devices' lists with it."
        raise UnsupportedProgramError("it cannot compute deterministically.", device=info.name, hint=hint)
    if program.kv is not None and program.kv.dtype == "i8" and KV_I8 not in info.features:
        hint = f"Use kv_dtype f16 (--kv-dtype f16), or a device that 'bitnet devices --json' lists with {KV_I8!r}."
        raise UnsupportedProgramError("it keeps no KV cache in int8.", device=info.name, hint=hint)
    if TERNARY_TABLES not in info.features and any(ternary_table(program, op) for op in program.ops):
        what = f"it lacks the feature {TERNARY_TABLES!r}: it supports only float embeddings and heads."
        raise UnsupportedProgramError(what, device=info.name)


def ternary_table(program: Program, op: Op) -> str | None:
    """The name of the ternary weight of an embedding or a head, if it has one."""
    name = op.table if isinstance(op, Embed) else op.weight if isinstance(op, DenseMatmul) else None
    return name if name is not None and isinstance(program.weights.get(name), TernaryWeight) else None


def check_program(program: Program) -> None:
    """Check that the tensors and weights that each op names exist and fit it, as specified in ``kernels/README.md``.

    Raises:
        InvalidInputError: They do not; the message names the op and the tensor or weight.
    """
    for name, spec in program.tensors.items():
        if name != spec.name or not spec.shape or any(isinstance(n, int) and n < 1 for n in spec.shape):
            raise InvalidInputError(f"program {program.name!r}: tensor {name!r} is declared as {spec}.")
    for index, op in enumerate(program.ops):
        try:
            for wanted in _operands(op, _Lookup(program)):
                have = program.tensors.get(wanted.name)
                if have != wanted:
                    raise InvalidInputError(f"needs tensor {_text(wanted)} but finds {_text(have)}.")
        except InvalidInputError as error:
            where = f"program {program.name!r}, op {index} ({type(op).__name__})"
            raise InvalidInputError(f"{where}: {error.message}") from None


def loaded_ternary(name: str, weight: TernaryWeight) -> TernaryData:
    """Load a ternary weight and check it against its declaration.

    Raises:
        InvalidInputError: The shape or type of the codes or scales is not as declared.
    """
    data = weight.load()
    rows, columns = weight.shape
    shape: tuple[int, ...] = (rows, -(-columns // 128) * 32)
    if data.codes.shape != shape or data.codes.dtype != np.uint8:
        found = f"{data.codes.dtype}{list(data.codes.shape)}"
        raise InvalidInputError(f"weight {name!r} loads as {found}; uint8{list(shape)} was declared.")
    shape, dtype = ((1,), np.float32) if weight.group is None else ((rows, columns // weight.group), np.float16)
    if data.scale.shape != shape or data.scale.dtype != dtype:
        found = f"{data.scale.dtype}{list(data.scale.shape)}"
        raise InvalidInputError(f"weight {name!r} has scales {found}; {dtype.__name__}{list(shape)} was declared.")
    return data


def loaded_dense(name: str, weight: DenseWeight) -> npt.NDArray[Any]:
    """Load a dense weight, check it against its declaration, and return it C-contiguous.

    Raises:
        InvalidInputError: The array's shape or type is not as declared.
    """
    array = weight.load()
    wanted = np.dtype(NUMPY_DTYPES[weight.dtype])
    if array.shape != weight.shape or array.dtype != wanted:
        found = f"{array.dtype}{list(array.shape)}"
        raise InvalidInputError(f"weight {name!r} loads as {found}; {wanted}{list(weight.shape)} was declared.")
    return np.ascontiguousarray(array)


class StepCheck:
    """Checks a program's steps. The bounds are computed once, so that checking a step takes microseconds.

    Attributes:
        samples: Whether the program ends in ``Sample``, so that steps give tokens and ``count`` may exceed 1.
    """

    def __init__(self, program: Program) -> None:
        ops, weights = program.ops, program.weights
        self.limits, self.kv = program.limits, program.kv
        self.samples = bool(ops) and isinstance(ops[-1], Sample)
        self._vocab = min((weights[op.table].shape[0] for op in ops if isinstance(op, Embed)), default=2**31)
        self._positions = min((weights[op.cos].shape[0] for op in ops if isinstance(op, RopeAppend)), default=2**31)
        if self.kv is not None:
            self._positions = min(self._positions, self.limits.max_blocks * self.kv.block_size)

    def __call__(self, step: Step, count: int = 1, done: int = 0) -> None:
        """Check a step that will run ``count`` times, after it has run ``done`` times.

        Raises:
            InvalidInputError: ``count`` is not in 1 … :data:`~bitnet.core.hal.MAX_COUNT`, or the step was made for
                other limits, names a token, block or position that does not exist, or has not exactly one token and one
                row per sequence although it runs more than once.
        """
        if step.layout.limits != self.limits:
            raise InvalidInputError(f"the step was made for {step.layout.limits}, but the program has {self.limits}.")
        data, at, (m, s, r) = step.data, step.layout.offsets, (step.tokens, step.seqs, step.rows)
        if m == 0:
            raise InvalidInputError("the step has no tokens.")
        # Compared as unsigned numbers, negative values are too large as well.
        words = data.view(np.uint32)
        if words[at["tokens"] : at["tokens"] + m].max() >= self._vocab:
            raise InvalidInputError(f"the step has a token outside the vocabulary, 0 to {self._vocab - 1}.")
        if not 1 <= count <= MAX_COUNT:
            raise InvalidInputError(f"count is {count}; it must be in 1 … {MAX_COUNT}.")
        passes = done + count
        if passes > 1:
            rows = data[at["rows"] : at["rows"] + r]
            if not self.samples or m != s or not np.array_equal(rows, np.arange(s)):
                raise InvalidInputError(
                    f"{passes} passes need a program ending in Sample, and one token and one row per sequence."
                )
        if data[_LOGPROBS] and not self.samples:
            raise InvalidInputError("the step asks for log-probabilities of tokens, but the program samples none.")
        if data[_ADJUST]:
            slots = data[at["slot"] : at["slot"] + r]
            named = slots[slots != 0]
            if (words[at["slot"] : at["slot"] + r] > self.limits.slots).any() or len(np.unique(named)) < len(named):
                raise InvalidInputError(
                    f"the step names slots {(named - 1).tolist()}; each must be < {self.limits.slots} and named once."
                )
        longest = int(data[at["seq_len"] : at["seq_len"] + s].max()) + passes - 1
        if longest > self._positions:
            raise InvalidInputError(f"the step reaches position {longest - 1}; the last is {self._positions - 1}.")
        if self.kv is not None:
            # Entries past a sequence's blocks are 0, which is a valid block.
            table = words[at["block_table"] : at["block_table"] + s * self.limits.max_blocks]
            if table.max() >= self.kv.num_blocks:
                raise InvalidInputError(f"the step has a block outside the cache, 0 to {self.kv.num_blocks - 1}.")


class SlotCheck:
    """Checks what is written to a program's slots.

    Attributes:
        vocabulary: Columns of the logits that the program samples from; 0 if it samples nothing.
    """

    def __init__(self, program: Program) -> None:
        last = program.ops[-1] if program.ops else None
        shape = program.tensors[last.logits].shape if isinstance(last, Sample) else (0, 0)
        assert isinstance(shape[1], int)
        self.vocabulary, self._slots = shape[1], program.limits.slots

    def __call__(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        """Check the new contents of a slot.

        Raises:
            InvalidInputError: There is no such slot, or an array has another type or shape.
        """
        if not self.vocabulary:
            raise InvalidInputError("the program samples nothing, so it has no slots.")
        if not 0 <= slot < self._slots:
            raise InvalidInputError(f"slot is {slot}; it must be in 0 … {self._slots - 1}.")
        for name, array, dtype in (("marks", marks, np.int32), ("biases", biases, np.float32)):
            if array.shape != (self.vocabulary,) or array.dtype != dtype:
                wanted = f"{np.dtype(dtype)}[{self.vocabulary}]"
                raise InvalidInputError(f"{name} is {array.dtype}{list(array.shape)}; it must be {wanted}.")


class TensorCheck:
    """Checks writes to and reads from a program's tensors."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._most = {"M": program.limits.max_tokens, "R": program.limits.max_rows}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, with room for the largest step.

        Raises:
            InvalidInputError: There is no such tensor.
        """
        if name not in self._program.tensors:
            known = ", ".join(self._program.tensors)
            raise InvalidInputError(f"program {self._program.name!r} has no tensor {name!r}; it has {known}.")
        return tuple(self._most[n] if isinstance(n, str) else n for n in self._program.tensors[name].shape)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Check an array that will fill a tensor, or the first rows of a tensor whose number of rows varies.

        Raises:
            InvalidInputError: There is no such tensor, or the array has another type or shape.
        """
        shape, spec = self.shape(name), self._program.tensors[name]
        dtype, varies = NUMPY_DTYPES[spec.dtype], isinstance(spec.shape[0], str)
        fits = array.shape[1:] == shape[1:] and (len(array) <= shape[0] if varies else array.shape == shape)
        if not fits or array.dtype != dtype:
            have, given = f"{dtype}{list(shape)}", f"{array.dtype}{list(array.shape)}"
            raise InvalidInputError(f"tensor {name!r} is {have}; {given} does not fit it.")

    def read(self, name: str, rows: int | None) -> tuple[int, ...]:
        """The shape of a tensor's first ``rows`` rows; None: of all rows.

        Raises:
            InvalidInputError: There is no such tensor, or it has fewer rows.
        """
        shape = self.shape(name)
        if rows is None:
            return shape
        if not 0 <= rows <= shape[0]:
            raise InvalidInputError(f"tensor {name!r} has {shape[0]} rows, but {rows} were requested.")
        return rows, *shape[1:]


class _Lookup:
    """Looks up a program's operands by name; errors say which operand is missing or of the wrong kind."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def columns(self, tensor: str) -> int:
        spec = self.program.tensors.get(tensor)
        if spec is None or len(spec.shape) != 2 or not isinstance(spec.shape[1], int):
            raise InvalidInputError(f"needs a matrix {tensor!r} but finds {_text(spec)}.")
        return spec.shape[1]

    def dense(self, name: str, *shape: int | None, f16: bool = False) -> DenseWeight:
        weight = self.program.weights.get(name)
        fits = isinstance(weight, DenseWeight) and len(weight.shape) == len(shape)
        fits = fits and all(n in (None, have) for n, have in zip(shape, weight.shape, strict=True))  # type: ignore[union-attr]
        if not isinstance(weight, DenseWeight) or not fits or (weight.dtype != "f32" and not f16):
            wanted = f"f32{' or f16' if f16 else ''}[{', '.join('any' if n is None else str(n) for n in shape)}]"
            raise InvalidInputError(f"needs weight {name!r} as {wanted} but finds {_text(weight)}.")
        return weight

    def table(self, name: str, columns: int | None) -> tuple[int, int]:
        """The shape of an embedding or head matrix: dense, or ternary with groups."""
        weight = self.program.weights.get(name)
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
            raise InvalidInputError(f"needs ternary weight {name!r} of {columns} columns but finds {_text(weight)}.")
        group = weight.group
        if group is not None and group != columns and (group < 32 or group & (group - 1) or columns % group):
            raise InvalidInputError(
                f"weight {name!r} has groups of {group} columns of {columns}; a group has all of them, or a power of "
                "two from 32 on that divides them."
            )
        return weight

    def heads(self, op: RopeAppend | Attention) -> None:
        kv = self.program.kv
        if kv is None or not 0 <= op.layer < kv.layers or (op.kv_heads, op.head_dim) != (kv.kv_heads, kv.head_dim):
            raise InvalidInputError(f"does not fit the cache, {kv}: {op}.")
        if op.heads % op.kv_heads:
            raise InvalidInputError(f"{op.heads} heads are not a multiple of {op.kv_heads} key/value heads.")
        _multiple_of_4(op.head_dim, "head_dim")


def _operands(op: Op, look: _Lookup) -> Iterator[TensorSpec]:
    """The activation tensors that ``op`` needs; also checks its weights."""
    if isinstance(op, Embed):
        width = look.table(op.table, None)[1]
        yield TensorSpec(op.out, "f32", ("M", _multiple_of_4(width, "D")))
    elif isinstance(op, NormQuant | GluNormQuant):
        if isinstance(op, NormQuant):
            k = look.columns(op.x)
            yield TensorSpec(op.x, "f32", ("M", k))
        else:
            k = look.columns(op.gate_up) // 2
            yield TensorSpec(op.gate_up, "f32", ("M", 2 * k))
        if op.weight is not None:
            look.dense(op.weight, k)
        yield TensorSpec(op.out, "i8", ("M", _multiple_of_4(k, "K")))
        yield TensorSpec(op.scale, "f32", ("M",))
    elif isinstance(op, TernaryMatmul):
        k = _multiple_of_4(look.columns(op.x), "K")
        if k > MAX_K:
            raise InvalidInputError(f"K is {k}; the limit is {MAX_K}.")
        weights = [look.ternary(name, k) for name in op.weights]
        if len(groups := {weight.group for weight in weights}) > 1:
            raise InvalidInputError(f"its weights have groups of different sizes: {groups}.")
        n = sum(weight.shape[0] for weight in weights)
        yield TensorSpec(op.x, "i8", ("M", k))
        yield TensorSpec(op.scale, "f32", ("M",))
        yield TensorSpec(op.out, "f32", ("M", n))
    elif isinstance(op, RopeAppend | Attention):
        look.heads(op)
        yield TensorSpec(op.qkv, "f32", ("M", (op.heads + 2 * op.kv_heads) * op.head_dim))
        if isinstance(op, Attention):
            yield TensorSpec(op.out, "f32", ("M", op.heads * op.head_dim))
        else:
            positions = look.dense(op.cos, None, op.head_dim // 2).shape[0]
            look.dense(op.sin, positions, op.head_dim // 2)
            if (op.q_norm is None) != (op.k_norm is None):
                raise InvalidInputError("either both q_norm and k_norm must be given, or neither.")
            for norm in (op.q_norm, op.k_norm):
                if norm is not None:
                    look.dense(norm, op.head_dim)
    elif isinstance(op, NormRows):
        d = look.columns(op.x)
        look.dense(op.weight, d)
        yield TensorSpec(op.x, "f32", ("M", _multiple_of_4(d, "D")))
        yield TensorSpec(op.out, "f32", ("R", d))
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
    elif isinstance(op, Sample):
        yield TensorSpec(op.logits, "f32", ("R", look.columns(op.logits)))
        yield TensorSpec(op.out, "i32", ("R",))
    else:
        x = look.program.tensors.get(op.x)
        shape: tuple[Dim, ...] = x.shape if x is not None else ()
        if len(shape) != 2 or any(isinstance(n, str) for n in shape):
            raise InvalidInputError(f"needs a matrix {op.x!r} of a fixed shape but finds {_text(x)}.")
        yield TensorSpec(op.x, "f32", shape)
        yield TensorSpec(op.codes, "i8", shape)
        yield TensorSpec(op.scale, "f32", (1,))


def _multiple_of_4(n: int, name: str) -> int:
    if n % 4:
        raise InvalidInputError(f"{name} is {n}; it must be a multiple of 4.")
    return n


def _text(operand: TensorSpec | DenseWeight | TernaryWeight | None) -> str:
    if operand is None:
        return "none"
    dtype = "ternary" if isinstance(operand, TernaryWeight) else operand.dtype
    name = f"{operand.name!r} " if isinstance(operand, TensorSpec) else ""
    return f"{name}{dtype}[{', '.join(str(n) for n in operand.shape)}]"
