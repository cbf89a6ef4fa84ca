"""Programs: a model as a flat list of operations on named tensors, which each device compiles for itself.

The semantics of each operation (shapes, types, rounding, error bound) are the contract in ``kernels/README.md``; this
module only names them. ``M`` stands for the number of tokens in a step and ``R`` for the number of rows that need
logits.

Long, because it is one list: each operation is a class whose docstring names its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.hal.code_blocks import CodeBlocks
from bitnet.core.hal.embedders import NormTokens
from bitnet.core.hal.experts import ExpertMatmul, Route
from bitnet.core.hal.recurrent import CausalConv, DeltaGates, DeltaRule, GatedQuant, StateSpec, Transform

DType: TypeAlias = Literal["f32", "f16", "i8", "i32"]
NUMPY_DTYPES: Mapping[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "i8": np.dtype(np.int8),
    "i32": np.dtype(np.int32),
}
Dim: TypeAlias = int | Literal["M", "R"]
KVDtype: TypeAlias = Literal["f32", "f16", "i8"]
Activation: TypeAlias = Literal["relu2", "silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An activation tensor; its first dimension may be ``"M"`` or ``"R"``, which vary from step to step."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]


class TernaryData(NamedTuple):
    """A ternary matrix in the packed format that every device accepts.

    Attributes:
        codes: ``uint8[N, ceil(K / 128) * 32]``: each 128 weights of a row in 32 bytes, byte ``g`` holding weights
            ``g, g+32, g+64, g+96`` in bits 7-6, 5-4, 3-2, 1-0; code = weight + 1; padding past K is code 1 (zero).
        scale: The value of a weight of +1: ``f32[1]``, or ``f16[N, K / group]`` if the weight has groups.
    """

    codes: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class TernaryWeight:
    """A ternary matrix ``W[N, K]`` of a model. ``load`` maps or decodes it; ``release`` releases its mapped pages.

    Attributes:
        group: Columns that share a scale: K, or a power of two ≥ 32 that divides K. None: one scale for the whole
            matrix.
        rows: Loads the rows from a first one to before a last one, so that a decoded matrix is never in memory whole.
            None: only ``load`` does it, as for a matrix whose ``load`` reorders another one's rows.
        blocks: Maps the matrix as its file has it, where a device may look up rows of an embedding; None: it cannot.
        binary: Whether every weight is −1 or +1. K is then a multiple of 128, and there are groups.
    """

    shape: tuple[int, int]
    load: Callable[[], TernaryData]
    release: Callable[[], None] = lambda: None
    group: int | None = None
    rows: Callable[[int, int], TernaryData] | None = None
    blocks: Callable[[], CodeBlocks] | None = None
    binary: bool = False


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A float vector or matrix; ``load`` returns a C-contiguous f32 or f16 array, mapped from its file if possible."""

    shape: tuple[int, ...]
    dtype: Literal["f32", "f16"]
    load: Callable[[], npt.NDArray[np.float32] | npt.NDArray[np.float16]]
    release: Callable[[], None] = lambda: None


BlockType: TypeAlias = Literal["q8_0", "q4_0", "q6_k", "q4_k"]
"""A type of GGUF files whose blocks hold quantised numbers."""
BLOCK_SIZES: Mapping[BlockType, tuple[int, int]] = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q6_k": (256, 210),
    "q4_k": (256, 144),
}
"""Columns and bytes of a block."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix of floats ``W[N, K]`` in blocks, as its file has it; K is a multiple of a block's columns.

    ``load`` returns ``uint8[N, row_bytes]``, mapped if possible. An element is the f32 of ggml's dequantiser.
    """

    shape: tuple[int, int]
    dtype: BlockType
    load: Callable[[], npt.NDArray[np.uint8]]
    release: Callable[[], None] = lambda: None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        columns, size = BLOCK_SIZES[self.dtype]
        return self.shape[1] // columns * size


Weight: TypeAlias = TernaryWeight | DenseWeight | BlockWeight


