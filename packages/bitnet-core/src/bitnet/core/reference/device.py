"""The numpy device: runs programs operation by operation on numpy arrays, with a paged KV cache like others.

Long, because one class runs every operation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import DeviceError, OutOfMemoryError
from bitnet.core.gguf import GGMLType
from bitnet.core.gguf.quants import decode
from bitnet.core.hal import (
    BLOCK_TABLES,
    EMBEDDERS,
    EXPERTS,
    IN_OUTPUT,
    KV_I8,
    LOGPROBS,
    NO_TOKEN,
    PENALTIES,
    ROTATED_NORMS,
    STATES,
    TERNARY_TABLES,
    WINDOWS,
    AddBias,
    Attention,
    Begun,
    BlockWeight,
    CausalConv,
    CenterRows,
    CheckedExecutable,
    DeltaGates,
    DeltaRule,
    DenseMatmul,
    DenseWeight,
    DeviceInfo,
    DeviceType,
    Embed,
    ExecutableStats,
    ExpertMatmul,
    GatedQuant,
    GluNormQuant,
    HeaderWord,
    MemoryInfo,
    NormQuant,
    NormRows,
    NormTokens,
    Op,
    Passes,
    Program,
    Quantize,
    RopeAppend,
    Route,
    Sample,
    Step,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    Transform,
)
from bitnet.core.hal.check import loaded_dense, loaded_ternary
from bitnet.core.hal.program import NUMPY_DTYPES
from bitnet.core.hal.sampling import adjusted, choose, logprobs
from bitnet.core.reference import experts, ops, recurrent
from bitnet.core.reference.fields import Fields

NUMPY_INFO = DeviceInfo(
    backend="cpu",
    index="numpy",
    id="cpu:numpy",
    description="numpy reference device",
    vendor="numpy",
    type=DeviceType.CPU,
    features=(
        PENALTIES,
        LOGPROBS,
        BLOCK_TABLES,
        TERNARY_TABLES,
        KV_I8,
        STATES,
        EXPERTS,
        WINDOWS,
        EMBEDDERS,
        ROTATED_NORMS,
    ),
    details={"numpy": np.__version__},
)
"""``cpu:numpy``. Its memory is the host's; the size is not known here."""

_KERNELS: Mapping[type[Op], str] = {
    Embed: "embed_numpy",
    NormQuant: "norm_quant_numpy",
    TernaryMatmul: "ternary_matmul_numpy",
    RopeAppend: "rope_append_numpy",
    Attention: "attention_numpy",
    GluNormQuant: "glu_norm_quant_numpy",
    NormRows: "norm_rows_numpy",
    DenseMatmul: "dense_matmul_numpy",
    Sample: "sample_numpy",
    Quantize: "quantize_numpy",
    AddBias: "add_bias_numpy",
    CenterRows: "center_rows_numpy",
    NormTokens: "norm_tokens_numpy",
    CausalConv: "causal_conv_numpy",
    DeltaGates: "delta_gates_numpy",
    DeltaRule: "delta_rule_numpy",
    GatedQuant: "gated_quant_numpy",
    Route: "route_numpy",
    ExpertMatmul: "expert_matmul_numpy",
}
_WEIGHTED = (NormQuant, GluNormQuant, NormRows, NormTokens, DenseMatmul)
"""Operations with a dense weight, or none, called ``weight``."""
KERNELS = tuple(_KERNELS.values())
"""The kernel names that a backend opening these devices lists."""


