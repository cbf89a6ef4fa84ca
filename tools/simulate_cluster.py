"""Simulate clusters of replicas under conversations of chats and agents, with four ways to choose a replica.

    uv run --group simulation tools/simulate_cluster.py simulation.json
    uv run --group simulation tools/simulate_cluster.py simulation.json --draw simulation.svg

The first command simulates and writes the figures; the second draws them. Step times are those of BitNet b1.58 2B4T on
an H200 (docs/measurements/cuda.md, the whole step).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from cluster_model.replica import Speed
from cluster_model.routing import WAYS
from cluster_model.run import Failure, Outcome, simulate
from cluster_model.traces import AGENTS, CHATS, Shape, conversations
from running import positive, run_tool

H200 = Speed(
    sequences=(1, 8, 64),
    seconds=(530e-6, 813e-6, 2374e-6),
    prompt_seconds=(4497e-6 - 530e-6) / 512,
    places=64,
    chunk=512,
    blocks=20_000,
)
TRACES: dict[str, tuple[Shape, float]] = {"agents": (AGENTS, 3.0), "chats": (CHATS, 5.0)}
"""The traces, and the conversations that begin each second on each replica."""


def figures(outcome: Outcome) -> dict[str, float]:
    """What is written of a simulation."""
    return {
        "requests": len(outcome.ttft),
        "seconds": round(outcome.seconds, 1),
        "p50_ms": round(float(np.quantile(outcome.ttft, 0.5)) * 1e3, 1),
        "p99_ms": round(float(np.quantile(outcome.ttft, 0.99)) * 1e3, 1),
        "hits": round(outcome.hits, 3),
        "goodput": round(outcome.goodput, 1),
        "lost": outcome.lost,
        "repeated": outcome.repeated,
    }


def simulated(counts: list[int], seconds: float, failed: float, seed: int) -> list[dict[str, Any]]:
    """A row for each trace, number of replicas and way; a share ``failed`` of the replicas is lost half-way."""
    rows = []
    for trace, (shape, rate) in TRACES.items():
        for replicas in counts:
            number = round(rate * replicas * seconds)
            talks = conversations(shape, number, rate * replicas, random.Random(seed))
            for way in WAYS:
                failure = Failure(seconds / 2, failed) if failed else None
                began = time.monotonic()
                outcome = simulate(talks, replicas, H200, way, random.Random(seed), failure=failure)
                row = {"trace": trace, "replicas": replicas, "way": way, "failed": failed, **figures(outcome)}
                print(json.dumps(row), f"{time.monotonic() - began:.1f} s", flush=True)
                rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw p99 of the time to the first token, and the share of cached tokens, by the number of replicas."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "bitnet"
    figure, axes = plt.subplots(2, len(TRACES), figsize=(9, 6), sharex=True, squeeze=False)
    for column, trace in enumerate(TRACES):
        for way in WAYS:
            found = [r for r in rows if (r["trace"], r["way"], r["failed"]) == (trace, way, 0)]
            for line, name in enumerate(("p99_ms", "hits")):
                axes[line][column].plot([r["replicas"] for r in found], [r[name] for r in found], marker="o", label=way)
        axes[0][column].set(title=trace, yscale="log", xscale="log", ylabel="p99 of the first token, ms")
        axes[1][column].set(ylim=(0, 1), xlabel="replicas", ylabel="share of prompts that is cached")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file of the figures")
    parser.add_argument("--replicas", type=positive, nargs="+", default=[16, 64])
    parser.add_argument("--seconds", type=positive, default=20, help="during which conversations begin")
    parser.add_argument("--failed", type=float, default=0.0, metavar="SHARE", help="share of the replicas that fails")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draw", type=Path, metavar="SVG", help="draw the file's figures")
    given = parser.parse_args()
    if given.draw is not None:
        draw(json.loads(given.file.read_text()), given.draw)
        return
    rows = simulated(given.replicas, given.seconds, given.failed, given.seed)
    given.file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    run_tool(main)
