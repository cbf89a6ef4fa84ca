"""Decode and prefill speed of a device, without engine and tokenizer, on a model of 2B4T's shape with random weights.

    python tools/bench_device.py cuda:0
    python tools/bench_device.py cuda:0 --context 32768 --kv-dtype i8 --sequences 1 2 4

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
from running import run_tool

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, POSITIONS = 30, 2560, 20, 5, 128, 6912, 128_256, 4096
BLOCK, CHUNK, RUNS, SECONDS = 32, 2048, 5, 0.5


@dataclass
class RandomWeights:
    """Weights made when a device asks for them. All codes are valid: 0, 1 and 2."""

    rng: np.random.Generator

    def ternary(self, n: int, k: int) -> TernaryWeight:
        lut = np.array([a << 6 | b << 4 | c << 2 | d for a, b, c, d in product(range(3), repeat=4)], np.uint8)
        scale = np.array([0.02], np.float32)
        return TernaryWeight((n, k), lambda: TernaryData(lut[self.rng.integers(0, 81, (n, k // 4), np.uint8)], scale))

    def dense(self, *shape: int, dtype: type[np.floating] = np.float32) -> DenseWeight:
        array = (self.rng.standard_normal(shape, np.float32) * 0.02).astype(dtype)
        return DenseWeight(shape, "f16" if dtype is np.float16 else "f32", lambda: array)


def build(rng: np.random.Generator, limits: Limits, blocks: int, kv_dtype: KVDtype) -> Program:
    """The operations of BitNet b1.58 2B4T, for contexts as long as the limits' sequences."""
    positions = limits.max_blocks * BLOCK
    made, qkv = RandomWeights(rng), HEADS * HEAD_DIM
    w: dict[str, Weight] = {"embd": made.dense(VOCAB, WIDTH, dtype=np.float16), "norm": made.dense(WIDTH)}
    w |= {"cos": made.dense(positions, HEAD_DIM // 2), "sin": made.dense(positions, HEAD_DIM // 2)}
    ops: list[Op] = [Embed("embd", "x")]
    for i in range(LAYERS):
        shapes = {"q": (qkv, WIDTH), "k": (KV_HEADS * HEAD_DIM, WIDTH), "v": (KV_HEADS * HEAD_DIM, WIDTH)}
        shapes |= {"o": (WIDTH, qkv), "gate": (FFN, WIDTH), "up": (FFN, WIDTH), "down": (WIDTH, FFN)}
        w |= {f"{name}{i}": made.ternary(n, k) for name, (n, k) in shapes.items()}
        w |= {f"{name}{i}": made.dense(n) for name, n in (("an", WIDTH), ("as", qkv), ("fn", WIDTH), ("fs", FFN))}
        ops += [
            NormQuant("x", f"an{i}", 1e-5, "a", "s"),
            TernaryMatmul("a", "s", (f"q{i}", f"k{i}", f"v{i}"), "qkv"),
            RopeAppend("qkv", i, HEADS, KV_HEADS, HEAD_DIM, "cos", "sin"),
            Attention("qkv", "att", i, HEADS, KV_HEADS, HEAD_DIM),
            NormQuant("att", f"as{i}", 1e-5, "a", "s"),
            TernaryMatmul("a", "s", (f"o{i}",), "x", add=True),
            NormQuant("x", f"fn{i}", 1e-5, "a", "s"),
            TernaryMatmul("a", "s", (f"gate{i}", f"up{i}"), "gu"),
            GluNormQuant("gu", f"fs{i}", 1e-5, "relu2", "h", "s"),
            TernaryMatmul("h", "s", (f"down{i}",), "x", add=True),
        ]
    ops += [NormRows("x", "norm", 1e-5, "y"), DenseMatmul("y", "embd", "logits"), Sample("logits", "token")]
    f32 = {"x": WIDTH, "qkv": qkv + 2 * KV_HEADS * HEAD_DIM, "att": qkv, "gu": 2 * FFN}
    specs = [TensorSpec(name, "f32", ("M", n)) for name, n in f32.items()] + [TensorSpec("s", "f32", ("M",))]
    specs += [TensorSpec(name, "i8", ("M", n)) for name, n in (("a", WIDTH), ("h", FFN))]
    specs += [TensorSpec("y", "f32", ("R", WIDTH)), TensorSpec("logits", "f32", ("R", VOCAB))]
    specs += [TensorSpec("token", "i32", ("R",))]
    kv = KVSpec(LAYERS, KV_HEADS, HEAD_DIM, blocks, BLOCK, kv_dtype)
    return Program(ops, {s.name: s for s in specs}, w, limits, kv, "2B4T, random")


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
    parser.add_argument("--kv-dtype", choices=get_args(KVDtype), default="f16", help="type of the KV cache")
    parser.add_argument("--context", type=int, metavar="POSITIONS", help="measure this context, at least 2048, only")
    parser.add_argument(
        "--sequences", type=int, nargs="+", metavar="N", help="with --context: numbers of sequences that decode (1)"
    )
    args = parser.parse_args()
    if args.context is not None and args.context < CHUNK:
        parser.error(f"--context is {args.context}: the least is {CHUNK}.")
    if args.sequences and not args.context:
        parser.error("--sequences needs --context.")
    counts = args.sequences or [1]
    if not all(1 <= count <= 64 for count in counts):
        parser.error(f"--sequences is {' '.join(map(str, counts))}: between 1 and 64 are possible.")
    selection = select_device(args.device)
    rng = np.random.default_rng(1)
    longest = -(-(args.context or POSITIONS) // BLOCK)
    limits, each = Limits(512, 64, 64, longest), 17
    blocks = longest * max(counts) if args.context else longest + 64 * each
    program = build(rng, limits, blocks, args.kv_dtype)
    print(f"{selection.info.name}: {selection.info.description}, driver {selection.info.driver_version}")
    print(f"KV cache: {args.kv_dtype}, {program.kv.bytes if program.kv else 0:,} bytes")
    device = selection.open()

    def sequence(length: int, tokens: int = 1, first: int = 0, sampling: SamplingParams = GREEDY) -> SequenceStep:
        ids, blocks = rng.integers(0, VOCAB, tokens, np.int32), range(first, first - (-(length + 32) // BLOCK))
        return SequenceStep(ids, length, list(blocks)[: limits.max_blocks], [tokens - 1], sampling)

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