@dataclass(frozen=True, slots=True)
class Embed:
    """``out[m] = table[tokens[m]]`` as f32. The table is dense, or ternary with groups
    (:data:`~bitnet.core.hal.TERNARY_TABLES`), or in blocks (:data:`~bitnet.core.hal.BLOCK_TABLES`).

    A ``transform`` is undone: the row is transformed in blocks first and then multiplied by the signs.
    """

    table: str
    out: str
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class NormQuant:
    """RMSNorm of ``x`` (skipped if ``weight`` is None), the transform if there is one, then per-token absmax int8:
    ``out`` i8, ``scale`` f32[M]."""

    x: str
    weight: str | None
    eps: float
    out: str
    scale: str
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class TernaryMatmul:
    """``out[M, N] = (x · Wᵀ) · (scale · w_scale)``, the ``weights`` stacked along N; with ``add``, added to ``out``.

    Either all ``weights`` have groups of the same size, or none has groups. With a ``column``, a multiple of 4, the
    result is only the columns of ``out`` from there on; this needs :data:`~bitnet.core.hal.EMBEDDERS`.
    """

    x: str
    scale: str
    weights: tuple[str, ...]
    out: str
    add: bool = False
    column: int | None = None


@dataclass(frozen=True, slots=True)
class RopeAppend:
    """Rotate q (in place) and k of ``qkv[M, (heads + 2 kv_heads) head_dim]``; store k and v in the cache of ``layer``.

    ``cos`` and ``sin`` name f32 weights ``[max positions, r / 2]``; only the first ``r`` elements of a head are
    rotated, usually all ``head_dim``. A layer without positions names tables of
    cosines 1 and sines 0, of one pair. ``neox`` pairs element ``i`` with ``i + r / 2``, ``interleaved`` pairs ``2i``
    with ``2i + 1``. If ``q_norm`` and ``k_norm`` (both or neither) name
    f32 weights ``[head_dim]``, each head of q and k is normalised (RMSNorm with ``eps``): before it is rotated, or
    after it with ``norms_last``, which needs :data:`~bitnet.core.hal.ROTATED_NORMS`. ``table`` is the block table that
    finds the sequence's blocks.
    """

    qkv: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    cos: str
    sin: str
    style: Literal["neox", "interleaved"] = "neox"
    q_norm: str | None = None
    k_norm: str | None = None
    eps: float = 0.0
    table: int = 0
    norms_last: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal grouped-query attention of the rotated q over the cache of ``layer``: ``out[M, heads head_dim]``.

    With a ``window``, a token attends to that many positions, the last of which is its own; None: to all. ``table`` is
    the block table that finds the sequence's blocks.
    """

    qkv: str
    out: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    table: int = 0


@dataclass(frozen=True, slots=True)
class GluNormQuant:
    """``act(gate) · up`` of ``gate_up[M, 2F]``, RMSNorm (skipped if ``weight`` is None), the transform if there is one,
    then absmax int8.

    Attributes:
        activation: ``gelu_tanh``, GELU in its form with tanh, needs :data:`~bitnet.core.hal.EMBEDDERS`.
        clamp: Gates are first limited to at most this, and ``up`` to as much in magnitude; None: neither is.
        parts: Number of such rows side by side in ``gate_up[M, parts · 2F]``, each of which has gates of its own, then
            values, and a scale of its own: ``out[M, parts · F]``, ``scale[M]``, or ``scale[M, parts]`` for several.
    """

    gate_up: str
    weight: str | None
    eps: float
    activation: Activation
    out: str
    scale: str
    transform: Transform | None = None
    clamp: float | None = None
    parts: int = 1


@dataclass(frozen=True, slots=True)
class NormRows:
    """``out[r] = RMSNorm(x[rows[r]])`` f32, transformed if there is a transform: the rows that need logits."""

    x: str
    weight: str
    eps: float
    out: str
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class DenseMatmul:
    """``out[R, N] = x[R, K] · weightᵀ`` with f32 accumulation.

    The weight is dense, or ternary with groups (:data:`~bitnet.core.hal.TERNARY_TABLES`), or in blocks
    (:data:`~bitnet.core.hal.BLOCK_TABLES`).
    """

    x: str
    weight: str
    out: str


@dataclass(frozen=True, slots=True)
class AddBias:
    """``x[m] += bias`` for every token, in place; ``bias`` names an f32 weight with one element per column of x."""

    x: str
    bias: str


@dataclass(frozen=True, slots=True)
class CenterRows:
    """``out[m] = x[m] - mean(x[m])`` f32, for every token. RMSNorm of this with a weight of ones is LayerNorm."""

    x: str
    out: str


NO_TOKEN = -1
"""The result of ``Sample`` for a row that has a NaN."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample a token from each row of ``logits[R, V]`` by the step's sampling parameters: ``out`` i32[R]."""

    logits: str
    out: str


