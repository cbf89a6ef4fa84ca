"""Launches of recurrent layers and Hadamard transforms in CUDA: as on every GPU, but one kernel transforms and
quantises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, Dispatch, KernelSpec, Launch
from bitnet.core.gpu.fusions import RecurrentInputs
from bitnet.core.gpu.ops import RowOps, activation_defines, ceil_div
from bitnet.core.gpu.ops.pairs import pair_of
from bitnet.core.gpu.ops.products import row_sums
from bitnet.core.gpu.ops.recurrent import Quantising, Transforming, transform_source
from bitnet.core.gpu.ops.variants import Transformed, recurrent_variants
from bitnet.core.hal import (
    CausalConv,
    DeltaGates,
    DeltaRule,
    Embed,
    GatedQuant,
    GluNormQuant,
    NormRows,
    TernaryMatmul,
)
from bitnet.cuda.planes import CHUNK, transforms
from bitnet.cuda.products import (
    CLUSTERS,
    DECODE_TOKENS,
    FEW_GROUP_TOKENS,
    MAX_CLUSTER,
    TENSOR_CORES,
    Products,
    shared_bytes,
)
from bitnet.cuda.weights import ternary

GROUP = 256
"""Threads of a block of transform_quant."""
ROW_WARPS, ROW_WARP_BYTES = 20, 32 * 33 * 4
"""Maximum warps of a block of transform_rows, for their shared memory, and bytes of each."""
NORM_GATE_TOKENS = 4
"""Tokens of a block that computes decays and strengths there, so that their weights are read less often."""
MAX_GATES_WIDTH = 6 * CHUNK
"""Maximum width of rows whose norm and gates are one launch: more need too many registers."""
CONV_TOKENS = (1, 8)
"""Tokens of a thread of causal_conv, in steps of few tokens and of many."""
GATE_TOKENS = 8
"""Tokens of a block of delta_gates_tile, which steps of more tokens use."""
GATE_ROWS, GATE_WARPS = 4, (8, 2)
"""Rows of a warp of it; warps that share their columns, in steps of few tokens and of many."""
GATES_TOKENS, GATES_ROWS, GATES_STEP, GATES_STAGES, GATES_GROUP = 64, 96, 32, 4, 512
"""Sizes of delta_gates_mma, as in its source: tokens and rows of a block, columns that it takes at a time, how many
times those are in shared memory, and threads of a block."""

DELTA_BATCH = 16
"""Tokens of delta_rule that have their q and k in shared memory at a time. In steps of one token it is 1, so that
blocks fit beside those of the product before and fetch their states early."""
DELTA_TOKENS = 64
"""Maximum tokens of a step without chunks of the delta rule."""
DELTA_CHUNK, DELTA_COLUMNS, DELTA_PARTS, DELTA_GROUP = 64, 64, 4, 256
"""Sizes of delta_prepare and delta_chunks, as in their sources: tokens of a chunk, columns of a block, warps that share
16 columns, and threads of delta_prepare."""
DELTA_PAIR, DELTA_FACTORS = 2 * DELTA_CHUNK**2, 4 * DELTA_CHUNK
"""Elements of what delta_prepare leaves for each head of a chunk."""
MIN_DELTA_TOKENS = 16
"""Tokens of a sequence from which they are taken in chunks."""
MAX_DELTA_WIDTH = 128
"""Maximum rows of a state that are taken in chunks; more need too many registers."""


class RecurrentLaunches:
    """The launches for a device with ``multiprocessors`` and a compute capability such as ``(9, 0)``.

    Args:
        plain: The entries of operations without transforms.
    """

    def __init__(
        self, multiprocessors: int, capability: tuple[int, int], products: Products, rows: RowOps, plain: Dispatch
    ) -> None:
        self._multiprocessors, self._clusters = multiprocessors, capability >= CLUSTERS
        self._tensor_cores, self._shared_bytes = capability >= TENSOR_CORES, shared_bytes(capability)
        self._products = products
        self._shared = recurrent_variants(rows, plain, self._absmax)

    def table(self) -> Dispatch:
        """The entries of operations of recurrent layers and of those with transforms."""
        return {
            CausalConv: self.causal_conv,
            DeltaRule: self.delta_rule,
            DeltaGates: self.delta_gates,
            GatedQuant: self.quantised,
            Transformed: self.quantised,
            RecurrentInputs: self.inputs,
        }

    def _overlapping(self, ctx: Context, op: CausalConv | DeltaGates | DeltaRule, bucket: Bucket) -> list[Launch]:
        return [replace(launch, overlaps=True) for launch in self._shared[type(op)](ctx, op, bucket) or []]

    def causal_conv(self, ctx: Context, op: CausalConv, bucket: Bucket) -> list[Launch]:
        (launch,) = self._overlapping(ctx, op, bucket)
        each = CONV_TOKENS[bucket.tokens > FEW_GROUP_TOKENS[-1]]
        kernel = replace(launch.kernel, defines=(*launch.kernel.defines, ("TOKENS", each)))
        return [replace(launch, kernel=kernel, grid=(launch.grid[0], ceil_div(bucket.tokens, each), 1))]

    def inputs(self, ctx: Context, group: RecurrentInputs, bucket: Bucket) -> list[Launch] | None:
        """What a recurrent layer computes before the delta rule, in two launches where they support its shape."""
        norm, gates = group.norm, group.gates
        if bucket.tokens > DECODE_TOKENS or norm.transform is None or norm.weight is None or not transforms(ctx, norm):
            return None
        together = ctx.shape(norm.x)[1] <= MAX_GATES_WIDTH
        pair = pair_of(ctx, group, *(ternary(ctx, op.weights) for op in (group.mixed, group.gate)))
        product = self._products.pair(ctx, group.mixed, bucket, pair) if pair else None
        if not together and product is None:
            return None
        made = [self.transform(ctx, norm, bucket, gates=gates if together else None)]
        if not together:
            made += self.delta_gates(ctx, gates, bucket)
        if product is not None:
            return [*made, product]
        for op in (group.mixed, group.gate):
            made += self._products.ternary_matmul(ctx, op, bucket)
        return [*made, *self.causal_conv(ctx, group.conv, bucket)]

    def delta_gates(self, ctx: Context, op: DeltaGates, bucket: Bucket) -> list[Launch]:
        (launch,) = self._overlapping(ctx, op, bucket)
        heads, width = ctx.program.weights[op.alpha].shape
        many = bucket.tokens > FEW_GROUP_TOKENS[-1]
        if many and self._tensor_cores and width % GATES_STEP == 0:
            return self._gates_of_many(ctx, op, bucket, heads, width)
        if bucket.tokens > GATE_TOKENS:
            rows, shared = GATE_ROWS, GATE_WARPS[many]
            defines = {"WG": GROUP, "TOKENS": GATE_TOKENS, "ROWS": rows, "KSPLIT": shared}
            spec = KernelSpec("delta_gates", "delta_gates_tile", tuple(defines.items()))
            grid = (ceil_div(2 * heads, GROUP // 32 // shared * rows), ceil_div(bucket.tokens, GATE_TOKENS), 1)
            launch = replace(launch, kernel=spec, grid=grid, block=(GROUP, 1, 1))
        return [launch]

    def _gates_of_many(self, ctx: Context, op: DeltaGates, bucket: Bucket, heads: int, width: int) -> list[Launch]:
        """Products on tensor cores, in as many shares of the columns as there is room for, and their sums."""
        tokens, tiles, rows = bucket.tokens, ceil_div(bucket.tokens, GATES_TOKENS), ceil_div(2 * heads, GATES_ROWS)
        splits = max(1, min(self._multiprocessors // (tiles * rows), width // GATES_STEP))
        most = max(ctx.program.limits.max_tokens, GATES_TOKENS * self._multiprocessors)
        parts = ctx.scratch("delta gates", most * (2 * heads + 1) * 4)
        spec = KernelSpec("delta_gates_mma", "delta_gates_mma", (("WG", GATES_GROUP), ("SPLITS", splits)))
        block, sizes = (GATES_GROUP, 1, 1), (np.int32(width), np.int32(heads), np.int32(tokens))
        weight, alpha, beta, bias, rate = (ctx.dense(w).data for w in (op.weight, op.alpha, op.beta, op.bias, op.rate))
        given = ctx.step, ctx.tensors[op.x], weight, alpha, beta, parts, *sizes
        shared = 4 * GATES_STAGES * (GATES_TOKENS + GATES_ROWS + 1) * GATES_STEP
        products = Launch(spec, (tiles, rows, splits), block, given, shared, overlaps=True)
        spec, grid = replace(spec, entry="delta_gates_sums"), (ceil_div(tokens * 2 * heads, GATES_GROUP), 1, 1)
        results = ctx.step, parts, np.float32(op.eps), bias, rate, ctx.tensors[op.out], *sizes
        return [products, Launch(spec, grid, block, results, overlaps=True)]

    def delta_rule(self, ctx: Context, op: DeltaRule, bucket: Bucket) -> list[Launch]:
        """Token by token or, on tensor cores, in chunks: a step may have sequences for either."""
        (launch,) = self._overlapping(ctx, op, bucket)
        batch = 1 if bucket.tokens == 1 else DELTA_BATCH
        defined = (*launch.kernel.defines, ("BATCH", batch), ("ALIKE", int(ctx.program.deterministic)))
        launch = replace(launch, kernel=replace(launch.kernel, defines=defined))
        heads, d_k, d_v = ctx.program.states[op.state].shape
        stages = self._chunk_stages(d_k)
        if not stages or bucket.tokens <= DELTA_TOKENS or ctx.program.deterministic:
            return [launch]
        seqs = min(bucket.tokens, ctx.program.limits.max_seqs)
        most = ctx.program.limits.max_tokens // DELTA_CHUNK + ctx.program.limits.max_seqs
        matrices = ctx.scratch("delta matrices", most * heads * DELTA_PAIR * 4)
        factors = ctx.scratch("delta factors", most * heads * DELTA_FACTORS * 4)
        defines = {"D_K": d_k, "D_V": d_v, "HEADS": heads, "K_HEADS": op.k_heads, "TILED": int(op.tiled)}
        defines["MIN_TOKENS"] = MIN_DELTA_TOKENS
        qkv, gates = ctx.tensors[op.qkv], ctx.tensors[op.gates]
        begin, source, target = (ctx.offset(name) for name in ("seq_begin", "state_from", "state_to"))
        solved = min(heads // op.k_heads, DELTA_GROUP // DELTA_CHUNK) * DELTA_CHUNK * (DELTA_CHUNK + 4)
        spec = KernelSpec("delta_prepare", "delta_prepare", tuple(defines.items()))
        args = ctx.step, begin, qkv, gates, matrices, factors, np.float32(op.eps)
        shared, block = 4 * max(2 * DELTA_CHUNK * d_k, solved), (DELTA_GROUP, 1, 1)
        prepare = Launch(spec, (bucket.tokens // DELTA_CHUNK + seqs, op.k_heads, 1), block, args, shared, overlaps=True)
        spec = KernelSpec("delta_chunks", "delta_chunks", (*defines.items(), ("STAGES", stages)))
        held = ctx.step, begin, source, target, qkv, matrices, factors, ctx.state(op.state), ctx.tensors[op.out]
        grid, block = (ceil_div(d_v, DELTA_COLUMNS), heads, seqs), (DELTA_COLUMNS // 16 * DELTA_PARTS * 32, 1, 1)
        chunks = Launch(spec, grid, block, held, stages * _delta_stage(d_k), overlaps=True)
        few = replace(launch.kernel, defines=(*launch.kernel.defines, ("MIN_TOKENS", MIN_DELTA_TOKENS)))
        return [replace(launch, kernel=few), prepare, chunks]

    def _chunk_stages(self, d_k: int) -> int:
        """Chunks of the delta rule that a block has in shared memory; 0 where it cannot have one."""
        if not self._tensor_cores or d_k % 32 or d_k > MAX_DELTA_WIDTH:
            return 0
        return min(2, self._shared_bytes // _delta_stage(d_k))

    def quantised(self, ctx: Context, op: Transforming, bucket: Bucket) -> list[Launch]:
        """A quantisation with a transform or a gate, in one launch if the kernel supports its shape."""
        if not isinstance(op, NormRows | Embed) and transforms(ctx, op):
            return [self.transform(ctx, op, bucket)]
        launches = self._shared[Transformed](ctx, op, bucket) or []
        return [replace(launch, overlaps=True) for launch in launches]

    def transform(
        self,
        ctx: Context,
        op: Quantising,
        bucket: Bucket,
        product: Buffer | None = None,
        gates: DeltaGates | None = None,
    ) -> Launch:
        """The launch of transform_quant or transform_rows.

        Args:
            product: ``act(gate) · up`` of a :class:`GluNormQuant`, if another kernel has computed it.
            gates: Decays and strengths of the same rows with the same norm, to compute in the same launch, of few
                tokens.
        """
        width, weight, transform = ctx.shape(op.out)[1], op.weight, op.transform
        kind, x, gate = transform_source(ctx, op, product)
        sums = self._needs_sums(ctx, op.out, bucket)
        cluster = 1 if sums else self._cluster(width, bucket.tokens)
        signs = None if transform is None else transform.signs
        block, bound = 0 if transform is None else transform.block, int(self._products.bounded(ctx, op.out))
        defines = {"WG": GROUP, "DIM": width, "KIND": kind, "NORM": int(weight is not None), "BLOCK": block}
        defines |= {"SIGNS": int(signs is not None), "CLUSTER": cluster, "SUMS": int(sums), "BOUND": bound}
        if isinstance(op, GluNormQuant):
            defines |= activation_defines(op.activation)
        elif isinstance(op, GatedQuant):
            head = width if weight is None else ctx.program.weights[weight].shape[0]
            defines |= {"SILU": int(op.activation == "silu"), "HEAD": head, "UNTILE": op.untile}
        factors = (ctx.dense(name).data if name else ctx.step for name in (weight, signs))
        outs = ctx.tensors[op.out], ctx.tensors[op.scale], row_sums(ctx, op.out) if sums else ctx.step
        args: tuple[Arg, ...] = (ctx.step, x, gate, *factors, np.float32(op.eps), *outs)
        if codes := self._products.codes(ctx, op.out, bucket):
            defines |= {"PLANES" if bucket.tokens == 1 else "ORDERED": 1}
            args = (*args, codes)
        name, shared, grid, threads = "transform_quant", 0, bucket.tokens * cluster, GROUP
        if bucket.tokens > FEW_GROUP_TOKENS[-1] and self._by_rows(op, width):
            units = ceil_div(width, CHUNK)
            defines["WARPS"] = ceil_div(units, ceil_div(units, ROW_WARPS))
            name, grid, threads = "transform_rows", bucket.tokens, 32 * defines["WARPS"]
            shared = defines["WARPS"] * ROW_WARP_BYTES
        elif gates is not None:
            heads = ctx.program.weights[gates.alpha].shape[0]
            each = min(bucket.tokens, NORM_GATE_TOKENS)
            defines |= {"GATES": each, "TOKENS": bucket.tokens}
            named = (ctx.dense(weight).data for weight in (gates.alpha, gates.beta, gates.bias, gates.rate))
            args = (*args, *named, ctx.tensors[gates.out], np.int32(heads))
            grid += ceil_div(heads * ceil_div(bucket.tokens, each), cluster) * cluster
        spec = KernelSpec(name, name, tuple(defines.items()))
        return Launch(spec, (grid, 1, 1), (threads, 1, 1), args, shared, overlaps=True)

    def _by_rows(self, op: Quantising, width: int) -> bool:
        """Whether transform_rows, which is faster in steps of many tokens, supports an operation."""
        supported = self._tensor_cores and op.transform is not None and width % 32 == 0
        return supported and not isinstance(op, GatedQuant)  # whose exponentials take many warps

    def _needs_sums(self, ctx: Context, name: str, bucket: Bucket) -> bool:
        """Whether products of this bucket need sums of the rows of an int8 tensor."""
        readers = (op for op in ctx.program.ops if isinstance(op, TernaryMatmul) and op.x == name)
        if any(ternary(ctx, op.weights).group is None for op in readers):
            return True
        return self._products.bounded(ctx, name) and bucket.tokens > FEW_GROUP_TOKENS[-1]

    def _cluster(self, width: int, tokens: int) -> int:
        """Blocks that share a row: as many as the device has room for, with the same number of chunks each."""
        chunks = ceil_div(width, CHUNK)
        most = min(chunks, MAX_CLUSTER, 2 * self._multiprocessors // tokens) if self._clusters else 1
        return ceil_div(chunks, ceil_div(chunks, most)) if most > 1 else 1

    def _absmax(self, ctx: Context, op: Quantising, x: Buffer, bucket: Bucket) -> Launch:
        width = ctx.shape(op.out)[1]
        outs = ctx.tensors[op.out], ctx.tensors[op.scale], row_sums(ctx, op.out)
        defines = {"WG": GROUP, "DIM": width, "NORM": 0, "BOUND": int(self._products.bounded(ctx, op.out))}
        spec = KernelSpec("norm_quant", "norm_quant", tuple(defines.items()))
        args = (ctx.step, x, x, np.float32(0), *outs)
        return Launch(spec, (bucket.tokens, 1, 1), (GROUP, 1, 1), args, overlaps=True)


def _delta_stage(d_k: int) -> int:
    """Bytes of shared memory of a chunk in delta_chunks."""
    queries = DELTA_CHUNK * max(d_k, 2 * DELTA_COLUMNS)
    return 4 * (queries + DELTA_CHUNK * d_k + DELTA_PAIR + DELTA_FACTORS)
