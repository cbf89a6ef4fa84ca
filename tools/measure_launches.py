"""Where the time of a step goes on a GPU: each kind of launch in its place.

    python tools/measure_launches.py cuda:0 --sequences 1 8 64
    python tools/measure_launches.py cuda:0 --prompt 2048 --layers 8

The model has the shape of Bonsai 2 27B, or a small one's, with random weights, fewer layers and a small vocabulary. A
launch's time is that of the step less that of the step without all launches of its kind, divided by their number. So
what overlaps with other launches is not counted, and times of a few microseconds are uncertain by one. In prompts the
clock depends on what runs, so those differences are rough.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench_device import BLOCK, build_hybrid
from bitnet.core import select_device
from bitnet.core.gpu import GpuExecutable, Launch
from bitnet.core.gpu.ops import advance
from bitnet.core.gpu.plan import lower
from bitnet.core.hal import GREEDY, Limits, SequenceStep, Step, StepLayout, run
from random_shapes import PRESETS, HybridShape
from running import positive, run_tool

CONTEXT, SEQS, TOKENS, VOCABULARY = 480, 64, 2048, 32_768
ROUNDS = 5
MODELS = "bonsai-27b", "bonsai-27b-small"
SHOWN = {"COLS", "DIM", "ADD", "GLU", "PAIR", "KIND", "GATES", "BM", "BN"}
"""Constants of a kernel that tell its launches from others of the same kernel."""


def seconds(executable: GpuExecutable, launches: Sequence[Launch], step: Step) -> float:
    """The least time of a step of these launches, of which many are submitted at once."""
    driver, context, ended = executable._driver, executable.context, np.empty(1, np.int32)
    recording, count, best = driver.record(launches), 30 if step.tokens <= SEQS else 6, float("inf")
    for _ in range(ROUNDS):
        driver.upload(context.step, step.data)
        driver.download(context.history, ended)
        begin = time.perf_counter()
        for _ in range(count):
            driver.submit(recording)
        driver.download(context.history, ended)
        best = min(best, (time.perf_counter() - begin) / count)
    return best


def measure(executable: GpuExecutable, step: Step) -> None:
    context, lowering = executable.context, executable._lowering
    launches = [*lower(context, executable._bucket(step, 1), lowering.table), advance(context)]
    whole = seconds(executable, launches, step)
    print(f"{step.tokens} tokens of {step.seqs} sequences: {whole * 1e6:.1f} µs, {len(launches)} launches", flush=True)
    kinds = dict.fromkeys((launch.kernel, launch.grid) for launch in launches)
    for kernel, grid in kinds:
        rest = [launch for launch in launches if (launch.kernel, launch.grid) != (kernel, grid)]
        number = len(launches) - len(rest)
        each = (whole - seconds(executable, rest, step)) / number * 1e6
        named = " ".join(f"{name}={value}" for name, value in kernel.defines if name in SHOWN)
        print(f"{number:4d} × {each:8.2f} µs  {kernel.entry} {grid} {named}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="such as cuda:0")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="whose shape the model has")
    parser.add_argument(
        "--sequences", type=positive, nargs="*", default=[], metavar="N", help="that decode a token each"
    )
    parser.add_argument("--prompt", type=positive, nargs="*", default=[], metavar="N", help="tokens of a prompt")
    parser.add_argument("--layers", type=positive, default=4, metavar="N", help="layers of the model (4)")
    args = parser.parse_args()
    if max(args.sequences, default=1) > SEQS or max(args.prompt, default=1) > TOKENS:
        parser.error(f"At most {SEQS} sequences and prompts of {TOKENS} tokens are possible.")
    shape = PRESETS[args.model]
    assert isinstance(shape, HybridShape)
    shape, rng = replace(shape, layers=args.layers, vocab=VOCABULARY), np.random.default_rng(1)
    each = -(-(CONTEXT + BLOCK) // BLOCK)
    limits = Limits(TOKENS, SEQS, SEQS, TOKENS // BLOCK + 1)
    program = build_hybrid(shape, rng, limits, limits.max_blocks + SEQS * each, "f16")
    layout = StepLayout(limits)

    def sequence(length: int, tokens: int, number: int) -> SequenceStep:
        first = number * each
        ids, blocks = rng.integers(0, shape.vocab, tokens, np.int32), range(first, first - (-(length + 1) // BLOCK))
        return SequenceStep(
            ids, length, [*blocks], [tokens - 1], GREEDY, state_from=-1 if tokens == length else number, state_to=number
        )

    device = select_device(args.device).open()
    try:
        executable = device.compile(program)
        assert isinstance(executable, GpuExecutable)
        run(executable, Step(layout, [sequence(1, 1, i) for i in range(SEQS)]))  # so that states hold numbers
        for count in args.sequences:
            measure(executable, Step(layout, [sequence(CONTEXT, 1, i) for i in range(count)], logits=False))
        for count in args.prompt:
            measure(executable, Step(layout, [sequence(count, count, 0)], logits=False))
    finally:
        device.close()


if __name__ == "__main__":
    run_tool(main)
