"""What one bit a weight gains on a CPU: the products of a model's layers, as ternary codes and declared binary.

    uv run tools/bench_one_bit.py cpu:avx512
    uv run tools/bench_one_bit.py cpu:avx512 --tokens 8 --layers 4 --rounds 16 --threads 1 --processor-time

The products are those of Bonsai 1.7B's layers, with random weights of -1 and +1 in groups of 128. A round runs both
programs, in turns; their outputs must be the same bits. ``--processor-time`` suits a shared machine, with one thread.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np

from bitnet.core import select_device
from bitnet.core.devices.registry import open_device
from bitnet.core.errors import BitNetError
from bitnet.core.hal import (
    Device,
    Executable,
    Limits,
    Op,
    OpenOptions,
    Program,
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
from running import positive, run_tool

WIDTH, KEYS, FFN, GROUP = 2048, 1024, 6144, 128
SHAPES = {
    "q": (WIDTH, WIDTH),
    "k": (KEYS, WIDTH),
    "v": (KEYS, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate": (FFN, WIDTH),
    "up": (FFN, WIDTH),
    "down": (WIDTH, FFN),
}
OUTPUTS = {"qkv": WIDTH + 2 * KEYS, "gu": 2 * FFN, "y": WIDTH}
BYTES = np.array([a << 6 | b << 4 | c << 2 | d for a, b, c, d in itertools.product((0, 2), repeat=4)], np.uint8)


def weight(n: int, k: int, binary: bool) -> TernaryWeight:
    def load() -> TernaryData:
        codes = np.random.default_rng(n * k).choice(BYTES, (n, k // 4))
        return TernaryData(codes, np.full((n, k // GROUP), 0.02, np.float16))

    return TernaryWeight((n, k), load, group=GROUP, binary=binary)


def build(device: Device, tokens: int, layers: int, binary: bool) -> Executable:
    """The products of all layers, compiled."""
    weights, ops = dict[str, Weight](), list[Op]()
    for i in range(layers):
        weights |= {f"{name}{i}": weight(*shape, binary) for name, shape in SHAPES.items()}
        ops += [
            TernaryMatmul("a", "s", (f"q{i}", f"k{i}", f"v{i}"), "qkv"),
            TernaryMatmul("a", "s", (f"o{i}",), "y"),
            TernaryMatmul("a", "s", (f"gate{i}", f"up{i}"), "gu"),
            TernaryMatmul("h", "s", (f"down{i}",), "y"),
        ]
    tensors = [TensorSpec(name, "i8", ("M", n)) for name, n in (("a", WIDTH), ("h", FFN))]
    tensors += [TensorSpec(name, "f32", ("M", n)) for name, n in OUTPUTS.items()] + [TensorSpec("s", "f32", ("M",))]
    return device.compile(Program(ops, {t.name: t for t in tensors}, weights, Limits(tokens)), keep=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--tokens", type=positive, default=1)
    parser.add_argument("--layers", type=positive, default=28)
    parser.add_argument("--rounds", type=positive, default=100)
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--processor-time", action="store_true", help="of this process instead of the time that passed")
    given = parser.parse_args()
    clock = time.process_time if given.processor_time else time.perf_counter
    device = open_device(select_device(given.device).info, OpenOptions(threads=given.threads))
    programs = [build(device, given.tokens, given.layers, binary) for binary in (False, True)]
    step = Step(StepLayout(Limits(given.tokens)), [SequenceStep([0] * given.tokens, given.tokens)])
    rng = np.random.default_rng()
    inputs = {
        name: rng.integers(-127, 128, (given.tokens, n)).astype(np.int8) for name, n in (("a", WIDTH), ("h", FFN))
    }
    for program in programs:
        for name, values in {**inputs, "s": np.ones(given.tokens, np.float32)}.items():
            program.write(name, values)
        run(program, step)
    for name in OUTPUTS:
        if programs[0].read(name, given.tokens).tobytes() != programs[1].read(name, given.tokens).tobytes():
            raise BitNetError(f"the outputs {name} differ.")
    seconds = []
    for number in range(given.rounds):
        took = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            began = clock()
            run(programs[which], step)
            took[which] = clock() - began
        seconds.append(took)
    ratios = [ternary / binary for ternary, binary in seconds]
    low, high = np.quantile(ratios, (0.25, 0.75))
    megabytes = [program.stats().weight_bytes / 1e6 for program in programs]
    best = [min(times) * 1e3 for times in zip(*seconds, strict=True)]
    print(f"{given.tokens} tokens, {given.layers} layers, MB read: {megabytes[0]:.0f}, in one bit {megabytes[1]:.0f}")
    print(f"ternary / one bit: median {statistics.median(ratios):.2f}, quartiles {low:.2f} and {high:.2f}")
    print(f"best, ms: {best[0]:.2f}, in one bit {best[1]:.2f}")


if __name__ == "__main__":
    run_tool(main)
