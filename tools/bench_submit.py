"""Measure the host's cost per dispatch of submitting a recorded step, which bounds decode on any GPU.

    python tools/bench_submit.py webgpu:0

The step is of a 30-layer model, too small to keep a device busy. Prints the best of several submissions, without the
device's own work on the step, though a software device does it on the same processor meanwhile.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bitnet.core import select_device
from bitnet.core.gpu import GpuDevice
from bitnet.core.gpu.context import Bucket
from bitnet.core.hal import Limits, SequenceStep, Step, StepLayout, run
from bitnet.core.testing.model import BLOCK, TinyModel
from running import run_tool

LAYERS, RUNS = 30, 50
LIMITS = Limits(max_tokens=1, max_blocks=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    selection = select_device(parser.parse_args().device)
    device = selection.open()
    if not isinstance(device, GpuDevice):
        parser.error("only devices that stand on bitnet.core.gpu submit recordings")
    program = TinyModel(np.random.default_rng(0), layers=LAYERS).program(LIMITS, LIMITS.max_blocks)
    executable = device.compile(program)
    step = Step(StepLayout(LIMITS), [SequenceStep([1], 1, [0], [0])], block_size=BLOCK)
    best = float("inf")
    for _ in range(RUNS):
        run(executable, step)
        recording, _, dispatches = executable._recording(Bucket(1, 1, LIMITS.max_blocks * BLOCK))
        start = time.perf_counter()
        device._driver.submit(recording)
        best = min(best, time.perf_counter() - start)
    print(f"{device.info.description}: {dispatches} dispatches submitted in {best * 1e6:.0f} us")
    print(f"{best * 1e6 / dispatches:.2f} us a dispatch, at most {1 / best:.0f} steps a second")
    device.close()


if __name__ == "__main__":
    run_tool(main)
