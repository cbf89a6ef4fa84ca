"""Lowers a program for the native library: repacks weights, lays out tensors and KV cache, fills in C structures.

Long, because each operation of a program has a method here, and all fill in one structure.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.cpu import native, structures
from bitnet.core.cpu.compact_head import CompactHead
from bitnet.core.cpu.memory import Arena, aligned, view
from bitnet.core.cpu.operations import Operands, PackedMatrix, lower
from bitnet.core.cpu.structures import OpKind
from bitnet.core.errors import InvalidInputError, OutOfMemoryError
from bitnet.core.hal import (
    AddBias,
    BlockWeight,
    CausalConv,
    DeltaGates,
    DeltaRule,
    DenseMatmul,
    DenseWeight,
    Embed,
    ExpertMatmul,
    GluNormQuant,
    NormQuant,
    NormRows,
    NormTokens,
    Program,
    Route,
    Sample,
    StepLayout,
    TernaryMatmul,
    TernaryWeight,
    Weight,
)
from bitnet.core.hal.check import SlotCheck, loaded_dense, loaded_rows
from bitnet.core.hal.program import NUMPY_DTYPES
from bitnet.core.support.mapped import is_mapped

HEAD_CHUNK = 64
"""Rows of a head that share one maximum step and norm: ``HEAD_CHUNK`` in ``kernels/cpu/head_layout.h``."""
LANES = 16
"""Positions and elements of the cache are padded to this: the widest vector of f32."""
DELTA_COLUMNS = 64
"""Columns of a block of a state of ``delta_rule``: ``DELTA_COLUMNS`` in ``kernels/cpu/delta_rule.h``."""
PAGE = 4096
"""Bytes of a small page."""
PANELS = 192
"""Rows that are whole panels at every level: a multiple of every ``PANEL_ROWS`` of ``kernels/cpu/tile_layout.h``."""
PACKED_AT_A_TIME = 1 << 24
"""Weights of a matrix that are decoded and packed at a time, where its file allows it: 4 MB of codes."""
UNPACKED_TOKENS = 48
"""Maximum tokens of a step that packs matrices while it multiplies: no level then packs a panel for more than one item
of work (``ITEM_TOKENS`` in ``kernels/cpu/tile_layout.h``)."""


def padded(n: int) -> int:
    return -(-n // LANES) * LANES


_WEIGHTED = NormQuant, GluNormQuant, NormRows, NormTokens, DenseMatmul
"""Operations with a weight, or none, called ``weight``."""


class NativeDevice(NamedTuple):
    """The parts of a device that its executables use."""

    name: str
    library: ctypes.CDLL
    level: native.Handle
    pool: native.Handle
    threads: int


class LoweredProgram:
    """A program in the form that the native library runs, and everything an executable must keep alive for it.

    Args:
        keep: As for :meth:`~bitnet.core.hal.Device.compile`: all logits are exact.

    Attributes:
        head: The matrix whose logits only the program's sampling needs, if there is one.
        head_bytes: Bytes of its compact form.
        head_waits: Whether :meth:`pack_head` is still to be called before a step reads that form. It is where a program
            has one sequence: its first text then need not wait for it.
        arrays: The activation tensors by name, as views; rows are padded to whole cache lines in memory.
        marks, biases: Contents of the slots, ``[slots, V]``, as views.
        program: The C structure that the native library runs. It points into the arenas and ``self``, which must
            outlive it.
        used: Bytes of weights, KV cache and activations, without weights that stay in their mapped file.

    Raises:
        OutOfMemoryError: The weights, the cache or the activations do not fit.
        InvalidInputError: A weight does not load as declared.
    """

    MAX_COPIED: ClassVar[int] = 1 << 20
    """Maximum bytes of a dense weight to copy; larger ones are read from their mapped file."""

    def __init__(self, program: Program, native_device: NativeDevice, *, keep: bool = False) -> None:
        self._source, self._native = program, native_device
        self._library = native_device.library
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.head = None if keep else CompactHead.of(program)
        self.head_bytes = 0
        self.head_waits = False
        self._arenas: list[Arena] = []
        self._kept: list[object] = []  # kept alive because native structures point to them
        self._waiting: dict[str, int] = {}  # addresses for matrices that are still to be packed
        try:
            self._lay_out_cache()
            self._lay_out_tensors()
            self._lay_out_states()
            self._lay_out_slots()
            self._load_weights()
            lowered = self._lower()
            ops = (structures.Op * len(lowered))(*lowered)
            self.program = self._program(self._keep(ops), len(ops))
        except BaseException:
            self.close()
            raise

    @property
    def used(self) -> int:
        return sum(arena.size for arena in self._arenas)

    @property
    def weight_bytes(self) -> int:
        """Packed bytes of weights that a token reads: all but those of experts that it does not choose."""
        size = self.head_bytes
        for op in self._source.ops:
            if self.head is not None and isinstance(op, DenseMatmul) and op.out == self.head.logits:
                continue  # its compact form
            if isinstance(op, TernaryMatmul):
                size += sum(sum(self._packed_bytes(name)) for name in op.weights)
            elif isinstance(op, ExpertMatmul):
                top = self._matrices[op.ids].columns
                size += sum(sum(self._packed_bytes(name)) for name in op.weights) * top // op.experts
            elif isinstance(op, Route):
                size += self._dense_bytes(op.weight) + self._dense_bytes(op.router)
            elif isinstance(op, AddBias):
                size += self._dense_bytes(op.bias)
            elif isinstance(op, DeltaGates):
                size += sum(map(self._dense_bytes, (op.weight, op.alpha, op.beta)))
            elif isinstance(op, CausalConv):
                size += self._dense_bytes(op.weight)
            elif isinstance(op, _WEIGHTED) and op.weight is not None:
                size += (
                    sum(self._packed_bytes(op.weight)) if op.weight in self._ternary else self._dense_bytes(op.weight)
                )
        return size

    @property
    def head_row_bytes(self) -> int:
        """Bytes of a row of the head, which is read in full if the compact form cannot decide; 0 without a compact
        head."""
        if self.head is None:
            return 0
        weight = self._source.weights[self.head.weight]
        return self._dense_bytes(self.head.weight) // weight.shape[0]

    def _dense_bytes(self, name: str) -> int:
        weight = self._source.weights[name]
        if isinstance(weight, BlockWeight):
            return weight.shape[0] * weight.row_bytes
        assert isinstance(weight, DenseWeight)
        return int(np.prod(weight.shape)) * NUMPY_DTYPES[weight.dtype].itemsize

    def close(self) -> None:
        """Free all memory."""
        self.arrays.clear()
        self.marks, self.biases = np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self._kept.clear()

    def _arena(self, size: int, what: str) -> Arena:
        arena = Arena(self._library, size, device=self._native.name, what=what)
        self._arenas.append(arena)
        return arena

    def _keep(self, structures: ctypes.Array[Any]) -> int:
        """Keep structures alive as long as the executable, and return their address."""
        self._kept.append(structures)
        return ctypes.addressof(structures)

    def _copy(self, address: int, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def _view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], row_stride: int) -> npt.NDArray[Any]:
        return view(address, shape, dtype, row_stride)

    def _lay_out_cache(self) -> None:
        kv = self._source.kv
        self._kv = structures.KV()
        self._layers: list[structures.KVLayer] = []
        if kv is None:
            return
        item, positions, elements = NUMPY_DTYPES[kv.dtype].itemsize, padded(kv.block_size), padded(kv.head_dim)
        scales = 4 * positions if kv.dtype == "i8" else 0
        k_head, v_head = kv.head_dim * positions + scales, kv.block_size * elements + scales
        keys, values = aligned(kv.kv_heads * k_head * item), aligned(kv.kv_heads * v_head * item)
        # An odd number of pages, so that a layer's blocks do not all map to the same cache lines.
        block = (-(-kv.layers * (keys + values) // PAGE) | 1) * PAGE
        kind = structures.KV_TYPES.index(kv.dtype)
        self._kv = structures.KV(kind, kv.block_size, positions, elements, block // item, k_head, v_head)
        first = self._arena(kv.num_blocks * block, "the KV cache").take(kv.num_blocks * block)
        layers = range(first, first + kv.layers * (keys + values), keys + values)
        self._layers = [structures.KVLayer(layer, layer + keys) for layer in layers]

    def _lay_out_states(self) -> None:
        """Allocate the states; the system commits an entry's memory when it is written."""
        self._states: dict[str, structures.State] = {}
        for op in self._source.ops:
            if isinstance(op, CausalConv | DeltaRule):
                spec = self._source.states[op.state]
                size = math.prod(spec.shape)
                if isinstance(op, DeltaRule):  # columns in blocks, as kernels/cpu/delta_rule.h says
                    heads, d_k, d_v = spec.shape
                    columns = padded(d_v) if d_v <= DELTA_COLUMNS else -(-d_v // DELTA_COLUMNS) * DELTA_COLUMNS
                    size = heads * d_k * columns
                entry = aligned(4 * size)
                where = self._arena(entry * spec.entries, "the states").take(entry * spec.entries)
                self._states[op.state] = structures.State(where, entry // 4)

    def _lay_out_tensors(self) -> None:
        limits = self._source.limits
        most = {"M": limits.max_tokens, "R": limits.max_rows}
        plan = []
        for name, spec in self._source.tensors.items():
            shape = tuple(most[n] if isinstance(n, str) else n for n in spec.shape)
            if len(shape) > 2:
                raise InvalidInputError(f"tensor {name!r} has {len(shape)} dimensions; the CPU supports one or two.")
            dtype = NUMPY_DTYPES[spec.dtype]
            row = aligned(shape[1] * dtype.itemsize) if len(shape) == 2 else dtype.itemsize
            plan.append((name, shape, dtype, row))
        arena = self._arena(sum(aligned(shape[0] * row) for _, shape, _, row in plan), "the activations")
        self._matrices: dict[str, structures.Matrix] = {}
        for name, shape, dtype, row in plan:
            address = arena.take(shape[0] * row)
            self.arrays[name] = self._view(address, shape, dtype, row)
            self._matrices[name] = structures.Matrix(address, shape[-1], row // dtype.itemsize)

    def _lay_out_slots(self) -> None:
        """Allocate marks and biases; the system commits their memory when they are written."""
        slots, vocabulary = self._source.limits.slots, SlotCheck(self._source).vocabulary
        arena = self._arena(2 * aligned(4 * slots * vocabulary), "the slots of penalties and biases")
        self._slots = arena.take(4 * slots * vocabulary), arena.take(4 * slots * vocabulary)
        self.marks, self.biases = (
            self._view(address, (slots, vocabulary), np.dtype(dtype), 4 * vocabulary)
            for address, dtype in zip(self._slots, (np.int32, np.float32), strict=True)
        )

    def _load_weights(self) -> None:
        self._dense: dict[str, int] = {}
        self._ternary: dict[str, PackedMatrix] = {}
        weights = self._source.weights
        products = [op for op in self._source.ops if isinstance(op, TernaryMatmul | ExpertMatmul)]
        used = dict.fromkeys(name for op in products for name in op.weights)
        self._binary = {
            name
            for op in products
            if isinstance(op, TernaryMatmul) and self._in_one_bit([weights[name] for name in op.weights])
            for name in op.weights
        }
        self._experts = {name: op.experts for op in products if isinstance(op, ExpertMatmul) for name in op.weights}
        multiplied = {name for op in products if isinstance(op, TernaryMatmul) for name in op.weights} - self._binary
        waits = self._source.limits.max_seqs == 1 and isinstance(self._source.ops[-1], Sample)
        tables = {
            op.table if isinstance(op, Embed) else op.weight
            for op in self._source.ops
            if isinstance(op, Embed | DenseMatmul)
        }
        ternary = sorted(name for name in tables if isinstance(weights[name], TernaryWeight))
        heads = {op.weight for op in self._source.ops if isinstance(op, DenseMatmul)}
        self._blocks = {name: found for name in ternary if name not in heads and (found := self._in_place(name))}
        used |= dict.fromkeys(name for name in ternary if name not in self._blocks)
        packed = {name: self._packed_bytes(name) for name in used}
        dense = {name: weight for name, weight in weights.items() if not isinstance(weight, TernaryWeight)}
        copied = {name: size for name in dense if (size := self._dense_bytes(name)) <= self.MAX_COPIED}
        sizes = [size for both in packed.values() for size in both]
        arena = self._arena(sum(map(aligned, (*sizes, *copied.values()))), "the weights")
        for name in used:
            weight = weights[name]
            assert isinstance(weight, TernaryWeight)
            codes, scales = packed[name]
            places = arena.take(codes), arena.take(scales) if scales else None
            self._ternary[name] = self._pack(name, weight, *places, wait=waits and name in multiplied)
        transposed = {op.weight for op in self._source.ops if isinstance(op, CausalConv)}
        for name, matrix in dense.items():
            where = arena.take(copied[name]) if name in copied else None
            turned = _transposed(name, matrix) if isinstance(matrix, DenseWeight) and name in transposed else matrix
            self._dense[name] = self._place(name, turned, where)

    def _in_one_bit(self, weights: Sequence[Weight]) -> bool:
        """Whether the level takes the weights of a product in one bit each."""
        binary = all(isinstance(weight, TernaryWeight) and weight.binary for weight in weights)
        return binary and bool(self._library.bitnet_one_bit(self._native.level))

    def _packed_bytes(self, name: str) -> tuple[int, int]:
        """Packed bytes of a matrix's codes and of its scales; those of all experts, each of which is packed apart."""
        experts = self._experts.get(name, 1)
        codes, scales = self._packed_rows(name, self._source.weights[name].shape[0] // experts)
        return experts * codes, experts * scales

    def _packed_rows(self, name: str, rows: int) -> tuple[int, int]:
        """The same for the first rows of a matrix."""
        weight, library, level = self._source.weights[name], self._library, self._native.level
        assert isinstance(weight, TernaryWeight)
        shape = rows, weight.shape[1]
        scales = 0 if weight.group is None else library.bitnet_packed_scales(level, *shape, weight.group)
        return library.bitnet_packed_bytes(level, *shape, weight.group or 0, name in self._binary), scales

    def _pack(
        self, name: str, weight: TernaryWeight, address: int, scales: int | None, *, wait: bool = False
    ) -> PackedMatrix:
        """Pack a matrix a few rows at a time, so that there is no second copy of it; or leave it to :meth:`pack_layers`
        if it may ``wait`` and its mapped file has it as devices take it."""
        experts, columns, group = self._experts.get(name, 1), weight.shape[1], weight.group or 0
        rows, sizes = weight.shape[0] // experts, self._packed_bytes(name)
        unit = rows if experts > 1 else PANELS
        scale = 0.0
        for first, data in loaded_rows(name, weight, max(PACKED_AT_A_TIME // (unit * columns), 1) * unit):
            codes, given = np.ascontiguousarray(data.codes), np.ascontiguousarray(data.scale)
            scale = 0.0 if scales else float(given[0])
            if wait and scales is None and len(codes) == len(data.codes) == weight.shape[0] and is_mapped(codes):
                self._waiting[name] = address
                return PackedMatrix(address, None, rows, scale, unpacked=self._stay(codes))
            for begin in range(0, len(codes), rows):
                expert, row = divmod(first + begin, rows)
                behind = self._packed_rows(name, row)
                where = address + expert * (sizes[0] // experts) + behind[0]
                units = None if scales is None else scales + expert * (sizes[1] // experts) + behind[1]
                piece, own = codes[begin : begin + rows], given if scales is None else given[begin : begin + rows]
                own_scales = own.ctypes.data, units
                job = structures.PackJob(
                    piece.ctypes.data, where, len(piece), columns, group, *own_scales, name in self._binary
                )
                self._library.bitnet_pack(self._native.level, self._native.pool, job)
        return PackedMatrix(address, scales, rows, scale, binary=name in self._binary)

    def _place(self, name: str, weight: DenseWeight | BlockWeight, address: int | None) -> int:
        """The address of a dense weight, or one in blocks: copied to ``address``, or in place."""
        array = loaded_dense(name, weight)
        if address is None:
            return self._stay(array)
        self._copy(address, array)
        del array
        weight.release()
        return address

    def _in_place(self, name: str) -> tuple[int, int] | None:
        """Addresses of an embedding's rows in its file and of what their blocks are; None if it must be packed."""
        weight = self._source.weights[name]
        assert isinstance(weight, TernaryWeight)
        if weight.blocks is None:
            return None
        table = weight.blocks()
        columns = len(table.place)
        size = table.data.shape[1] // (weight.shape[1] // columns)
        places = (structures.CodeBlocks * 1)(structures.CodeBlocks(columns, size, table.scale_at, table.base))
        places[0].place[:columns], places[0].factor[:columns] = table.place.tolist(), table.factor.tolist()
        return self._stay(table.data), self._keep(places)

    def _stay(self, array: npt.NDArray[Any]) -> int:
        """The address of an array that stays where it is."""
        self._kept.append(array)
        return array.ctypes.data

    def _program(self, ops: int, count: int) -> structures.NativeProgram:
        limits, layout = self._source.limits, StepLayout(self._source.limits)
        names = [field[0] for field in structures.NativeStepLayout._fields_[1:]]
        return structures.NativeProgram(
            ops,
            count,
            self._source.deterministic,
            self._kv,
            structures.NativeLimits(limits.max_tokens, limits.max_seqs, limits.max_rows, limits.max_blocks),
            structures.NativeStepLayout(layout.words, *(layout.offsets[name] for name in names)),
        )

    def _lower(self) -> list[structures.Op]:
        """The operations as structures; a compact head and its sampling become one."""
        ops = list(self._source.ops)
        operands = Operands(
            self._source,
            self._matrices,
            self._dense,
            self._ternary,
            self._blocks,
            self._layers,
            self._states,
            self._slots,
            self._keep,
        )
        if self.head is None:
            return [lower(op, operands) for op in ops]
        *others, dense, sample = (lower(op, operands) for op in ops)
        return [*others, self._head_op(self.head, dense, sample)]

    def _head_op(self, head: CompactHead, dense: structures.Op, sample: structures.Op) -> structures.Op:
        exact = (structures.Op * 2)(dense, sample)
        where = self._keep(exact)
        library, level = self._library, self._native.level
        rows, columns = self.arrays[head.logits].shape[1], self.arrays[head.x].shape[1]
        codes = library.bitnet_head_bytes(level, rows, columns)
        chunks = 4 * -(-rows // HEAD_CHUNK)
        sizes = codes, 4 * rows, chunks, chunks, 4 * columns, 4 * columns
        self.head_bytes = sum(sizes)
        arena = self._arena(sum(map(aligned, sizes)), "the compact head")
        compact = structures.HeadSampleOp(where, where + ctypes.sizeof(structures.Op), *map(arena.take, sizes))
        self._head_parts = exact[0].dense_matmul, compact
        self.head_waits = True
        if self._source.limits.max_seqs > 1:
            self.pack_head()
        return structures.Op(OpKind.HEAD_SAMPLE, head_sample=compact)

    @property
    def layers_wait(self) -> bool:
        """Whether :meth:`pack_layers` is still to be called before a step of more than ``UNPACKED_TOKENS``, and should
        be before the second step."""
        return bool(self._waiting)

    def pack_layers(self) -> None:
        """Pack the matrices of layers that wait.

        Raises:
            ModelFileError: The file has changed since it was opened.
        """
        for name, address in self._waiting.items():
            weight = self._source.weights[name]
            assert isinstance(weight, TernaryWeight)
            self._pack(name, weight, address, None)
        for kept in self._kept:
            if isinstance(kept, ctypes.Array) and issubclass(kept._type_, structures.TernaryPart):
                for part in kept:
                    part.unpacked = None
        self._waiting.clear()

    def pack_head(self) -> None:
        """Pack the compact head.

        Raises:
            OutOfMemoryError: There is no memory to do so.
        """
        name, library, level, pool, threads = self._native
        if not library.bitnet_head_pack(level, pool, threads, *self._head_parts):
            raise OutOfMemoryError("no memory to pack the head.", device=name)
        self.head_waits = False


def _transposed(name: str, weight: DenseWeight) -> DenseWeight:
    return replace(weight, shape=weight.shape[::-1], load=lambda: np.ascontiguousarray(loaded_dense(name, weight).T))
