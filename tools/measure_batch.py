"""Rows a second of `bitnet batch --ray` with several replicas, and of as many `bitnet batch` that share the rows.

    uv run --group ray tools/measure_batch.py
    uv run --group ray tools/measure_batch.py --rows 10000 --engines 2 --rounds 5

A round measures both, in random order. The time before the first tenth of the answers, which has the start of cluster
and models in it, and after nine tenths of them does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bitnet.core.errors import BitNetError
from running import positive, run_tool

LOOK_SECONDS = 0.05
OPTIONS = ["--device", "cpu", "-t", "1", "-c", "256", "-np", "16"]


def write_rows(path: Path, numbers: Sequence[int], tokens: int) -> None:
    """Write a file of requests with prompts that share nothing."""
    with path.open("w") as out:
        for number in numbers:
            body = {"prompt": f"{number}: once upon a time", "max_tokens": tokens, "ignore_eos": True}
            out.write(json.dumps({"custom_id": str(number), "url": "/v1/completions", "body": body}) + "\n")


def rate(commands: Sequence[Sequence[str]], outputs: Sequence[Path], counts: Sequence[int]) -> float:
    """Rows a second of commands that run at the same time, while all of them do.

    Raises:
        BitNetError: One fails.
    """
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        marks: list[tuple[float, int]] = []
        for share, every in ((0.1, all), (0.9, any)):
            while True:
                done = [_lines(output) for output in outputs]
                if every(lines >= share * count for lines, count in zip(done, counts, strict=True)):
                    break
                for process in running:
                    if process.poll():
                        _, why = process.communicate()
                        raise BitNetError(f"'{' '.join(map(str, process.args))}' failed: {why.strip()}")  # type: ignore[arg-type]
                time.sleep(LOOK_SECONDS)
            marks.append((time.monotonic(), sum(done)))
        for process in running:
            process.communicate()
    finally:
        for process in running:
            process.kill()
    (began, first), (ended, last) = marks
    return (last - first) / (ended - began)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def measure(folder: Path, rows: int, engines: int, tokens: int) -> tuple[float, float]:
    """Rows a second of the engines alone, and of Ray with as many replicas, in random order."""
    numbers = random.sample(range(10**8), rows)
    rates = [0.0, 0.0]
    for with_ray in random.sample((False, True), 2):
        parts = [numbers] if with_ray else [numbers[i::engines] for i in range(engines)]
        inputs = [folder / f"in{i}.jsonl" for i in range(len(parts))]
        outputs = [folder / f"out{i}.jsonl" for i in range(len(parts))]
        for path, part in zip(inputs, parts, strict=True):
            write_rows(path, part, tokens)
        more = ["--ray", "--replicas", str(engines)] if with_ray else []
        command = [sys.executable, "-m", "bitnet.core", "batch", *OPTIONS, *more]
        commands = [[*command, "-i", str(i), "-o", str(o)] for i, o in zip(inputs, outputs, strict=True)]
        rates[with_ray] = rate(commands, outputs, [len(part) for part in parts])
        for path in (*inputs, *outputs):
            path.unlink()
    return rates[0], rates[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive, default=4000)
    parser.add_argument("--engines", type=positive, default=2)
    parser.add_argument("--tokens", type=positive, default=16, help="that each row generates")
    parser.add_argument("--rounds", type=positive, default=3)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = [measure(Path(folder), given.rows, given.engines, given.tokens) for _ in range(given.rounds)]
    ratios = [with_ray / alone for alone, with_ray in found]
    print("rows/s, engines alone|Ray:", ", ".join(f"{a:.0f}|{b:.0f}" for a, b in found))
    print(f"  ratio: median {np.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    run_tool(main)
