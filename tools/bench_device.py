"""Decode and prefill speed of a device, without engine and tokenizer, on a model with random weights.

    python tools/bench_device.py cuda:0
    python tools/bench_device.py cuda:0 --model bonsai-8b
    python tools/bench_device.py cuda:0 --context 32768 --kv-dtype i8 --sequences 1 2 4

The model has the shape of BitNet b1.58 2B4T, or of Ternary-Bonsai 8B, whose weights have a scale for each 128 columns,
or of Bonsai 2 27B, three of four layers of which are recurrent, or of Maple 20B-A1B, a mixture of experts.
Prints tokens a second and microseconds a step, the best of all runs within half a second and the median of their steps,
host loop included: the upload of a step, and the download of the tokens of all steps of a run. With ``--context`` only
that context is measured: decode of one sequence or of ``--sequences``, and the last 2048 tokens of a prompt of that
length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import numpy as np

import random_qwen35
from bitnet.core import select_device
from bitnet.core.hal import (
    GREEDY,
    Attention,
    DenseMatmul,
    DenseWeight,
    Embed,
    Executable,
    GluNormQuant,
    KVDtype,
    KVSpec,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    RopeAppend,
    Sample,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    TensorSpec,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    Weight,
    run,
)
from bitnet.core.model.config import ModelConfig
from bitnet.core.model.delta_net import DeltaNet
from bitnet.core.model.experts import Experts, Windows
from bitnet.core.model.hadamard import Hadamard
from bitnet.core.model.program import build_program
from bitnet.core.model.weights import expected_weights
from bitnet.core.testing.hybrid import CONFIG
from random_shapes import PRESETS, ExpertShape, HybridShape, Shape
from running import positive, run_tool

POSITIONS, BLOCK, CHUNK, RUNS, SECONDS = 4096, 32, 2048, 5, 0.5
MODELS = ("2b4t", "bonsai-8b", "bonsai-27b", "bonsai-27b-small", "maple", "maple-small")


@dataclass
class RandomWeights:
    """Weights made when a device asks for them. All codes are valid: 0, 1 and 2.

    ``group``: columns that share a scale in each row; 0: all of a row's; None: all of a matrix's.
    """

    rng: np.random.Generator
    group: int | None = None

    def __post_init__(self) -> None:
        lut = np.array([a << 6 | b << 4 | c << 2 | d for a, b, c, d in product(range(3), repeat=4)], np.uint8)
        self._codes = lut[self.rng.integers(0, 81, 1 << 26, np.uint8)]

    def ternary(self, n: int, k: int) -> TernaryWeight:
        group = k if self.group == 0 else self.group

        def load() -> TernaryData:
            at = int(self.rng.integers(self._codes.size))
            codes = np.resize(np.roll(self._codes[: n * k // 4], at), (n, k // 4))
            scales = (1,) if group is None else (n, k // group)
            return TernaryData(codes, np.full(scales, 0.02, np.float32 if group is None else np.float16))

        return TernaryWeight((n, k), load, group=group)

    def dense(self, *shape: int, dtype: type[np.floating] = np.float32) -> DenseWeight:
        array = (self.rng.standard_normal(shape, np.float32) * 0.02).astype(dtype)
        return DenseWeight(shape, "f16" if dtype is np.float16 else "f32", lambda: array)


def build(shape: Shape, rng: np.random.Generator, limits: Limits, blocks: int, kv_dtype: KVDtype) -> Program:
    """The operations of the model, for contexts as long as the limits' sequences.

    Without groups they are BitNet b1.58's: a norm in front of each product, relu² and an f16 head. With groups they
    are Qwen3's: heads are normed, silu, and the embedding and the head are ternary.
    """
    bitnet, width, ffn, head_dim, vocab = shape.group is None, shape.hidden, shape.ffn, shape.head_dim, shape.vocab
    made, heads, kv_heads = RandomWeights(rng, shape.group), shape.heads, shape.kv_heads
    qkv, positions = heads * head_dim, limits.max_blocks * BLOCK
    w: dict[str, Weight] = {"norm": made.dense(width)}
    w["embd"] = made.dense(vocab, width, dtype=np.float16) if bitnet else made.ternary(vocab, width)
    w |= {} if shape.tied else {"head": made.ternary(vocab, width)}
    w |= {"cos": made.dense(positions, head_dim // 2), "sin": made.dense(positions, head_dim // 2)}
    ops: list[Op] = [Embed("embd", "x")]
    for i in range(shape.layers):
        shapes = {"q": (qkv, width), "k": (kv_heads * head_dim, width), "v": (kv_heads * head_dim, width)}
        shapes |= {"o": (width, qkv), "gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
        w |= {f"{name}{i}": made.ternary(n, k) for name, (n, k) in shapes.items()}
        norms = {"an": width, "fn": width} | ({"as": qkv, "fs": ffn} if bitnet else {"qn": head_dim, "kn": head_dim})
        w |= {f"{name}{i}": made.dense(n) for name, n in norms.items()}
        normed = () if bitnet else (f"qn{i}", f"kn{i}", 1e-6)
        ops += [
            NormQuant("x", f"an{i}", 1e-5, "a", "s"),
            TernaryMatmul("a", "s", (f"q{i}", f"k{i}", f"v{i}"), "qkv"),
            RopeAppend("qkv", i, heads, kv_heads, head_dim, "cos", "sin", "neox", *normed),
            Attention("qkv", "att", i, heads, kv_heads, head_dim),
            NormQuant("att", f"as{i}" if bitnet else None, 1e-5, "b", "s"),
            TernaryMatmul("b", "s", (f"o{i}",), "x", add=True),
            NormQuant("x", f"fn{i}", 1e-5, "a", "s"),
            TernaryMatmul("a", "s", (f"gate{i}", f"up{i}"), "gu"),
            GluNormQuant("gu", f"fs{i}" if bitnet else None, 1e-5, "relu2" if bitnet else "silu", "h", "s"),
            TernaryMatmul("h", "s", (f"down{i}",), "x", add=True),
        ]
    head = "embd" if shape.tied else "head"
    ops += [NormRows("x", "norm", 1e-5, "y"), DenseMatmul("y", head, "logits"), Sample("logits", "token")]
    f32 = {"x": width, "qkv": qkv + 2 * kv_heads * head_dim, "att": qkv, "gu": 2 * ffn}
    specs = [TensorSpec(name, "f32", ("M", n)) for name, n in f32.items()] + [TensorSpec("s", "f32", ("M",))]
    specs += [TensorSpec(name, "i8", ("M", n)) for name, n in (("a", width), ("b", qkv), ("h", ffn))]
    specs += [TensorSpec("y", "f32", ("R", width)), TensorSpec("logits", "f32", ("R", vocab))]
    specs += [TensorSpec("token", "i32", ("R",))]
    kv = KVSpec(shape.layers, kv_heads, head_dim, blocks, BLOCK, kv_dtype)
    return Program(ops, {s.name: s for s in specs}, w, limits, kv, "random")


def sized(shape: HybridShape | ExpertShape) -> ModelConfig:
    """A configuration with the sizes of a shape."""
    return replace(
        CONFIG,
        name="random",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn,
        context_length=shape.context,
        rope_theta=shape.rope_theta,
        rotary_dim=shape.rotary,
    )


def build_hybrid(
    shape: HybridShape, rng: np.random.Generator, limits: Limits, blocks: int, kv_dtype: KVDtype
) -> Program:
    """The program of a Qwen3.5 with Hadamard transforms before products, with as many states as sequences."""
    made, weights = RandomWeights(rng, 128), dict[str, Weight]()
    for part in random_qwen35.parts(shape):
        if part.kind == "ternary":
            weights[part.gguf] = made.ternary(*part.shape)
        elif part.kind == "rate":
            rates = -rng.uniform(0.01, 1, part.shape).astype(np.float32)
            weights[part.gguf] = DenseWeight(part.shape, "f32", lambda rates=rates: rates)  # type: ignore[misc]
        else:
            weights[part.gguf] = made.dense(*part.shape)
    recurrent = tuple(not shape.attends(layer) for layer in range(shape.layers))
    net = DeltaNet(recurrent, shape.k_heads, shape.v_heads, shape.state, shape.state, shape.taps)
    assert shape.block is not None
    widths = (shape.hidden, shape.heads * shape.head_dim, shape.values, shape.ffn)
    signs = {width: rng.choice(np.array([-1, 1], np.float32), width) for width in widths}
    config = replace(
        sized(shape),
        delta_net=net,
        hadamard=Hadamard(shape.block, signs, frozenset({"output.weight"}), embedding=True, v_grouped=True),
    )
    return build_program(
        config,
        weights,
        limits=limits,
        num_blocks=blocks,
        kv_dtype=kv_dtype,
        block_size=BLOCK,
        state_entries=limits.max_seqs,
    )


def build_mixture(
    shape: ExpertShape, rng: np.random.Generator, limits: Limits, blocks: int, kv_dtype: KVDtype
) -> Program:
    """The program of a Maple whose embedding and head are f16, and whose cache keeps what is behind the windows."""
    config = replace(
        sized(shape),
        architecture="maple",
        output_gate=False,
        delta_net=None,
        experts=Experts(shape.experts, shape.used, (shape.clamp or 0.0,) * shape.layers),
        windows=Windows(shape.window, tuple(map(shape.slides, range(shape.layers)))),
    )
    made, weights = RandomWeights(rng, 0), dict[str, Weight]()
    for name, (kind, size) in expected_weights(config):
        if kind == "ternary":
            weights[name] = made.ternary(int(np.prod(size[:-1])), size[-1])
        else:
            weights[name] = made.dense(*size, dtype=np.float16 if kind == "dense" else np.float32)
    return build_program(config, weights, limits=limits, num_blocks=blocks, kv_dtype=kv_dtype, block_size=BLOCK)


def measure(name: str, executable: Executable, layout: StepLayout, seqs: Sequence[SequenceStep], count: int) -> None:
    """Print how fast runs of ``count`` steps are: at least ``RUNS`` of them, for ``SECONDS``."""
    step = Step(layout, seqs, logits=False)
    tokens = step.tokens * count
    run(executable, step, count)
    times: list[float] = []
    while len(times) < RUNS or sum(times) < SECONDS:
        start = time.perf_counter()
        run(executable, step, count)
        times.append(time.perf_counter() - start)
    best, usual = min(times), statistics.median(times)
    figures = f"{best / count * 1e6:8.0f} µs/step, median {usual / count * 1e6:8.0f}"
    print(f"{name:28s} {tokens / best:9.0f} tokens/s {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="such as cuda:0")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="whose shape the model has")
    parser.add_argument("--kv-dtype", choices=get_args(KVDtype), default="f16", help="type of the KV cache")
    parser.add_argument("--context", type=int, metavar="POSITIONS", help="measure this context, at least 2048, only")
    parser.add_argument(
        "--sequences", type=int, nargs="+", metavar="N", help="with --context: numbers of sequences that decode (1)"
    )
    parser.add_argument(
        "--layers", type=positive, metavar="N", help="layers of the model (default: those of its shape)"
    )
    args = parser.parse_args()
    if args.context is not None and args.context < CHUNK:
        parser.error(f"--context is {args.context}: the least is {CHUNK}.")
    if args.sequences and not args.context:
        parser.error("--sequences needs --context.")
    counts = args.sequences or [1]
    if not all(1 <= count <= 64 for count in counts):
        parser.error(f"--sequences is {' '.join(map(str, counts))}: between 1 and 64 are possible.")
    selection, shape = select_device(args.device), PRESETS[args.model]
    rng = np.random.default_rng(1)
    longest = -(-(args.context or POSITIONS) // BLOCK)
    limits, each = Limits(512, 64, 64, longest), 17
    blocks = longest * max(counts) if args.context else longest + 64 * each
    shape = replace(shape, layers=args.layers or shape.layers)
    if isinstance(shape, HybridShape):
        program = build_hybrid(shape, rng, limits, blocks, args.kv_dtype)
    elif isinstance(shape, ExpertShape):
        program = build_mixture(shape, rng, limits, blocks, args.kv_dtype)
    else:
        program = build(shape, rng, limits, blocks, args.kv_dtype)
    print(f"{selection.info.name}: {selection.info.description}, driver {selection.info.driver_version}")
    print(f"KV cache: {args.kv_dtype}, {program.kv.bytes if program.kv else 0:,} bytes")
    device = selection.open()

    def sequence(length: int, tokens: int = 1, first: int = 0, sampling: SamplingParams = GREEDY) -> SequenceStep:
        ids, blocks = (
            rng.integers(0, shape.vocab, tokens, np.int32),
            list(range(first, first - (-(length + 32) // BLOCK))),
        )
        entry = first // (longest if args.context else each) % limits.max_seqs
        source = -1 if tokens == length else entry
        return SequenceStep(
            ids, length, blocks[: limits.max_blocks], [tokens - 1], sampling, state_from=source, state_to=entry
        )

    try:
        if args.context:
            limits = replace(limits, max_tokens=CHUNK)
            executable, layout = device.compile(replace(program, limits=limits)), StepLayout(limits)
            firsts = [i * longest for i in range(max(counts))]
            for first in firsts:
                for end in (*range(CHUNK, args.context, CHUNK), args.context):  # so that the whole cache holds numbers
                    run(executable, Step(layout, [sequence(end, CHUNK, first)], logits=False))
            measure(f"prefill {CHUNK} at {args.context}", executable, layout, [sequence(args.context, CHUNK)], 1)
            for count in counts:
                seqs = [sequence(args.context - 36, first=first) for first in firsts[:count]]
                measure(f"decode, batch {count}, at {args.context}", executable, layout, seqs, 32)
            return
        executable, layout = device.compile(program), StepLayout(limits)
        run(executable, Step(layout, [sequence(1, first=i * each) for i in range(64)]))  # so that states hold numbers
        measure("decode, batch 1, context 512", executable, layout, [sequence(480)], 32)
        measure("decode, batch 1, context 4096", executable, layout, [sequence(4060)], 32)
        for batch in (8, 16, 64):
            seqs = [sequence(480, first=i * each) for i in range(batch)]
            measure(f"decode, batch {batch}, context 512", executable, layout, seqs, 16)
        for batch in (1, 8, 64):
            filtered = [SamplingParams(0.8, top_p=0.95, seed=int(seed)) for seed in rng.integers(0, 2**62, batch)]
            seqs = [sequence(480, first=i * each, sampling=params) for i, params in enumerate(filtered)]
            measure(f"decode, batch {batch}, top_p 0.95", executable, layout, seqs, 32)
        measure("prefill 512", executable, layout, [sequence(512, 512)], 1)
        executable.close()
        limits = replace(limits, max_tokens=CHUNK)
        executable = device.compile(replace(program, limits=limits))
        measure(f"prefill {CHUNK}", executable, StepLayout(limits), [sequence(CHUNK, CHUNK)], 1)
    finally:
        device.close()


if __name__ == "__main__":
    run_tool(main)
