"""How many times as many tokens a second several replicas of `bitnet serve --ray` give as one, through HTTP.

    uv run --group ray tools/measure_ray_replicas.py -m model.gguf --gpus-per-replica 1
    uv run --group ray tools/measure_ray_replicas.py --replicas 3 --streams 16 --rounds 3

One replica is served and measured first, then all of them, each with ``--streams`` streams that begin a request when
the last one has ended. The clients are processes of 16 streams, because one process cannot read the events of a fast
GPU. RAY_SERVE_ENABLE_HA_PROXY=1 in the environment is passed on (docs/serve-ray.md).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier

import numpy as np

from bitnet.server.bench.prompts import Prompt, Random
from measure_ray import load, server
from running import positive, run_tool

STREAMS = 16
"""Streams of a client's process."""

_begin: list[Barrier] = []
"""What the clients' processes wait for, so that all begin together."""


def _start_client(begin: Barrier) -> None:
    _begin.append(begin)


def _ask(url: str, prompts: Sequence[Prompt], streams: int) -> tuple[float, float, int]:
    """When a client began and ended, on the clock of the whole machine, and how many tokens it got."""
    _begin[0].wait()
    began = time.monotonic()
    found = asyncio.run(load(url, prompts, streams))
    return began, time.monotonic(), sum(answer.output_tokens for answer in found.answers)


def rates(url: str, streams: int, given: argparse.Namespace) -> list[float]:
    """Tokens a second of each round; a first round does not count."""
    shares = [STREAMS] * (streams // STREAMS) + [streams % STREAMS] * (streams % STREAMS > 0)
    context = multiprocessing.get_context("spawn")
    shape, found = Random(input=given.prompt, output=given.tokens), []
    with context.Pool(len(shares), _start_client, (context.Barrier(len(shares)),)) as pool:
        for _ in range(given.rounds + 1):
            rng = np.random.default_rng(time.monotonic_ns())
            tasks = []
            for share in shares:
                prompts = [Prompt(ids, output) for ids, output in shape.draw(share * given.requests, 250, rng)]
                tasks.append((url, prompts, share))
            ended = pool.starmap(_ask, tasks, chunksize=1)
            seconds = max(end for _, end, _ in ended) - min(begin for begin, _, _ in ended)
            found.append(sum(count for _, _, count in ended) / seconds)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="a model file instead of the demo model")
    parser.add_argument("--replicas", type=positive, default=2)
    parser.add_argument("--gpus-per-replica", type=float, help="default: on the CPU, one thread each")
    parser.add_argument("--streams", type=positive, default=64, help="of each replica")
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=256, help="that each answer has")
    parser.add_argument("--requests", type=positive, default=4, help="one after the other, of each stream")
    parser.add_argument("--rounds", type=positive, default=5)
    given = parser.parse_args()
    queue = str(given.streams * given.replicas)  # so that a router which sends too many to one replica costs time only
    common = ["--ray", "-np", str(given.streams), "--max-queue", queue, "-c", str(given.prompt + given.tokens)]
    common += ["--device", "cpu", "-t", "1"] if given.gpus_per_replica is None else []
    common += [] if given.gpus_per_replica is None else ["--gpus-per-replica", str(given.gpus_per_replica)]
    common += [] if given.model is None else ["-m", given.model]
    medians = []
    for replicas in (1, given.replicas):
        with server([*common, "--replicas", str(replicas)], "Logs: ") as url:
            found = rates(url, replicas * given.streams, given)
        medians.append(float(np.median(found)))
        streams = f"{replicas * given.streams} streams, {replicas} replica{'s' * (replicas > 1)}"
        print(f"{streams}: {', '.join(f'{r:.0f}' for r in found)} tokens/s, median {medians[-1]:.0f}", flush=True)
    print(f"ratio: {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    run_tool(main)
