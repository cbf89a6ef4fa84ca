"""Whether compute-sanitizer understands how the CUDA kernels use barriers and the copy engine.

    uv run python tools/sanitizer_patterns.py                       # the compute-sanitizer that is on the PATH
    uv run python tools/sanitizer_patterns.py --sanitizer FILE      # another one

Each pattern of sanitizer_patterns.cu runs under a tool in right forms and in a wrong one. A tool that reports a right
form does not understand the pattern; one that does not report the wrong form cannot be relied upon there. The exit
status is 1 if there is such a pattern. docs/measurements/sanitizers.md keeps the results, with their dates.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from running import run_tool
from sanitize import errors_in_summary

SOURCE = Path(__file__).with_suffix(".cu")
KERNELS = Path(__file__).parents[1] / "kernels" / "cuda"
ROUNDS, WARP = 8, 32
COUNT = 10_005
"""Halves of the allocation of half_a_word: two bytes less than whole words."""


class Pattern(NamedTuple):
    """A kernel in one form.

    Attributes:
        wrong: It has the fault that the tool is to find.
    """

    kernel: str
    tool: str
    form: str
    defines: dict[str, int]
    wrong: bool = False


EVERY, WRONG = {"EVERY_LANE_ARRIVES": 1}, {"RACES": 1}
PATTERNS = [
    Pattern("handed_over", "racecheck", "one lane arrives for its warp", {}),
    Pattern("handed_over", "racecheck", "every lane arrives", EVERY),
    Pattern("handed_over", "racecheck", "read before the wait", EVERY | WRONG, wrong=True),
    Pattern("refilled", "racecheck", "one lane arrives for its warp", {}),
    Pattern("refilled", "racecheck", "every lane arrives", EVERY),
    Pattern("refilled", "racecheck", "filled before the wait", EVERY | WRONG, wrong=True),
    Pattern("refilled", "racecheck", "8 lanes copy, one arrives for its warp", {"COPIERS": 8}),
    Pattern("refilled", "racecheck", "8 lanes copy, every lane arrives", {"COPIERS": 8} | EVERY),
    Pattern("own_barriers", "racecheck", "as it is", {}),
    Pattern("own_barriers", "racecheck", "__syncwarp() after the barriers are made", {"SYNCED": 1}),
    Pattern("own_barriers", "racecheck", "read before the wait", {"SYNCED": 1} | WRONG, wrong=True),
    Pattern("own_barriers", "synccheck", "as it is", {}),
    Pattern("half_a_word", "memcheck", "two bytes", {}),
    Pattern("half_a_word", "memcheck", "four bytes", WRONG, wrong=True),
]
LIMIT = 60
"""Seconds that a pattern may take."""


def run_pattern(pattern: Pattern) -> None:
    """Run it on the first CUDA device. A right form has to give the right result.

    Raises:
        AssertionError: It does not.
    """
    from cuda.bindings import driver

    from bitnet.cuda.compiler import compile_source
    from bitnet.cuda.device import architecture, capability_of
    from bitnet.cuda.driver import check

    def call(result: tuple[Any, ...]) -> Any:
        return check("cuda:0", result)

    call(driver.cuInit(0))
    device = call(driver.cuDeviceGet(0))
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(device))))
    defines = {"RACES": 0, "COPIERS": 1, "SYNCED": 0} | pattern.defines
    arch = architecture(capability_of(device, "cuda:0"))
    flags = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    text = "".join(file.read_text() for file in (KERNELS / "common.cuh", KERNELS / "hopper.cuh", SOURCE))
    cubin = compile_source(text, SOURCE.name, flags, "cuda:0")
    function = call(driver.cuModuleGetFunction(call(driver.cuModuleLoadData(cubin)), pattern.kernel.encode()))
    halves = pattern.kernel == "half_a_word"
    given = np.arange(1, COUNT + 1, dtype=np.uint16) if halves else np.arange(ROUNDS * WARP, dtype=np.int32) * 7 + 3
    found = np.zeros(1 if halves else ROUNDS * WARP, np.int32)
    to_device, from_device = (call(driver.cuMemAlloc(array.nbytes)) for array in (given, found))
    call(driver.cuMemcpyHtoD(to_device, given.ctypes.data, given.nbytes))
    arguments = (int(to_device), int(from_device), COUNT)[: 3 if halves else 2]
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)[: len(arguments)]
    threads = WARP if halves else 2 * WARP
    call(driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, (arguments, kinds), 0))
    call(driver.cuMemcpyDtoH(found.ctypes.data, from_device, found.nbytes))
    rows = 2 if pattern.kernel == "own_barriers" else ROUNDS
    right = given[-1:] if halves else given.reshape(ROUNDS, WARP)[:rows, ::-1].reshape(-1)
    assert pattern.wrong or (found[: right.size] == right).all(), f"{pattern.kernel} gives another result"


def main() -> int:
    """Exit status: 0 where each right form is clean and each wrong form is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="FILE", help="the tool to ask")
    parser.add_argument("--run", type=int, metavar="N", help="only run the pattern of this number, under no tool")
    given = parser.parse_args()
    if given.run is not None:
        run_pattern(PATTERNS[given.run])
        return 0
    print("| pattern | form | tool | found | |\n| --- | --- | --- | --- | --- |", flush=True)
    understood = True
    with tempfile.TemporaryDirectory() as folder:
        for number, pattern in enumerate(PATTERNS):
            log = Path(folder) / f"{number}.log"
            command = [given.sanitizer, "--tool", pattern.tool, "--log-file", str(log), "--num-cuda-barriers", "64"]
            command += [sys.executable, __file__, "--run", str(number)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
            if done.returncode:
                print(done.stdout + done.stderr, file=sys.stderr)
            text = log.read_text() if log.exists() else ""
            if "SUMMARY" not in text:
                raise OSError(f"{given.sanitizer} did not finish: {text}")
            found = errors_in_summary(text)
            right = bool(found) == pattern.wrong
            understood &= right
            print(
                f"| {pattern.kernel} | {pattern.form} | {pattern.tool} | {found} |"
                f" {'' if right else 'not found' if pattern.wrong else 'reported, though right'} |",
                flush=True,
            )
    return 0 if understood else 1


if __name__ == "__main__":
    run_tool(main)
