"""Time of `bitnet run` from its start to the first text on standard output, and to its end.

    uv run python tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run python tools/measure_first_token.py --device cuda:0 /tmp/2b4t.gguf

Each round is a fresh process. Two before them, which do not count, bring the file into the page cache, compile the
kernels and write the bytecode of modules, as an installer does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from running import positive

MAIN = "import sys; from bitnet.core.cli import main; sys.exit(main())"


def measure(model: Path, device: str) -> tuple[float, float]:
    """Seconds to the first text and to the end of the process."""
    arguments = ["run", "-m", str(model), "--device", device, "-n", "1", "The capital of France is"]
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 1 << 16)
        first = time.perf_counter() - begin
        process.communicate()
    if process.returncode or not text:
        raise SystemExit(f"bitnet run ended with {process.returncode}")
    return first, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=positive, default=10)
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    times = [measure(arguments.model, arguments.device) for _ in range(2 + arguments.rounds)][2:]
    for name, values in zip(("first text", "end"), zip(*times, strict=True), strict=True):
        print(f"{name:10}  best {min(values):.2f} s   median {statistics.median(values):.2f} s")


if __name__ == "__main__":
    main()
