"""Checks that every device makes of programs and steps, so that kernels see only input that the contract allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError, UnsupportedProgramError
from bitnet.core.hal.embedders import NormTokens
from bitnet.core.hal.experts import ExpertMatmul, Route
from bitnet.core.hal.features import (
    BLOCK_TABLES,
    DETERMINISTIC,
    EMBEDDERS,
    EXPERTS,
    KV_I8,
    ROTATED_NORMS,
    STATES,
    TERNARY_TABLES,
    WINDOWS,
)
from bitnet.core.hal.operands import Lookup, described, operands
from bitnet.core.hal.probe import DeviceInfo
from bitnet.core.hal.program import (
    NUMPY_DTYPES,
    Attention,
    BlockWeight,
    DenseMatmul,
    DenseWeight,
    Embed,
    GluNormQuant,
    Op,
    Program,
    RopeAppend,
    Sample,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
)
from bitnet.core.hal.recurrent import CausalConv, DeltaRule
from bitnet.core.hal.step import MAX_COUNT, HeaderWord, Step

_ADJUST, _LOGPROBS = HeaderWord.ADJUST.value, HeaderWord.LOGPROBS.value
"""Looked up once, because steps are checked thousands of times a second."""


def check_features(program: Program, info: DeviceInfo) -> None:
    """Refuse a program that needs a feature the device does not list.

    Raises:
        UnsupportedProgramError: The program is deterministic, its cache is ``i8``, it has states or transforms, experts
            or windows, operations of models for embeddings, or norms of heads after their rotation, or its embedding or
            head is ternary or in blocks, and the device does not list :data:`~bitnet.core.hal.DETERMINISTIC`,
            :data:`~bitnet.core.hal.KV_I8`, :data:`~bitnet.core.hal.STATES`, :data:`~bitnet.core.hal.EXPERTS`,
            :data:`~bitnet.core.hal.WINDOWS`, :data:`~bitnet.core.hal.EMBEDDERS`,
            :data:`~bitnet.core.hal.ROTATED_NORMS`, :data:`~bitnet.core.hal.TERNARY_TABLES` or
            :data:`~bitnet.core.hal.BLOCK_TABLES`.
    """
    if program.deterministic and DETERMINISTIC not in info.features:
        hint = "Leave deterministic out (BITNET_DETERMINISTIC=0), or use a device that 'bitnet devices' lists with it."
        raise UnsupportedProgramError("it cannot compute deterministically.", device=info.name, hint=hint)
    if program.kv is not None and program.kv.dtype == "i8" and KV_I8 not in info.features:
        hint = f"Use kv_dtype f16 (--kv-dtype f16), or a device that 'bitnet devices --json' lists with {KV_I8!r}."
        raise UnsupportedProgramError("it keeps no KV cache in int8.", device=info.name, hint=hint)
    transforms = any(getattr(op, "transform", None) is not None for op in program.ops)
    hint = "Use --device cpu, or another backend."
    for needed, feature, what in (
        (bool(program.states) or transforms, STATES, "recurrent layers and transforms"),
        (any(map(_of_experts, program.ops)), EXPERTS, "mixtures of experts"),
        (program.limits.tables > 1 or any(map(_slides, program.ops)), WINDOWS, "sliding windows"),
        (any(map(_of_embedders, program.ops)), EMBEDDERS, "norms before each product or after each sub-layer"),
        (any(map(_norms_last, program.ops)), ROTATED_NORMS, "norms of heads after the rotary embedding"),
    ):
        if needed and feature not in info.features:
            raise UnsupportedProgramError(f"it computes no {what}.", device=info.name, hint=hint)
    if TERNARY_TABLES not in info.features and any(ternary_table(program, op) for op in program.ops):
        what = f"it lacks the feature {TERNARY_TABLES!r}: it supports only float embeddings and heads."
        raise UnsupportedProgramError(what, device=info.name)
    if BLOCK_TABLES not in info.features and any(isinstance(w, BlockWeight) for w in program.weights.values()):
        what = f"it lacks the feature {BLOCK_TABLES!r}: it supports no embeddings and heads in blocks."
        raise UnsupportedProgramError(what, device=info.name)


def _slides(op: Op) -> bool:
    """Whether it attends to a window."""
    return isinstance(op, Attention) and op.window is not None


def _norms_last(op: Op) -> bool:
    """Whether it norms heads after their rotation."""
    return isinstance(op, RopeAppend) and op.norms_last


def _of_experts(op: Op) -> bool:
    """Whether only models with experts have such an operation."""
    several = isinstance(op, GluNormQuant) and (op.parts > 1 or op.clamp is not None)
    return several or isinstance(op, Route | ExpertMatmul)


def _of_embedders(op: Op) -> bool:
    """Whether only models for embeddings have such an operation."""
    if isinstance(op, TernaryMatmul):
        return op.column is not None
    return isinstance(op, NormTokens) or (isinstance(op, GluNormQuant) and op.activation == "gelu_tanh")


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
    if any(not spec.shape or min(*spec.shape, spec.entries) < 1 for spec in program.states.values()):
        raise InvalidInputError(f"program {program.name!r}: a state is declared as {dict(program.states)}.")
    if len({spec.entries for spec in program.states.values()}) > 1:
        raise InvalidInputError(f"program {program.name!r}: its states have different numbers of entries.")
    named = [op.state for op in program.ops if isinstance(op, CausalConv | DeltaRule)]
    if len(set(named)) < len(named):
        raise InvalidInputError(f"program {program.name!r}: two operations share a state: {named}.")
    for index, op in enumerate(program.ops):
        try:
            for wanted in operands(op, Lookup(program)):
                have = program.tensors.get(wanted.name)
                if have != wanted:
                    raise InvalidInputError(f"needs tensor {described(wanted)} but finds {described(have)}.")
        except InvalidInputError as error:
            where = f"program {program.name!r}, op {index} ({type(op).__name__})"
            raise InvalidInputError(f"{where}: {error.message}") from None


def loaded_ternary(name: str, weight: TernaryWeight) -> TernaryData:
    """Load a ternary weight and check it against its declaration.

    Raises:
        InvalidInputError: The shape or type of the codes or scales is not as declared.
    """
    return _checked(name, weight, weight.load(), weight.shape[0])


def loaded_rows(name: str, weight: TernaryWeight, rows: int) -> Iterator[tuple[int, TernaryData]]:
    """Load at most so many rows of a ternary weight at a time, each with the number of its first row, and release their
    pages; all rows at once where the weight cannot be loaded in parts. Errors are those of :func:`loaded_ternary`.
    """
    if weight.rows is None:
        yield 0, loaded_ternary(name, weight)
    else:
        for first in range(0, weight.shape[0], rows):
            last = min(first + rows, weight.shape[0])
            yield first, _checked(name, weight, weight.rows(first, last), last - first)
            weight.release()
    weight.release()


def _checked(name: str, weight: TernaryWeight, data: TernaryData, rows: int) -> TernaryData:
    columns = weight.shape[1]
    shape: tuple[int, ...] = (rows, -(-columns // 128) * 32)
    if data.codes.shape != shape or data.codes.dtype != np.uint8:
        found = f"{data.codes.dtype}{list(data.codes.shape)}"
        raise InvalidInputError(f"weight {name!r} loads as {found}; uint8{list(shape)} was declared.")
    shape, dtype = ((1,), np.float32) if weight.group is None else ((rows, columns // weight.group), np.float16)
    if data.scale.shape != shape or data.scale.dtype != dtype:
        found = f"{data.scale.dtype}{list(data.scale.shape)}"
        raise InvalidInputError(f"weight {name!r} has scales {found}; {dtype.__name__}{list(shape)} was declared.")
    if weight.binary and (data.codes & 0x55).any():
        raise InvalidInputError(f"weight {name!r} has weights besides −1 and +1; a binary matrix was declared.")
    return data


def loaded_dense(name: str, weight: DenseWeight | BlockWeight) -> npt.NDArray[Any]:
    """Load a dense weight, or one in blocks, check it against its declaration, and return it C-contiguous.

    Raises:
        InvalidInputError: The array's shape or type is not as declared.
    """
    array = weight.load()
    if isinstance(weight, BlockWeight):
        shape: tuple[int, ...] = (weight.shape[0], weight.row_bytes)
        wanted = np.dtype(np.uint8)
    else:
        shape, wanted = weight.shape, np.dtype(NUMPY_DTYPES[weight.dtype])
    if array.shape != shape or array.dtype != wanted:
        found = f"{array.dtype}{list(array.shape)}"
        raise InvalidInputError(f"weight {name!r} loads as {found}; {wanted}{list(shape)} was declared.")
    return np.ascontiguousarray(array)


class StepCheck:
    """Checks a program's steps. The bounds are computed once, so that checking a step takes microseconds.

    Attributes:
        samples: Whether the program ends in ``Sample``, so that steps give tokens and ``count`` may exceed 1.
    """

    def __init__(self, program: Program) -> None:
        ops, weights = program.ops, program.weights
        self.limits, self.kv, self._entries = program.limits, program.kv, program.state_entries
        self.samples = bool(ops) and isinstance(ops[-1], Sample)
        self._vocab = min((weights[op.table].shape[0] for op in ops if isinstance(op, Embed)), default=2**31)
        self._positions = min((weights[op.cos].shape[0] for op in ops if isinstance(op, RopeAppend)), default=2**31)
        if self.kv is not None:
            self._positions = min(self._positions, self.limits.max_blocks * self.kv.block_size)

    def __call__(self, step: Step, count: int = 1, done: int = 0) -> None:
        """Check a step that will run ``count`` times, after it has run ``done`` times.

        Raises:
            InvalidInputError: ``count`` is not in 1 … :data:`~bitnet.core.hal.MAX_COUNT`, or the step was made for
                other limits, names a token, block, position or state entry that does not exist, has not exactly one
                token and one row per sequence although it runs more than once, or writes an entry that another sequence
                reads or writes.
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
        if self._entries:
            self._check_states(step)
        if self.kv is not None:
            # Entries past a sequence's blocks are 0, which is a valid block.
            width, tables = self.limits.max_blocks, self.limits.tables
            size = self.limits.max_seqs * width
            for begin in range(at["block_table"], at["block_table"] + tables * size, size):
                if words[begin : begin + s * width].max() >= self.kv.num_blocks:
                    raise InvalidInputError(f"the step has a block outside the cache, 0 to {self.kv.num_blocks - 1}.")

    def _check_states(self, step: Step) -> None:
        data, at, s = step.data, step.layout.offsets, step.seqs
        read, written = (data[at[name] : at[name] + s].tolist() for name in ("state_from", "state_to"))
        if min(read) < -1 or min(written) < 0 or max(*read, *written) >= self._entries:
            raise InvalidInputError(
                f"the step reads the state entries {read} and writes {written}; they must be < {self._entries}."
            )
        writers = {entry: i for i, entry in enumerate(written)}
        if len(writers) < s or any(writers.get(entry, i) != i for i, entry in enumerate(read)):
            raise InvalidInputError(
                f"the step reads the state entries {read} and writes {written}; only a sequence itself may read the "
                "entry that it writes."
            )


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