class ReferenceDevice:
    """A numpy device under any name: ``cpu:numpy``, or a fake of another."""

    def __init__(self, info: DeviceInfo = NUMPY_INFO) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._open: list[ReferenceExecutable] = []
        self._closed = False

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def compile(self, program: Program, *, keep: bool = False) -> ReferenceExecutable:
        if self._closed:
            raise DeviceError("the device is closed.", device=self._info.name)
        executable = ReferenceExecutable(self, program)
        with self._lock:
            self._open.append(executable)
        return executable

    def memory(self) -> MemoryInfo:
        with self._lock:
            return MemoryInfo(total=self._info.memory, free=0, used=sum(e.used for e in self._open))

    def close(self) -> None:
        self._closed = True
        for executable in list(self._open):
            executable.close()

    def _forget(self, executable: ReferenceExecutable) -> None:
        with self._lock:
            self._open.remove(executable)


class ReferenceExecutable(CheckedExecutable):
    """A program on the numpy device. Weights are used as their ``load`` returns them, packed or mapped; those in blocks
    are decoded."""

    def __init__(self, device: ReferenceDevice, program: Program) -> None:
        super().__init__(device.info, program)
        self._device = device
        v, slots = self.check_slot.vocabulary, range(program.limits.slots)
        self._slots = [(np.zeros(v, np.int32), np.zeros(v, np.float32)) for _ in slots]
        self._kernels: dict[str, None] = {}
        try:
            self._load(program)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"the host has too little memory for {program.name!r}.",
                device=device.info.name,
                hint="Use a smaller model, a shorter context or fewer sequences.",
            ) from error

    def _load(self, program: Program) -> None:
        shapes = self.check_tensor
        self._tensors = {n: np.zeros(shapes.shape(n), NUMPY_DTYPES[s.dtype]) for n, s in program.tensors.items()}
        self._dense: dict[str, npt.NDArray[Any]] = {}
        self._ternary: dict[str, TernaryData] = {}
        for name, weight in program.weights.items():
            if isinstance(weight, DenseWeight):
                self._dense[name] = loaded_dense(name, weight)
            elif isinstance(weight, BlockWeight):
                self._dense[name] = np.empty(weight.shape, np.float32)
                decode(GGMLType[weight.dtype.upper()], loaded_dense(name, weight), self._dense[name])
            else:
                self._ternary[name] = loaded_ternary(name, weight)
        self._cache: npt.NDArray[Any] = np.empty(0)
        self._scales: ops.F32 | None = None
        if (kv := program.kv) is not None:
            # [layer, k or v, block, position in the block, head, element]
            cache = (kv.layers, 2, kv.num_blocks, kv.block_size, kv.kv_heads, kv.head_dim)
            self._cache = np.zeros(cache, NUMPY_DTYPES[kv.dtype])
            self._scales = np.zeros(cache[:-1], np.float32) if kv.dtype == "i8" else None
        states = program.states.items()
        self._states = {name: np.zeros((spec.entries, *spec.shape), np.float32) for name, spec in states}
        codes = 0
        for op in program.ops:  # of experts, only those that a token chooses
            if isinstance(op, TernaryMatmul | ExpertMatmul):
                size = sum(self._ternary[name].codes.nbytes for name in op.weights)
                chosen = self._tensors[op.ids].shape[1] if isinstance(op, ExpertMatmul) else 1
                codes += size * chosen // (op.experts if isinstance(op, ExpertMatmul) else 1)
        others = [op.weight for op in program.ops if isinstance(op, _WEIGHTED)]
        others += [op.bias for op in program.ops if isinstance(op, AddBias)]
        others += [op.router for op in program.ops if isinstance(op, Route)]
        self._weight_bytes = codes + sum(self._dense[name].nbytes for name in others if name in self._dense)
        self._weight_bytes += sum(sum(a.nbytes for a in self._ternary[n]) for n in others if n in self._ternary)
        self.used = (0 if kv is None else kv.bytes) + sum(t.nbytes for t in self._tensors.values())
        self.used += sum(spec.bytes for spec in program.states.values())
        self.used += sum(w.nbytes for w in self._dense.values()) + sum(w.codes.nbytes for w in self._ternary.values())

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(self._kernels)

    def on_stats(self) -> ExecutableStats:
        return ExecutableStats(self._weight_bytes)

    def on_begin(self, step: Step, count: int, done: int) -> Begun:
        return partial(self._compute, step, count)

    def _compute(self, step: Step, count: int) -> Passes:
        fields, passes = Fields(step), Passes.room(step, count, samples=self.check_step.samples)
        tokens, words = passes
        for i in range(count):
            for op in self.program.ops:
                self._run_op(op, fields)
                if isinstance(op, Sample):
                    tokens[i] = self._tensors[op.out][: fields.rows]
                    for r in range(fields.rows if words is not None else 0):
                        assert words is not None
                        words[i, r] = logprobs(self._tensors[op.logits][r], tokens[i, r], words.shape[2] // 2)
            if i + 1 < count:
                fields.advance(tokens[i])
        return passes

    def on_fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        self._slots[slot] = (marks.copy(), biases.copy())

    def on_write(self, name: str, array: npt.NDArray[Any]) -> None:
        self._tensors[name][: len(array)] = array

    def on_read(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return np.array(self._tensors[name][: shape[0]])

    def on_close(self) -> None:
        del self._tensors, self._dense, self._ternary, self._cache, self._scales, self._states
        self._device._forget(self)

    def _run_op(self, op: Op, step: Fields) -> None:
        t, w, m, r = self._tensors, self._dense, step.tokens, step.rows
        if isinstance(op, Embed):
            ids, packed = step.field("tokens", m), self._ternary.get(op.table)
            rows = w[op.table][ids] if packed is None else ops.table_rows(packed, ids, t[op.out].shape[1])
            t[op.out][:m] = rows if op.transform is None else self._restored(rows, op.transform)
        elif isinstance(op, NormQuant):
            y = ops.rms_norm(t[op.x][:m], None if op.weight is None else w[op.weight], op.eps)
            t[op.out][:m], t[op.scale][:m] = ops.absmax_int8(self._transformed(y, op.transform))
        elif isinstance(op, TernaryMatmul):
            parts = [self._product(t[op.x][:m], t[op.scale][:m], name, self._ternary[name]) for name in op.weights]
            product = np.concatenate(parts, axis=1)
            out = t[op.out][:m, op.column or 0 : (op.column or 0) + product.shape[1]]
            out[:] = out + product if op.add else product
        elif isinstance(op, RopeAppend):
            self._rope_append(op, step)
        elif isinstance(op, Attention):
            self._attention(op, step)
        elif isinstance(op, GluNormQuant):
            y = ops.glu(t[op.gate_up][:m].reshape(m * op.parts, -1), op.activation, op.clamp)
            y = ops.rms_norm(y, None if op.weight is None else w[op.weight], op.eps)
            codes, scale = ops.absmax_int8(self._transformed(y, op.transform))
            t[op.out][:m], t[op.scale][:m] = codes.reshape(m, -1), scale.reshape(t[op.scale][:m].shape)
        elif isinstance(op, GatedQuant):
            t[op.out][:m], t[op.scale][:m] = ops.absmax_int8(self._transformed(self._gated(op, m), op.transform))
        elif isinstance(op, NormRows):
            y = ops.rms_norm(t[op.x][step.field("rows", r)], w[op.weight], op.eps)
            t[op.out][:r] = self._transformed(y, op.transform)
        elif isinstance(op, DenseMatmul):
            head, x = self._ternary.get(op.weight), t[op.x][:r]
            t[op.out][:r] = ops.dense_matmul(x, w[op.weight]) if head is None else ops.table_matmul(x, head)
        elif isinstance(op, AddBias):
            t[op.x][:m] += w[op.bias]
        elif isinstance(op, CenterRows):
            t[op.out][:m] = ops.center(t[op.x][:m])
        elif isinstance(op, NormTokens):
            normed = ops.rms_norm(t[op.x][:m], w[op.weight], op.eps).astype(np.float32)
            t[op.out][:m] = t[op.out][:m] + normed if op.add else normed
        elif isinstance(op, DeltaGates):
            y = ops.rms_norm(t[op.x][:m], w[op.weight], op.eps)
            t[op.out][:m] = recurrent.delta_gates(y, w[op.alpha], w[op.beta], w[op.bias], w[op.rate])
        elif isinstance(op, CausalConv | DeltaRule):
            self._recur(op, step)
        elif isinstance(op, Route):
            y = ops.rms_norm(t[op.x][:m], w[op.weight], op.eps)
            t[op.ids][:m], t[op.shares][:m] = experts.route(y, w[op.router], t[op.ids].shape[1])
        elif isinstance(op, ExpertMatmul):
            self._expert_matmul(op, m)
        elif isinstance(op, Sample):
            self._sample(op, step)
        elif isinstance(op, Quantize):
            t[op.codes][:], t[op.scale][0] = ops.absmean_ternary(t[op.x])
        self._kernels[_KERNELS[type(op)]] = None

    def _transformed(self, y: ops.F64, transform: Transform | None) -> ops.F64:
        if transform is None:
            return y
        return recurrent.hadamard(y if transform.signs is None else y * self._dense[transform.signs], transform.block)

    def _restored(self, rows: npt.NDArray[Any], transform: Transform) -> ops.F64:
        """The rows that became these by a transform."""
        y = recurrent.hadamard(rows, transform.block)
        return y if transform.signs is None else y * self._dense[transform.signs]

    def _gated(self, op: GatedQuant, m: int) -> ops.F64:
        x, gate = self._tensors[op.x][:m].astype(np.float64), self._tensors[op.gate][:m]
        weight = None if op.weight is None else self._dense[op.weight]
        if weight is not None:
            x = ops.rms_norm(x.reshape(m, -1, len(weight)), weight, op.eps).reshape(m, -1)
        y: ops.F64 = x * (recurrent.silu(gate) if op.activation == "silu" else recurrent.sigmoid(gate))
        return recurrent.untiled(y, op.untile, x.shape[1] if weight is None else len(weight)) if op.untile else y

    def _recur(self, op: CausalConv | DeltaRule, step: Fields) -> None:
        state, t = self._states[op.state], self._tensors
        for seq in step.sequences():
            own = slice(seq.begin, seq.end)
            before = np.zeros_like(state[0]) if seq.state_from < 0 else state[seq.state_from]
            if isinstance(op, CausalConv):
                results = recurrent.causal_conv(t[op.x][own], self._dense[op.weight], before)
            else:
                heads = recurrent.Heads(op.k_heads, op.tiled, *state.shape[1:])
                results = recurrent.delta_rule(t[op.qkv][own], t[op.gates][own], before, heads, op.eps)
            t[op.out][own], state[seq.state_to] = results

    def _product(self, x: ops.I8, scale: ops.F32, name: str, rows: TernaryData) -> ops.F32:
        """The product with some rows of a ternary weight."""
        weight = self.program.weights[name]
        assert isinstance(weight, TernaryWeight)
        if weight.group is None:
            return ops.ternary_matmul(x, scale, rows)
        return ops.group_matmul(x, scale, rows, weight.group)

    def _expert_matmul(self, op: ExpertMatmul, m: int) -> None:
        t, ids = self._tensors, self._tensors[op.ids][:m]
        x, scale, top = t[op.x][:m], t[op.scale][:m], ids.shape[1]
        if op.shares is None:
            x, scale = x.repeat(top, axis=0), scale.repeat(top)

        def product(x: ops.I8, scale: ops.F32, expert: int) -> ops.F32:
            named = [(name, experts.expert_rows(self._ternary[name], op.experts, expert)) for name in op.weights]
            return np.concatenate([self._product(x, scale, name, rows) for name, rows in named], axis=1)

        parts = experts.expert_matmul(x.reshape(m, top, -1), scale.reshape(m, top), ids, product)
        if op.shares is None:
            t[op.out][:m] = parts.reshape(m, -1)
        else:
            t[op.out][:m] = t[op.out][:m] + experts.mixed(parts, t[op.shares][:m])

    def _rope_append(self, op: RopeAppend, step: Fields) -> None:
        m, heads, groups, d = step.tokens, op.heads, op.kv_heads, op.head_dim
        qkv = self._tensors[op.qkv][:m].reshape(m, heads + 2 * groups, d)
        positions = step.positions()
        cos, sin = self._dense[op.cos][positions], self._dense[op.sin][positions]
        rotated, width = qkv[:, : heads + groups].copy(), 2 * cos.shape[1]

        def rotate() -> None:
            rotated[..., :width] = ops.rotate(rotated[..., :width], cos, sin, op.style)

        if op.norms_last:
            rotate()
        for norm, part in ((op.q_norm, slice(heads)), (op.k_norm, slice(heads, None))):
            if norm is not None:
                rotated[:, part] = ops.rms_norm(rotated[:, part], self._dense[norm], op.eps)
        if not op.norms_last:
            rotate()
        qkv[:, :heads] = rotated[:, :heads]
        size = self._cache.shape[3]
        for seq in step.sequences(op.table):
            own = slice(seq.begin, seq.end)
            blocks, places = seq.blocks[positions[own] // size], positions[own] % size
            for which, rows in enumerate((rotated[own, heads:], qkv[own, heads + groups :])):
                at = op.layer, which, blocks, places
                if self._scales is None:
                    self._cache[at] = rows
                else:
                    self._cache[at], self._scales[at] = ops.row_int8(rows)

    def _attention(self, op: Attention, step: Fields) -> None:
        m, groups, d = step.tokens, op.kv_heads, op.head_dim
        qkv = self._tensors[op.qkv][:m].reshape(m, op.heads + 2 * groups, d)
        size = self._cache.shape[3]
        for seq in step.sequences(op.table):
            length = seq.position + seq.end - seq.begin
            blocks = seq.blocks[: -(-length // size)]
            cached = self._cache[op.layer][:, blocks]
            if self._scales is not None:
                cached = cached * self._scales[op.layer][:, blocks, ..., None]
            k, v = cached.reshape(2, -1, groups, d)[:, :length]
            out = ops.attention(qkv[seq.begin : seq.end, : op.heads], k, v, seq.position, op.window)
            self._tensors[op.out][seq.begin : seq.end] = out.reshape(-1, op.heads * d)

    def _sample(self, op: Sample, step: Fields) -> None:
        r, positions = step.rows, step.positions()
        rows = step.field("rows", r)
        temperature, top_p, min_p = (step.field(n, r).view(np.float32) for n in ("temperature", "top_p", "min_p"))
        slots = step.field("slot", r) if step.data[HeaderWord.ADJUST] else np.zeros(r, np.int32)
        factors = [step.field(n, r).view(np.float32) for n in ("repetition", "presence", "frequency")]
        low, high = (step.field(n, r).view(np.uint32) for n in ("seed_lo", "seed_hi"))
        for i in range(r):
            logits, slot = self._tensors[op.logits][i], int(slots[i]) - 1
            if slot >= 0:
                marks, biases = self._slots[slot]
                repetition, presence, frequency = (float(f[i]) for f in factors)
                logits = adjusted(logits, marks, biases, repetition=repetition, presence=presence, frequency=frequency)
            token = choose(
                logits,
                temperature=float(temperature[i]),
                top_k=int(step.field("top_k", r)[i]),
                top_p=float(top_p[i]),
                min_p=float(min_p[i]),
                seed=int(high[i]) << 32 | int(low[i]),
                position=int(positions[rows[i]]),
            )
            self._tensors[op.out][i] = token
            if slot >= 0 and token != NO_TOKEN:
                marks[token] += IN_OUTPUT
