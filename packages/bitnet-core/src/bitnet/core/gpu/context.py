"""The buffers of one program on one device, with which a backend's ``ops.py`` lowers operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.gpu.drivers.interface import Adopter, Buffer, Driver, Launch
from bitnet.core.gpu.weights import DenseBuffer, TernaryBuffer, put_dense, put_ternary
from bitnet.core.hal import (
    MAX_COUNT,
    AddBias,
    CausalConv,
    DeltaGates,
    DenseMatmul,
    ExpertMatmul,
    GatedQuant,
    GluNormQuant,
    KVSpec,
    NormQuant,
    NormRows,
    Program,
    Route,
    StepLayout,
    TernaryMatmul,
    TernaryWeight,
)
from bitnet.core.hal.check import SlotCheck, TensorCheck
from bitnet.core.hal.program import NUMPY_DTYPES

_WEIGHTED = NormQuant | GluNormQuant | NormRows | DenseMatmul | CausalConv | GatedQuant


@dataclass(frozen=True, slots=True)
class Bucket:
    """The largest step that a recording serves: grids are sized for it, and kernels exit early in smaller steps.

    ``rows`` 0 means that nothing after the last layer is needed. ``context`` bounds every sequence's length. If
    ``logits`` is false, nobody reads the logits, and each row's token is that of the greatest logit, possibly with
    noise added (without top-k, top-p or min-p, unless ``filtered``). A lowering may then skip logits that cannot win.
    ``apart``: each token is a sequence of its own, and no other sequence reads the cache blocks that it writes.
    ``adjusted``: rows may name slots, by which their logits are adjusted. ``logprobs``: the step requests
    log-probabilities, which need all logits.
    """

    tokens: int
    rows: int
    context: int
    logits: bool = True
    apart: bool = False
    adjusted: bool = False
    logprobs: bool = False
    filtered: bool = False

    def serves(self, other: Bucket) -> bool:
        """Whether a recording for this bucket can also run steps of the other."""
        return (
            self.tokens >= other.tokens
            and self.rows >= other.rows
            and bool(self.rows) == bool(other.rows)
            and self.context >= other.context
            and (self.logits or (not other.logits and self.filtered >= other.filtered))
            and self.apart <= other.apart
            and (self.adjusted, self.logprobs) == (other.adjusted, other.logprobs)
        )


@dataclass
class Context:
    """Buffers of a program: activations, weights (uploaded on first use), KV cache, states, step, token history."""

    driver: Driver
    program: Program
    layout: StepLayout
    keep: bool = False
    used: int = 0
    step: Buffer = field(init=False)
    history: Buffer = field(init=False)
    tensors: dict[str, Buffer] = field(default_factory=dict)
    _owned: list[Buffer] = field(default_factory=list)
    _ternary: dict[tuple[str, ...], TernaryBuffer] = field(default_factory=dict)
    _dense: dict[str, DenseBuffer] = field(default_factory=dict)
    _scratch: dict[str, Buffer] = field(default_factory=dict)
    _kv: dict[tuple[str, int], Buffer] = field(default_factory=dict)
    _states: dict[str, Buffer] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        limits = self.program.limits
        try:
            self.step = self.alloc(self.layout.words * 4)
            self.history = self.alloc(MAX_COUNT * max(limits.max_rows, 1) * 4)
            for spec in self.program.tensors.values():
                self.tensors[spec.name] = self.alloc(
                    int(np.prod(self.shape(spec.name))) * NUMPY_DTYPES[spec.dtype].itemsize
                )
        except BaseException:
            self.close()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an activation at its capacity."""
        return TensorCheck(self.program).shape(name)

    def alloc(self, nbytes: int) -> Buffer:
        """Memory that lives as long as the executable."""
        buffer = self.driver.alloc(max(nbytes, 4))
        self._owned.append(buffer)
        self.used += buffer.nbytes
        return buffer

    def _adopt(self, array: npt.NDArray[Any]) -> Buffer | None:
        """The array's own memory as a buffer for the executable's lifetime, if the device can read it."""
        buffer = self.driver.adopt(array) if isinstance(self.driver, Adopter) else None
        if buffer is not None:
            self._owned.append(buffer)
        return buffer

    def offset(self, field_name: str) -> np.int32:
        """Word offset of a field of the step buffer, as a kernel argument."""
        offset: np.int32 = np.int32(self.layout.offsets[field_name])
        return offset

    def ternary(self, names: Sequence[str]) -> TernaryBuffer:
        """The named matrices stacked along N."""
        key = tuple(names)
        if key not in self._ternary:
            self._ternary[key] = put_ternary(self.alloc, self.driver.upload, self._adopt, self.program.weights, key)
        return self._ternary[key]

    def experts(self, op: ExpertMatmul) -> list[TernaryBuffer]:
        """The matrices of a product with experts: stacked if all have the same rows, else one by one."""
        alike = len({self.program.weights[name].shape for name in op.weights}) == 1
        return [self.ternary(op.weights)] if alike else [self.ternary((name,)) for name in op.weights]

    def dense(self, name: str) -> DenseBuffer:
        """A dense weight, uploaded only once."""
        if name not in self._dense:
            self._dense[name] = put_dense(self.alloc, self.driver.upload, self._adopt, self.program.weights, name)
        return self._dense[name]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read in a step of one token: all weights, but only one row of an embedding table.

        For a weight with a :meth:`copy`, the copy counts.
        """
        size = 0
        for op in self.program.ops:
            if isinstance(op, TernaryMatmul):
                w = self.ternary(op.weights)
                size += w.codes.nbytes + w.scales.nbytes
            elif isinstance(op, DenseMatmul) and isinstance(self.program.weights.get(op.weight), TernaryWeight):
                w = self.ternary((op.weight,))
                size += w.codes.nbytes + w.scales.nbytes
            elif isinstance(op, AddBias):
                size += self.dense(op.bias).data.nbytes
            elif isinstance(op, ExpertMatmul):
                size += (
                    sum(w.codes.nbytes + w.scales.nbytes for w in self.experts(op))
                    * self.shape(op.ids)[1]
                    // op.experts
                )
            elif isinstance(op, Route):
                size += self.dense(op.router).data.nbytes
            elif isinstance(op, DeltaGates):
                size += sum(self.dense(name).data.nbytes for name in (op.alpha, op.beta, op.bias, op.rate))
            elif isinstance(op, _WEIGHTED) and op.weight is not None:
                copy = self._scratch.get(_copy(op.weight))
                size += (copy or self.dense(op.weight).data).nbytes
        return size

    @property
    def cache(self) -> KVSpec:
        """The KV cache's shape; ``check_program`` ensures that a program that uses a cache declares it."""
        spec = self.program.kv
        assert spec is not None
        return spec

    def kv(self, which: str, layer: int) -> Buffer:
        """Keys (``"k"``) or values (``"v"``) of a layer: ``[blocks, block_size, kv_heads, head_dim]``.

        In an ``i8`` cache, each block's codes ``i8[block_size, kv_heads, head_dim]`` are followed by their scales
        ``f32[block_size, kv_heads]``, so that a block has ``block_size · kv_heads · (head_dim + 4)`` bytes. A backend
        may order a block's rows and scales differently, as CUDA does.
        """
        key = (which, layer)
        if key not in self._kv:
            spec = self.cache
            rows = spec.num_blocks * spec.block_size * spec.kv_heads
            self._kv[key] = self.alloc(rows * spec.row_bytes)
        return self._kv[key]

    def state(self, name: str) -> Buffer:
        """All entries of a state, ``f32[entries, …]``. The layout of an entry is up to the kernels."""
        if name not in self._states:
            self._states[name] = self.alloc(self.program.states[name].bytes)
        return self._states[name]

    def slots(self) -> tuple[Buffer, Buffer]:
        """Marks and biases of the slots, ``[slots, V]`` each, initially zero."""
        nbytes = self.program.limits.slots * SlotCheck(self.program).vocabulary * 4
        return self.zeroed("marks of slots", nbytes), self.zeroed("biases of slots", nbytes)

    def scratch(self, name: str, nbytes: int) -> Buffer:
        """Scratch memory shared by operations under the same name, as no two of them run at once."""
        if name not in self._scratch or self._scratch[name].nbytes < nbytes:
            self._scratch[name] = self.alloc(nbytes)  # a smaller one is kept, because a recording may refer to it
        return self._scratch[name]

    def zeroed(self, name: str, nbytes: int) -> Buffer:
        """Memory that starts as zeros."""
        if name not in self._scratch:
            buffer = self.alloc(nbytes)
            self.driver.upload(buffer, np.zeros(nbytes, np.uint8))
            self._scratch[name] = buffer
        return self._scratch[name]

    def copy(self, name: str, nbytes: int, fill: Callable[[Buffer], list[Launch]]) -> Buffer:
        """A copy of a dense weight in another form, made by launches on first use."""
        key = _copy(name)
        if key not in self._scratch:
            buffer = self.alloc(nbytes)
            self.once(key, lambda: fill(buffer))
            self._scratch[key] = buffer
        return self._scratch[key]

    def once(self, name: str, launches: Callable[[], list[Launch]]) -> None:
        """Run launches that prepare memory, the first time that a name is given."""
        if name not in self._done:
            self.driver.submit(self.driver.record(launches()))
            self._done.add(name)

    def close(self) -> None:
        """Free every buffer."""
        for buffer in self._owned:
            self.driver.free(buffer)
        self._owned.clear()
        self.used = 0


def _copy(name: str) -> str:
    return f"copy of {name}"


Dispatch: TypeAlias = Mapping[type, Callable[[Context, Any, Bucket], list[Launch] | None]]
"""Maps an operation or group to its launches for a bucket; a group's entry returns None to decline it."""