@dataclass(frozen=True, slots=True)
class Quantize:
    """Absmean ternary quantisation of ``x[N, K]``: ``codes`` i8 in {-1, 0, 1}, ``scale`` f32[1]."""

    x: str
    codes: str
    scale: str


Op: TypeAlias = (
    Embed
    | NormQuant
    | TernaryMatmul
    | RopeAppend
    | Attention
    | GluNormQuant
    | NormRows
    | DenseMatmul
    | Sample
    | Quantize
    | AddBias
    | CenterRows
    | NormTokens
    | CausalConv
    | DeltaGates
    | DeltaRule
    | GatedQuant
    | Route
    | ExpertMatmul
)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The paged KV cache a program needs; its memory layout is the device's own.

    A block holds ``block_size`` positions of ``layers`` layers. With several block tables (:class:`Limits`), a sequence
    has blocks for each, and an op's layer is one of its table's. ``dtype`` is the type in which k and v are stored:
    ``i8`` means codes with an f32 scale for each row, and needs a device with the feature
    :data:`~bitnet.core.hal.KV_I8`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int = 32
    dtype: KVDtype = "f16"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row (k or v of one position and head): its elements, plus its scale if it has one."""
        return self.head_dim * NUMPY_DTYPES[self.dtype].itemsize + (4 if self.dtype == "i8" else 0)

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache: one row of k and one of v for each layer, head and position."""
        return 2 * self.layers * self.kv_heads * self.num_blocks * self.block_size * self.row_bytes


MAX_SLOTS = 64
"""Maximum slots of a program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step a program will be given; a device sizes its buffers by it.

    Attributes:
        max_tokens: Maximum M.
        max_seqs: Maximum sequences in a step.
        max_rows: Maximum R.
        max_blocks: Maximum KV blocks of one sequence in a block table (the table's width).
        tables: Block tables of a sequence. Layers of different tables store the same positions in different blocks, so
            that those of one table can be freed while those of another are needed; more than one need the feature
            :data:`~bitnet.core.hal.WINDOWS`.
    """

    max_tokens: int
    max_seqs: int = 1
    max_rows: int = 1
    max_blocks: int = 1
    tables: int = 1

    @property
    def slots(self) -> int:
        """Number of sequences whose marks and biases a device keeps; each takes about a megabyte."""
        return min(self.max_seqs, MAX_SLOTS)


@dataclass(frozen=True)
class Program:
    """A model in the form that a device compiles.

    Attributes:
        ops: In the order they run.
        tensors: Every activation the ops name. Each keeps its own memory for the life of the executable.
        weights: Every weight the ops name.
        kv: Shape of the paged KV cache, if an op uses one.
        states: States of the sequences that the ops name; needs a device that lists
            :data:`~bitnet.core.hal.STATES`.
        deterministic: A token's results depend, bit for bit, only on its sequence up to that token: not on other rows
            of the step, nor on how steps filled the cache. Needs a device that lists
            :data:`~bitnet.core.hal.DETERMINISTIC`.
        again: Loads the same weights in another process, to which it is pickled; None: the weights are sent instead.
    """

    ops: Sequence[Op]
    tensors: Mapping[str, TensorSpec]
    weights: Mapping[str, Weight]
    limits: Limits
    kv: KVSpec | None = None
    name: str = "program"
    deterministic: bool = False
    again: Callable[[], Mapping[str, Weight]] | None = None
    states: Mapping[str, StateSpec] = field(default_factory=dict)

    @property
    def state_entries(self) -> int:
        """Entries of each state; 0 without states."""
        return next((spec.entries for spec in self.states.values()), 0)
