"""Compare with another engine on this machine, pair by pair: `bitnet bench`, then its `llama-bench`.

    uv run python tools/bench_peers.py --peer llama.cpp/build/bin/llama-bench --peer-model tq2_0.gguf \\
        -m i2_s.gguf -t 2 -p 512 -n 128 --rounds 5

A machine's speed drifts, and the ratio of two runs made one after the other drifts least. So each round runs both, in
turns as to which is first, for one test at a time, and the median over the rounds is what counts. Each run warms up
before it measures. Both compute on the CPU: the peer has to be built for that. A peer that needs options of its own to
be at its best is named by a script that adds them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet.core.cpu.threads import default_threads
from bitnet.core.devices.options import open_options
from bitnet.core.errors import BitNetError, InvalidInputError


@dataclass(frozen=True, slots=True)
class Bench:
    """A program with llama-bench's options that prints JSON."""

    name: str
    command: tuple[str, ...]

    def speed(self, prompt: int, gen: int, threads: int) -> float:
        """Tokens a second, once, of prefill (``gen`` 0) or of decode (``prompt`` 0).

        Raises:
            BitNetError: It does not run, or prints something else.
        """
        arguments = ["-p", prompt, "-n", gen, "-t", threads, "-r", 1]
        printed = self._run([*self.command, *map(str, arguments)])
        try:
            speed, used = read_bitnet(printed) if self.name == "bitnet" else read_llama_bench(printed, prompt, gen)
        except (ValueError, LookupError, TypeError) as error:
            start = " ".join(printed.split())[:80] or "nothing"
            raise BitNetError(f"{self.name} printed no result that can be read ({error!r}): {start}") from error
        if not (math.isfinite(speed) and speed > 0):
            raise BitNetError(f"{self.name} printed {speed} tokens/s.")
        if used != threads:
            raise BitNetError(f"{self.name} ran with {used} threads, not {threads}.")
        return speed

    def _run(self, command: list[str]) -> str:
        try:
            done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        except OSError as error:
            raise BitNetError(f"{command[0]} cannot be run: {error.strerror}.") from error
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing on standard error"]
            raise BitNetError(f"{self.name} ended with status {done.returncode}: {said[-1].strip()}")
        return done.stdout


def read_bitnet(printed: str) -> tuple[float, int]:
    """Tokens a second and threads, from ``bitnet bench --json``."""
    (row,) = json.loads(printed)["results"]
    return float(row["tokens_per_second"]), row["threads"]


def read_llama_bench(printed: str, prompt: int, gen: int) -> tuple[float, int]:
    """Tokens a second and threads, from ``llama-bench -o json``: an array of tests, ``avg_ts`` being their speeds."""
    rows = [row for row in json.loads(printed) if (row["n_prompt"], row["n_gen"]) == (prompt, gen)]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} tests of {prompt} prompt and {gen} generated tokens")
    return float(rows[0]["avg_ts"]), rows[0]["n_threads"]


def compare(
    ours: Bench, peer: Bench, prompt: int, gen: int, threads: int, rounds: int, *, quiet: bool
) -> dict[str, Any]:
    """One test's pairs and the median of their ratios, ours to the peer's; a line for each where not ``quiet``."""
    test = f"pp{prompt}" if prompt else f"tg{gen}"
    pairs = []
    for number in range(rounds):
        both = (ours, peer) if number % 2 == 0 else (peer, ours)
        speeds = {bench.name: bench.speed(prompt, gen, threads) for bench in both}
        pair = {"bitnet": speeds["bitnet"], "peer": speeds["peer"], "ratio": speeds["bitnet"] / speeds["peer"]}
        pairs.append(pair)
        if not quiet:
            print(f"{test:<8}{pair['bitnet']:>12.2f}{pair['peer']:>12.2f}{pair['ratio']:>8.2f}", flush=True)
    ratio = statistics.median(pair["ratio"] for pair in pairs)
    if not quiet:
        print(f"{test:<8}{'median':>24}{ratio:>8.2f}", flush=True)
    return {"test": test, "pairs": pairs, "median_ratio": ratio}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or the error's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, metavar="FILE", help="the peer's llama-bench")
    parser.add_argument(
        "--peer-model", type=Path, required=True, metavar="FILE", help="the model, as the peer reads it"
    )
    parser.add_argument("-m", "--model", type=Path, required=True, metavar="FILE", help="the model, as bitnet reads it")
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="of both; default: one for each physical core")
    parser.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="prompt to prefill; 0: none")
    parser.add_argument("-n", "--n-gen", type=int, default=128, metavar="N", help="tokens to decode; 0: none")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="pairs of each test")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(argv)
    try:
        print_comparison(given)
    except BitNetError as error:
        print(f"bench_peers: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def print_comparison(given: argparse.Namespace) -> None:
    """Check what was asked for, run it, print it.

    Raises:
        InvalidInputError: A number is out of its range, or a file is not there.
        BitNetError: One of the two does not run, or prints something else.
    """
    threads = (open_options().threads or default_threads()) if given.threads is None else given.threads
    for name, value, least in (
        ("-t", threads, 1),
        ("-p", given.n_prompt, 0),
        ("-n", given.n_gen, 0),
        ("--rounds", given.rounds, 1),
    ):
        if value < least:
            raise InvalidInputError(f"{name} is {value}; it must be at least {least}.")
    tests: list[tuple[int, int]] = [test for test in ((given.n_prompt, 0), (0, given.n_gen)) if any(test)]
    if not tests:
        raise InvalidInputError("there is nothing to measure: -p and -n are both 0.")
    for option, path in (("--peer", given.peer), ("--peer-model", given.peer_model), ("--model", given.model)):
        if not path.is_file():
            raise InvalidInputError(f"{option} {path} is no file.")
    bench = (sys.executable, "-m", "bitnet.core", "bench", "--device", "cpu", "--json", "-m", str(given.model))
    ours = Bench("bitnet", bench)
    peer = Bench("peer", (str(given.peer.resolve()), "-o", "json", "-m", str(given.peer_model)))
    if not given.json:
        print(f"tokens/s with -t {threads}\n{'test':<8}{'bitnet':>12}{'peer':>12}{'ratio':>8}", flush=True)
    results = [compare(ours, peer, p, n, threads, given.rounds, quiet=given.json) for p, n in tests]
    if given.json:
        files = {name: str(getattr(given, name)) for name in ("model", "peer", "peer_model")}
        print(json.dumps({**files, "threads": threads, "results": results}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
