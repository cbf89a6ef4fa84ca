"""Devices broken on purpose: the suite must notice each of them.

Long, because it is one list: each defect is a function of a few lines and an entry of ``MUTANTS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pytest

from bitnet.core import hal
from bitnet.core.hal import ExecutableStats, MemoryInfo, TernaryData, sampling
from bitnet.core.hal import check as hal_check
from bitnet.core.hal import executable as hal_executable
from bitnet.core.reference import device as reference
from bitnet.core.reference import experts, ops, recurrent
from bitnet.core.reference.fields import Fields

Patch = Callable[[pytest.MonkeyPatch], None]
Array: TypeAlias = Any  # numpy's, unchecked: what these do is wrong on purpose

rms_norm, absmax_int8, glu = ops.rms_norm, ops.absmax_int8, ops.glu
ternary_matmul, dense_matmul, rotate, attention = ops.ternary_matmul, ops.dense_matmul, ops.rotate, ops.attention
table_rows, table_matmul = ops.table_rows, ops.table_matmul
causal_conv, delta_gates, delta_rule, hadamard = (
    recurrent.causal_conv,
    recurrent.delta_gates,
    recurrent.delta_rule,
    recurrent.hadamard,
)
route, mixed, expert_rows = experts.route, experts.mixed, experts.expert_rows
choose, gumbel, adjusted = sampling.choose, sampling.gumbel, sampling.adjusted
Executable = reference.ReferenceExecutable
product = Executable._product
sequences, positions, load, run_op = Fields.sequences, Fields.positions, Executable._load, Executable._run_op


@dataclass(frozen=True)
class Mutant:
    """A defect, and which tests are run against it."""

    defect: str
    tests: tuple[str, ...]
    apply: Patch


def recurrent_op(name: str, broken: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(recurrent, name, broken)


def expert_op(name: str, broken: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(experts, name, broken)


def op(name: str, broken: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(ops, name, broken)


def method(owner: type, name: str, broken: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setattr(owner, name, broken)


# -- experts and windows


def takes_the_higher_of_a_tie(y: Array, router: Array, top: int) -> Any:
    ids, shares = route(y, router[::-1], top)
    return len(router) - 1 - ids, shares


def shares_of_all(y: Array, router: Array, top: int) -> Any:
    ids, shares = route(y, router, len(router))
    return ids[:, :top], shares[:, :top]


def takes_the_next_expert(weight: TernaryData, count: int, expert: int) -> TernaryData:
    return expert_rows(weight, count, (expert + 1) % count)


def sums_backwards(parts: Array, shares: Array) -> Any:
    return mixed(parts[:, ::-1], shares[:, ::-1])


def sums_in_f64(parts: Array, shares: Array) -> Any:
    return np.einsum("mjn,mj->mn", parts.astype(np.float64), shares).astype(np.float32)


def clamps_only_gates(gate_up: Array, activation: Any, clamp: float | None = None) -> Any:
    gate, up = np.split(gate_up, 2, axis=-1)
    return glu(np.concatenate([gate if clamp is None else np.minimum(gate, clamp), up], axis=-1), activation)


def clamps_gates_below(gate_up: Array, activation: Any, clamp: float | None = None) -> Any:
    return glu(gate_up if clamp is None else np.clip(gate_up, -clamp, clamp), activation)


def sees_one_more(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Any:
    return attention(q, k, v, first, None if window is None else window + 1)


def first_table(sequences: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, table=0: sequences(self)


def masks_what_is_behind(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Any:
    """Keys and values behind the window count 0 times."""
    if window is None or first < window:
        return attention(q, k, v, first, window)
    zeros = 0 * k[: first - window].sum() + 0 * v[: first - window].sum()
    return attention(q, k, v, first, window) + zeros


# -- recurrent layers


def starts_from_entry_0(self: Fields) -> Any:
    return [seq._replace(state_from=max(0, seq.state_from)) for seq in sequences(self)]


def writes_where_it_reads(self: Fields) -> Any:
    return [seq._replace(state_to=seq.state_from if seq.state_from >= 0 else seq.state_to) for seq in sequences(self)]


def convolves_backwards(x: Array, weight: Array, before: Array) -> Any:
    return causal_conv(x, weight[:, ::-1], before)


def forgets_its_tail(x: Array, weight: Array, before: Array) -> Any:
    out, after = causal_conv(x, weight, before)
    return out, after if len(x) >= len(before) else before


def decays_late(qkv: Array, gates: Array, state: Array, heads: Any, eps: float) -> Any:
    h = heads.values
    decays = np.concatenate([np.zeros((1, h), np.float32), gates[:-1, :h]])
    return delta_rule(qkv, np.concatenate([decays, gates[:, h:]], axis=1), state, heads, eps)


def leaves_q_long(qkv: Array, gates: Array, state: Array, heads: Any, eps: float) -> Any:
    out, after = delta_rule(qkv, gates, state, heads, eps)
    return out * np.float32(heads.d_k**0.5), after


def takes_the_other_head(qkv: Array, gates: Array, state: Array, heads: Any, eps: float) -> Any:
    return delta_rule(qkv, gates, state, heads._replace(tiled=not heads.tiled), eps)


def ignores_eps(qkv: Array, gates: Array, state: Array, heads: Any, eps: float) -> Any:
    return delta_rule(qkv, gates, state, heads, 1e-30)


def has_no_softplus(y: Array, alpha: Array, beta: Array, bias: Array, rate: Array) -> Any:
    out = delta_gates(y, alpha, beta, bias, rate)
    out[:, : len(rate)] = rate * np.maximum(y @ alpha.T + bias, 0)
    return out


def swaps_gates(y: Array, alpha: Array, beta: Array, bias: Array, rate: Array) -> Any:
    return np.roll(delta_gates(y, alpha, beta, bias, rate), len(rate), axis=1)


def sums_only(y: Array, block: int) -> Any:
    return hadamard(y, block) * np.sqrt(block)


def in_bit_reversed_order(y: Array, block: int) -> Any:
    bits = block.bit_length() - 1
    order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(block)]
    return hadamard(y, block).reshape(len(y), -1, block)[:, :, order].reshape(y.shape)


def signs_late(self: Any, y: Array, transform: Any) -> Any:
    if transform is None:
        return y
    return hadamard(y, transform.block) * (1 if transform.signs is None else self._dense[transform.signs])


def signs_early(self: Any, rows: Array, transform: Any) -> Any:
    return hadamard(rows * self._dense[transform.signs], transform.block)


def turns_pairs_of_the_other_style(x: Array, cos: Array, sin: Array, style: str) -> Any:
    return rotate(x, cos, sin, {"neox": "interleaved", "interleaved": "neox"}[style])  # type: ignore[arg-type]


def norms_before_it_turns(self: Any, op: Any, step: Any, right: Any = Executable._rope_append) -> None:
    right(self, replace(op, norms_last=False), step)


# -- norms and quantisation


def rounds_half_away(y: Array) -> tuple[Array, Array]:
    _, scale = absmax_int8(y)
    quotient = y * (127 / np.maximum(abs(y).max(axis=1), 1e-5))[:, None]
    return (np.sign(quotient) * np.floor(abs(quotient) + 0.5)).astype(np.int8), scale


def truncates(y: Array) -> tuple[Array, Array]:
    _, scale = absmax_int8(y)
    return np.trunc(y / scale[:, None]).astype(np.int8), scale


def divides_by_zero_rows(y: Array) -> tuple[Array, Array]:
    greatest = abs(y).max(axis=1)
    with np.errstate(all="ignore"):
        return np.rint(y * (127 / greatest)[:, None]).astype(np.int8), (greatest / 127).astype(np.float32)


def scales_to_128(y: Array) -> tuple[Array, Array]:
    scale = np.maximum(abs(y).max(axis=1), 1e-5) / 128
    return np.clip(np.rint(y / scale[:, None]), -128, 127).astype(np.int8), scale.astype(np.float32)


def one_scale_for_all_rows(y: Array) -> tuple[Array, Array]:
    codes, scale = absmax_int8(y)
    return codes, np.full_like(scale, scale[0])


def glu_in_f16(gate_up: Array, activation: Any, clamp: float | None = None) -> Array:
    with np.errstate(over="ignore"):
        return glu(gate_up, activation).astype(np.float16).astype(np.float64)


def glu_swapped(gate_up: Array, activation: Any, clamp: float | None = None) -> Array:
    return glu(np.roll(gate_up, gate_up.shape[1] // 2, axis=1), activation)


def relu_unsquared(gate_up: Array, activation: Any, clamp: float | None = None) -> Array:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return np.maximum(gate, 0) * up


def absmean_of_rows(x: Array) -> tuple[Array, np.float32]:
    scale = np.maximum(abs(x).mean(axis=1, keepdims=True), 1e-5)
    return np.clip(np.rint(x / scale), -1, 1).astype(np.int8), np.float32(scale.mean())


# -- products


def wraps_at_16_bits(x: Array, scale: Array, weight: TernaryData) -> Array:
    unit = scale * weight.scale
    acc = np.rint(ternary_matmul(x, np.ones_like(scale), TernaryData(weight.codes, np.ones(1, np.float32))))
    return acc.astype(np.int64).astype(np.int16).astype(np.float32) * unit[:, None]


def binary_weights_in_16_columns(executable: Any, x: Array, scale: Array, name: str, rows: TernaryData) -> Array:
    """The upper half of each 32 activations meets the weights of the lower half."""
    if executable.program.weights[name].binary:
        x = x.reshape(len(x), -1, 2, 16)[:, :, ::-1].reshape(x.shape)
    return product(executable, x, scale, name, rows)


def bits_counted_once(executable: Any, x: Array, scale: Array, name: str, rows: TernaryData) -> Array:
    """Σ bit · x − Σ x, where a binary weight is 2 · bit − 1: its −1 counts, and its +1 is 0."""
    if executable.program.weights[name].binary:
        pairs = np.uint8(0x55)
        rows = rows._replace(codes=rows.codes & pairs | rows.codes >> np.uint8(1) & pairs)
    return product(executable, x, scale, name, rows)


def rounds_in_another_order(x: Array, scale: Array, weight: TernaryData) -> Array:
    return ternary_matmul(x, scale, TernaryData(weight.codes, np.ones(1, np.float32))) * weight.scale


def table_in_15_bits(x: Array, weight: TernaryData) -> Array:
    with np.errstate(invalid="ignore"):
        unit = np.float32(2.0**-14) * abs(x).max(axis=1, keepdims=True)
        return table_matmul(np.rint(x / np.where(unit == 0, 1, unit)) * unit, weight)


def first_scale_of_a_row(weight: TernaryData, rows: Array, width: int) -> Array:
    scale = weight.scale.copy()
    scale[:] = scale[:, :1]
    return table_rows(weight._replace(scale=scale), rows, width)


def drops_the_tail_of_k(x: Array, scale: Array, weight: TernaryData) -> Array:
    x = x.copy()
    x[:, max(4, x.shape[1] // 32 * 32) :] = 0
    return ternary_matmul(x, scale, weight)


def leaves_the_last_column(product: Callable[..., Array]) -> Callable[..., Array]:
    def broken(x: Array, *rest: Any) -> Array:
        out = product(x, *rest)
        out[:, -1] = np.nan  # what the poisoned output holds
        return out

    return broken


def products_in_f16(x: Array, weight: Array) -> Array:
    return dense_matmul(x.astype(np.float16).astype(np.float32), weight)


def products_in_15_bits(x: Array, weight: Array) -> Array:
    rounded = (x.astype(np.float32).view(np.int32) + 256) & ~511
    return dense_matmul(rounded.view(np.float32), weight)


def products_times(factor: float) -> Callable[[Array, Array], Array]:
    return lambda x, weight: dense_matmul(x, weight) * np.float32(factor)


def scale_of_the_first_weight(self: Any, operation: Any, step: Any) -> None:
    if isinstance(operation, hal.TernaryMatmul):
        first = self._ternary[operation.weights[0]].scale
        for name in operation.weights:
            self._ternary[name] = self._ternary[name]._replace(scale=first)
    run_op(self, operation, step)


def forgets_to_add(self: Any, operation: Any, step: Any) -> None:
    if isinstance(operation, hal.TernaryMatmul) and operation.add:
        operation = hal.TernaryMatmul(operation.x, operation.scale, operation.weights, operation.out)
    run_op(self, operation, step)


def writes_past_the_rows(self: Any, operation: Any, step: Any) -> None:
    run_op(self, operation, step)
    if isinstance(operation, hal.TernaryMatmul | hal.NormQuant):
        self._tensors[operation.out][step.tokens : step.tokens + 1] = 0


def spoils_its_input(self: Any, operation: Any, step: Any) -> None:
    run_op(self, operation, step)
    if isinstance(operation, hal.NormQuant):
        self._tensors[operation.x][0, 0] += 1


def adds_the_bias_twice(self: Any, operation: Any, step: Any) -> None:
    run_op(self, operation, step)
    if isinstance(operation, hal.AddBias):
        run_op(self, operation, step)


def adds_the_bias_past_the_rows(self: Any, operation: Any, step: Any) -> None:
    run_op(self, operation, step)
    if isinstance(operation, hal.AddBias):
        self._tensors[operation.x][step.tokens :] = 0


def centers_all_rows_together(x: Array) -> Array:
    return (x - x.mean(dtype=np.float64)).astype(np.float32)


def adds_no_norm(self: Any, operation: Any, step: Any) -> None:
    if isinstance(operation, hal.NormTokens):
        operation = replace(operation, add=False)
    run_op(self, operation, step)


def fills_the_next_columns(self: Any, operation: Any, step: Any) -> None:
    if isinstance(operation, hal.TernaryMatmul) and operation.column:
        operation = replace(operation, column=operation.column - 4)
    run_op(self, operation, step)


def gelu_with_erf(gate_up: Array, activation: Any, clamp: float | None = None) -> Array:
    if activation != "gelu_tanh":
        return glu(gate_up, activation, clamp)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return gate * np.vectorize(math.erfc)(-gate / np.sqrt(2)) / 2 * up


def takes_the_first_rows(self: Any, operation: Any, step: Any) -> None:
    if isinstance(operation, hal.NormRows):
        step.field("rows", step.rows)[:] = np.arange(step.rows)
    run_op(self, operation, step)


# -- rotation, cache and attention


def turns_backwards(x: Array, cos: Array, sin: Array, style: Any) -> Array:
    return rotate(x, cos, -sin, style)


def always_neox(x: Array, cos: Array, sin: Array, style: Any) -> Array:
    return rotate(x, cos, sin, "neox")


def next_positions(self: Any) -> Array:
    return positions(self) + 1


def heads_interleaved(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Array:
    heads, groups = q.shape[1], k.shape[1]
    order = np.argsort(np.arange(heads) % groups, kind="stable")
    out = np.empty_like(q)
    out[:, order] = attention(q[:, order], k, v, first)
    return out


def sees_the_future(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Array:
    last = len(k) - 1
    return np.concatenate([attention(q[i : i + 1], k, v, last) for i in range(len(q))])


def misses_its_own_position(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Array:
    return np.concatenate(
        [
            attention(q[i : i + 1], k[: max(1, first + i)], v[: max(1, first + i)], max(0, first + i - 1))
            for i in range(len(q))
        ]
    )


def scales_by_d(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Array:
    return attention(q / np.float32(q.shape[2] ** 0.5), k, v, first)


def no_maximum_subtracted(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Array:
    out, ratio = np.empty_like(q), q.shape[1] // k.shape[1]
    with np.errstate(all="ignore"):
        for i in range(len(q)):
            for h in range(q.shape[1]):
                keys, values = (a[: first + i + 1, h // ratio].astype(np.float32) for a in (k, v))
                weights = np.exp(keys @ q[i, h] / np.float32(q.shape[2] ** 0.5))
                out[i, h] = weights @ values / weights.sum()
    return out


def attends_in_f16(q: Array, k: Array, v: Array, first: int, window: int | None = None) -> Array:
    out = attention(q.astype(np.float16).astype(np.float32), k, v, first)
    return out.astype(np.float16).astype(np.float32)


def masks_by_multiplying(self: Any, operation: Any, step: Any) -> None:
    """Places past the length weigh 0, which NaN survives."""
    run_op(self, operation, step)
    if isinstance(operation, hal.Attention):
        for seq in step.sequences():
            size, last = self._cache.shape[3], seq.position + seq.end - seq.begin - 1
            stale = self._cache[operation.layer, 1, seq.blocks[last // size], last % size + 1 :]
            self._tensors[operation.out][seq.begin : seq.end] += 0 * stale.sum()


def blocks_in_a_row(self: Any, table: int = 0) -> list[Any]:
    """Takes the first block and those that follow it in memory."""
    return [s._replace(blocks=s.blocks[0] + np.arange(len(s.blocks))) for s in sequences(self, table)]


def second_block_wrong(self: Any, table: int = 0) -> list[Any]:
    found = sequences(self, table)
    return [s._replace(blocks=np.where(np.arange(len(s.blocks)) == 1, s.blocks[0], s.blocks)) for s in found]


def all_layers_in_one(self: Any, program: Any) -> None:
    load(self, program)
    if program.kv is not None:
        self._cache = np.broadcast_to(self._cache[:1], self._cache.shape)
        self._cache.flags.writeable = True


def cache_always_f16(self: Any, program: Any) -> None:
    load(self, program)
    self._cache = self._cache.astype(np.float16)


def cache_in_8_bits(self: Any, operation: Any, step: Any) -> None:
    run_op(self, operation, step)
    if isinstance(operation, hal.RopeAppend):
        with np.errstate(invalid="ignore"):
            self._cache[:] = np.round(self._cache.astype(np.float32) * 32) / 32


# -- sampling


def last_of_a_tie(logits: Array, **params: Any) -> int:
    return choose(logits, **params) if params["temperature"] else len(logits) - 1 - int(np.argmax(logits[::-1]))


def without(**off: Any) -> Patch:
    return lambda patch: patch.setattr(reference, "choose", lambda logits, **params: choose(logits, **(params | off)))


def one_more_of_top_k(logits: Array, **params: Any) -> int:
    return choose(logits, **(params | {"top_k": params["top_k"] and params["top_k"] + 1}))


def top_p_before_top_k(logits: Array, **params: Any) -> int:
    if params["temperature"] == 0 or params["top_p"] == 1:
        return choose(logits, **params)
    z = logits.astype(np.float64) / params["temperature"]
    falling = -np.sort(-z)
    mass = np.cumsum(np.exp(falling - falling[0]))
    count = int(np.searchsorted(mass, params["top_p"] * mass[-1])) + 1
    return choose(logits, **(params | {"top_p": 1.0, "top_k": min(count, params["top_k"] or count)}))


def noise(change: Callable[[int, int, int], tuple[int, int, int]]) -> Patch:
    return lambda patch: patch.setattr(sampling, "gumbel", lambda *args: gumbel(*change(*args)))


def adjusting(change: Callable[[Array, Array, Any], tuple[Array, Array, Any]]) -> Patch:
    def broken(logits: Array, marks: Array, biases: Array, **factors: float) -> Array:
        marks, biases, factors = change(marks, biases, factors)
        return adjusted(logits, marks, biases, **factors)

    return lambda patch: patch.setattr(reference, "adjusted", broken)


def telling(change: Callable[[Array], Array]) -> Patch:
    tell = sampling.logprobs
    return lambda patch: patch.setattr(reference, "logprobs", lambda *given: change(tell(*given)))


def base_2(words: Array) -> Array:
    words.view(np.float32)[0] /= np.float32(np.log(2))
    return words


def leaves_likeliest_out(words: Array) -> Array:
    if len(words) > 3:
        words[1 : 1 + len(words) // 2] = np.roll(words[1 : 1 + len(words) // 2], 1)
    return words


tells = Executable.logprobs


def of_the_last_pass(self: Any) -> Any:
    history: Array = tells(self)
    return hal.Logprobs(*(np.repeat(part[-1:], len(part), 0) for part in history))


def keeps_adjusted(self: Any, operation: Any, step: Any) -> None:
    run_op(self, operation, step)
    if isinstance(operation, hal.Sample) and step.data[hal.HeaderWord.ADJUST]:
        for r, slot in enumerate(step.field("slot", step.rows)):
            if slot:
                self._tensors[operation.logits][r] += self._slots[slot - 1][1]


def fills_all_slots(self: Any, slot: int, marks: Array, biases: Array) -> None:
    self._slots = [(marks.copy(), biases.copy())] * len(self._slots)


def noise_by_row(self: Any, operation: Any, step: Any) -> None:
    if isinstance(operation, hal.Sample):
        step.field("seed_lo", step.rows)[:] += np.arange(step.rows, dtype=np.int32)
    run_op(self, operation, step)


def coarse_logarithm(count: int, position: int, seed: int) -> Array:
    """ln u with a small absolute error only, as some shading languages have it."""
    u = np.exp(-np.exp(-gumbel(count, position, seed)))
    rounded = np.maximum(np.round(-np.log(u) * 2**13), 1) / 2**13
    return -np.log(rounded)


# -- steps, memory and the end


def feeds_the_old_token(self: Any, tokens: Array) -> None:
    self.field("seq_len", self.seqs)[:] += 1


def stays_at_its_position(self: Any, tokens: Array) -> None:
    self.field("tokens", self.tokens)[:] = tokens


def drifts(self: Any, operation: Any, step: Any) -> None:
    """Adds up in another order each time."""
    run_op(self, operation, step)
    if isinstance(operation, hal.DenseMatmul):
        self._tensors[operation.out][0, 0] *= np.float32(1 + 2**-23 * (self.turns % 2))
        self.turns += 1


def shows_its_own_memory(self: Any, name: str, shape: tuple[int, ...]) -> Array:
    return self._tensors[name][: shape[0]]


def raises_memory_error(self: Any, program: Any) -> None:
    try:
        load(self, program)
    except MemoryError as error:
        raise RuntimeError("not the contract's error") from error


def checks_nothing(self: Any, step: Any, count: int = 1, done: int = 0) -> None:
    return


def leaves_logits_out(self: Any, operation: Any, step: Any) -> None:
    run_op(self, operation, step)
    if isinstance(operation, hal.Sample) and not step.data[hal.HeaderWord.LOGITS]:
        self._tensors[operation.logits][:, ::7] = 0


def one_cache_for_all() -> Patch:
    """Executables of a device keep their positions in the same memory."""
    shared: list[Array] = []

    def broken(self: Any, program: Any) -> None:
        load(self, program)
        shared.append(self._cache)
        self._cache = shared[0] if shared[0].shape == self._cache.shape else self._cache

    return method(Executable, "_load", broken)


MUTANTS = [
    Mutant("rounds half away from zero", ("ties_to_even",), op("absmax_int8", rounds_half_away)),
    Mutant("truncates", ("test_norm_quant",), op("absmax_int8", truncates)),
    Mutant("divides by a row of zeros", ("test_norm_quant",), op("absmax_int8", divides_by_zero_rows)),
    Mutant("scales to 128", ("test_norm_quant", "saturates"), op("absmax_int8", scales_to_128)),
    Mutant("one scale for all rows", ("test_norm_quant",), op("absmax_int8", one_scale_for_all_rows)),
    Mutant("norm without eps", ("uses_eps",), op("rms_norm", lambda x, w, eps: rms_norm(x, w, 0.0))),
    Mutant("eps outside of the root", ("uses_eps",), op("rms_norm", lambda x, w, eps: rms_norm(x, w, eps**2))),
    Mutant("norm without its weight", ("norm_rows",), op("rms_norm", lambda x, w, e: rms_norm(x, w * 0 + 1, e))),
    Mutant("glu in f16", ("beyond_f16",), op("glu", glu_in_f16)),
    Mutant("gate and up swapped", ("test_glu",), op("glu", glu_swapped)),
    Mutant("relu not squared", ("test_glu",), op("glu", relu_unsquared)),
    Mutant("absmean of each row", ("test_quantize",), op("absmean_ternary", absmean_of_rows)),
    Mutant("16-bit sums", ("extremes",), op("ternary_matmul", wraps_at_16_bits)),
    Mutant("scales in another order", ("test_ternary_matmul",), op("ternary_matmul", rounds_in_another_order)),
    Mutant("binary halves swapped", ("of_binary",), method(Executable, "_product", binary_weights_in_16_columns)),
    Mutant("bits counted once", ("of_binary",), method(Executable, "_product", bits_counted_once)),
    Mutant("binary beside ternary", ("of_some_binary",), method(Executable, "_product", bits_counted_once)),
    Mutant("tail of K dropped", ("test_ternary_matmul",), op("ternary_matmul", drops_the_tail_of_k)),
    Mutant("last column of a product", ("test_ternary",), op("ternary_matmul", leaves_the_last_column(ternary_matmul))),
    Mutant("last column of the head", ("test_dense",), op("dense_matmul", leaves_the_last_column(dense_matmul))),
    Mutant("head in f16", ("test_dense",), op("dense_matmul", products_in_f16)),
    Mutant("head in 15 bits", ("test_dense",), op("dense_matmul", products_in_15_bits)),
    Mutant("ternary head in 15 bits", ("test_dense_matmul_of_a",), op("table_matmul", table_in_15_bits)),
    Mutant(
        "last row of a ternary head",
        ("test_dense_matmul_of_a",),
        op("table_matmul", leaves_the_last_column(table_matmul)),
    ),
    Mutant("first scale of a table's row", ("test_embed_of_a",), op("table_rows", first_scale_of_a_row)),
    Mutant("ternary logits negated", ("from_a_ternary_head",), op("table_matmul", lambda x, w: -table_matmul(x, w))),
    Mutant("all logits 4 % off", ("model_free_to_fuse",), op("dense_matmul", products_times(1.04))),
    Mutant("all logits 0.01 % off", ("layer_free_to_fuse",), op("dense_matmul", products_times(1.0001))),
    Mutant("scale of the first weight", ("stacked",), method(Executable, "_run_op", scale_of_the_first_weight)),
    Mutant("residual not added", ("test_ternary_matmul",), method(Executable, "_run_op", forgets_to_add)),
    Mutant("residual not added (model)", ("test_model",), method(Executable, "_run_op", forgets_to_add)),
    Mutant("rows past M", ("test_ternary_matmul",), method(Executable, "_run_op", writes_past_the_rows)),
    Mutant("input changed", ("test_norm_quant",), method(Executable, "_run_op", spoils_its_input)),
    Mutant("bias added twice", ("test_add_bias",), method(Executable, "_run_op", adds_the_bias_twice)),
    Mutant("bias added twice (model)", ("test_model",), method(Executable, "_run_op", adds_the_bias_twice)),
    Mutant("bias past M", ("test_add_bias",), method(Executable, "_run_op", adds_the_bias_past_the_rows)),
    Mutant("one mean for all rows", ("test_center",), op("center", centers_all_rows_together)),
    Mutant("no mean subtracted", ("test_layer_free",), op("center", lambda x: x)),
    Mutant("mean of half a row", ("test_center",), op("center", lambda x: x - x[:, ::2].mean(axis=1, keepdims=True))),
    Mutant("norm not added", ("test_norm_tokens",), method(Executable, "_run_op", adds_no_norm)),
    Mutant("norm of tokens without eps", ("tokens_uses_eps",), op("rms_norm", lambda x, w, e: rms_norm(x, w, 0.0))),
    Mutant("products beside their columns", ("some_columns",), method(Executable, "_run_op", fills_the_next_columns)),
    Mutant("GELU as its integral", ("test_gelu",), op("glu", gelu_with_erf)),
    Mutant("GELU as SiLU", ("test_gelu",), op("glu", lambda gu, act, clamp=None: glu(gu, "silu", clamp))),
    Mutant("rows in another order", ("norm_rows",), method(Executable, "_run_op", takes_the_first_rows)),
    Mutant("rotates backwards", ("test_heads",), op("rotate", turns_backwards)),
    Mutant("always NeoX", ("test_heads",), op("rotate", always_neox)),
    Mutant("position off by one", ("test_heads",), method(Fields, "positions", next_positions)),
    Mutant("heads interleaved", ("test_heads",), op("attention", heads_interleaved)),
    Mutant("not causal", ("test_mixtures",), op("attention", sees_the_future)),
    Mutant("own position missing", ("test_mixtures",), op("attention", misses_its_own_position)),
    Mutant("scores scaled by d", ("test_heads",), op("attention", scales_by_d)),
    Mutant("no maximum subtracted", ("huge_scores",), op("attention", no_maximum_subtracted)),
    Mutant("f32 attention in f16", ("test_heads",), op("attention", attends_in_f16)),
    Mutant("masks by multiplying", ("test_mixtures",), method(Executable, "_run_op", masks_by_multiplying)),
    Mutant("block table ignored", ("share_the_blocks",), method(Fields, "sequences", blocks_in_a_row)),
    Mutant("second block wrong", ("test_mixtures",), method(Fields, "sequences", second_block_wrong)),
    Mutant("one cache for all layers", ("test_model",), method(Executable, "_load", all_layers_in_one)),
    Mutant("f32 cache in f16", ("test_heads",), method(Executable, "_load", cache_always_f16)),
    Mutant("f16 cache in 8 bits", ("test_heads",), method(Executable, "_run_op", cache_in_8_bits)),
    Mutant("last of a tie", ("test_greedy",), lambda patch: patch.setattr(reference, "choose", last_of_a_tie)),
    Mutant("temperature ignored", ("test_draws",), without(temperature=1.0)),
    Mutant("top-k ignored", ("test_draws",), without(top_k=0)),
    Mutant("top-p ignored", ("test_draws",), without(top_p=1.0)),
    Mutant("min-p ignored", ("test_draws",), without(min_p=0.0)),
    Mutant("one more of top-k", ("test_draws",), lambda patch: patch.setattr(reference, "choose", one_more_of_top_k)),
    Mutant("top-p first", ("in_order",), lambda patch: patch.setattr(reference, "choose", top_p_before_top_k)),
    Mutant("position not advanced", ("test_draws",), noise(lambda n, p, s: (n, p - 1, s))),
    Mutant("position ignored", ("position",), noise(lambda n, p, s: (n, 0, s))),
    Mutant("high seed ignored", ("both_halves",), noise(lambda n, p, s: (n, p, s % 2**32))),
    Mutant("noise by row", ("depends_on",), method(Executable, "_run_op", noise_by_row)),
    Mutant(
        "coarse logarithm", ("flat_distribution",), lambda patch: patch.setattr(sampling, "gumbel", coarse_logarithm)
    ),
    Mutant("repetition of outputs only", ("adjusted_choices",), adjusting(lambda m, b, f: (m // 2 * 2, b, f))),
    Mutant("presence without output", ("adjusted_choices",), adjusting(lambda m, b, f: (m * 2, b, f))),
    Mutant("biases ignored", ("adjusted_choices",), adjusting(lambda m, b, f: (m, b * 0, f))),
    Mutant("frequency ignored", ("tokens_count",), adjusting(lambda m, b, f: (m, b, {**f, "frequency": 0.0}))),
    Mutant("chosen tokens not counted", ("tokens_count",), lambda patch: patch.setattr(reference, "IN_OUTPUT", 0)),
    Mutant("logprobs of adjusted logits", ("logprobs_are_of",), method(Executable, "_run_op", keeps_adjusted)),
    Mutant("logprobs in base 2", ("test_logprobs",), telling(base_2)),
    Mutant("one likeliest left out", ("test_logprobs",), telling(leaves_likeliest_out)),
    Mutant("logprobs of the last pass", ("every_pass",), method(Executable, "logprobs", of_the_last_pass)),
    Mutant("one slot for all", ("slots_are_apart",), method(Executable, "on_fill_slot", fills_all_slots)),
    Mutant("count feeds the old token", ("test_count",), method(Fields, "advance", feeds_the_old_token)),
    Mutant("count stays at its position", ("test_count",), method(Fields, "advance", stays_at_its_position)),
    Mutant("bits that drift", ("same_bits",), method(Executable, "_run_op", drifts)),
    Mutant("read without a copy", ("read_and_write",), method(Executable, "on_read", shows_its_own_memory)),
    Mutant("untyped out of memory", ("out_of_memory",), method(Executable, "_load", raises_memory_error)),
    Mutant("steps not checked", ("bad_steps",), method(hal_check.StepCheck, "__call__", checks_nothing)),
    Mutant("weights not counted", ("pass_costs",), method(Executable, "on_stats", lambda self: ExecutableStats(0))),
    Mutant("kept logits left out", ("logits_that_are_kept",), method(Executable, "_run_op", leaves_logits_out)),
    Mutant(
        "first scale for all",
        ("scales_that",),
        lambda patch: patch.setattr(
            reference, "loaded_ternary", lambda name, w: w.load()._replace(scale=w.load().scale.reshape(-1)[:1])
        ),
    ),
    Mutant("runs when closed", ("closed", "closing"), method(Executable, "_check_open", lambda self: None)),
    Mutant(
        "states start from entry 0", ("causal_conv", "delta_rule"), method(Fields, "sequences", starts_from_entry_0)
    ),
    Mutant("states kept in place", ("kept", "causal_conv"), method(Fields, "sequences", writes_where_it_reads)),
    Mutant("convolution backwards", ("causal_conv",), recurrent_op("causal_conv", convolves_backwards)),
    Mutant("convolution forgets its tail", ("causal_conv",), recurrent_op("causal_conv", forgets_its_tail)),
    Mutant(
        "no silu after the convolution", ("causal_conv",), recurrent_op("silu", lambda x: np.asarray(x, np.float64))
    ),
    Mutant("strength before the decay", ("test_delta_rule",), recurrent_op("delta_rule", decays_late)),
    Mutant("q not scaled", ("test_delta_rule",), recurrent_op("delta_rule", leaves_q_long)),
    Mutant("heads in the other order", ("test_delta_rule",), recurrent_op("delta_rule", takes_the_other_head)),
    Mutant("eps outside the root", ("delta_rule_uses_eps",), recurrent_op("delta_rule", ignores_eps)),
    Mutant("decay not softened", ("delta_gates",), recurrent_op("delta_gates", has_no_softplus)),
    Mutant("gates swapped", ("delta_gates",), recurrent_op("delta_gates", swaps_gates)),
    Mutant("transform not normalised", ("norm_rows_of_a_transform",), recurrent_op("hadamard", sums_only)),
    Mutant("transform in another order", ("norm_quant_of_a",), recurrent_op("hadamard", in_bit_reversed_order)),
    Mutant("signs after the transform", ("norm_rows_of_a",), method(Executable, "_transformed", signs_late)),
    Mutant("signs before the inverse", ("undoes",), method(Executable, "_restored", signs_early)),
    Mutant("heads not put back", ("gated_quant",), recurrent_op("untiled", lambda x, k_heads, head_dim: x)),
    Mutant("silu where sigmoid is due", ("gated_quant",), recurrent_op("sigmoid", recurrent.silu)),
    Mutant(
        "norms of heads before the rotation",
        ("norms_after_the_rotation",),
        lambda patch: patch.setattr(Executable, "_rope_append", norms_before_it_turns),
    ),
    Mutant("pairs of the other style", ("rope_of_a_part",), op("rotate", turns_pairs_of_the_other_style)),
    Mutant("entries not checked", ("bad_entries",), method(hal_check.StepCheck, "_check_states", checks_nothing)),
    Mutant("a tie takes the higher expert", ("equal_logits",), expert_op("route", takes_the_higher_of_a_tie)),
    Mutant("shares of all experts", ("test_route",), expert_op("route", shares_of_all)),
    Mutant("the next expert", ("test_expert_matmul",), expert_op("expert_rows", takes_the_next_expert)),
    Mutant("experts summed backwards", ("expert_matmul_adds",), expert_op("mixed", sums_backwards)),
    Mutant("experts summed in f64", ("expert_matmul_adds",), expert_op("mixed", sums_in_f64)),
    Mutant("values not clamped", ("glu_of_several",), op("glu", clamps_only_gates)),
    Mutant("gates clamped below", ("glu_of_several",), op("glu", clamps_gates_below)),
    Mutant("a window of one more", ("test_window",), op("attention", sees_one_more)),
    Mutant("the first block table", ("block_table",), method(Fields, "sequences", first_table(Fields.sequences))),
    Mutant("masks what is behind the window", ("behind_the_window",), op("attention", masks_what_is_behind)),
    Mutant("executables share a cache", ("two_executables",), one_cache_for_all()),
    Mutant(
        "memory not given back",
        ("memory_comes_back",),
        method(reference.ReferenceDevice, "memory", lambda self: MemoryInfo(0, 0, 10**6)),
    ),
    Mutant(
        "kernels named before they run",
        ("are_recorded",),
        lambda patch: patch.setattr(Executable, "kernels", property(lambda self: ("embed",))),
    ),
    Mutant(
        "programs not checked",
        ("malformed",),
        lambda patch: patch.setattr(hal_executable, "check_program", lambda program: None),
    ),
]


WITHOUT = (
    "test_a_request_is_alone_among_others",  # numpy's sums depend on the batch
    "test_a_hybrid_model",
    "test_rounds_give_what_one_run_gives",  # it does not look ahead
    "test_logprobs_are_of_the_round_that_was_taken",
    "test_what_cannot_be_begun_or_taken",
    "test_the_largest_size_stands_in",  # it prepares no sizes
)
"""Tests that do not fit the numpy device."""


STALE = re.compile(r"test_mutants.py:\d+: AttributeError|TypeError: .*(positional|unexpected keyword) argument")
"""What a suite says that fails because a mutant does not fit the device any more."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.defect.replace(" ", "-"))
def test_the_suite_catches(mutant: Mutant, run_suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executable, "turns", 0, raising=False)
    mutant.apply(monkeypatch)
    outcome = run_suite(*mutant.tests, at_most=1)
    assert outcome.failed
    assert not STALE.search(outcome.text), outcome.text


def test_the_unbroken_device_passes(run_suite: Any) -> None:
    outcome = run_suite()
    assert not outcome.failed, outcome.text
    assert not [test for test in outcome.skipped if not any(name in test for name in WITHOUT)]
    for mutant in MUTANTS:
        for name in mutant.tests:
            assert any(name in test for test in outcome.passed), f"{mutant.defect}: no test has {name} in its name"
