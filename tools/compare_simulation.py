"""Compare the simulation of a cluster with real replicas on Ray whose steps take the simulation's times.

    chrt --rr 1 uv run --group ray --group simulation tools/compare_simulation.py
    uv run --group ray --group simulation tools/compare_simulation.py --replicas 3 --seconds 120

Client, ingress, router and replicas are real and stream through HTTP; only a step of an engine is a pause, so a few
cores suffice (`cluster_model/paced.py`). What a request costs besides is measured first, one at a time, and the
simulation is given it. It is run several times, each with up to a tenth more or less of that: a little decides which
step a request still meets, and all that follows. The medians are compared. Real-time priority keeps other programs from
delaying steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bitnet.server.bench.client import Client, Target
from bitnet.server.bench.prompts import Prompt
from cluster_model.paced import CONTEXT, PLACES, SPEED, TOKEN
from cluster_model.run import simulate
from cluster_model.traces import Conversation, Shape, conversations
from measure_ray import server
from running import positive, run_tool

SHAPE = Shape(shared=400, sorts=4, turns=4, question=60, answer=20, pause=2.0)
RATE = 0.5
"""Conversations that begin each second on each replica."""
LIMIT = 1.0
"""Seconds to the first token within which an answer is good."""
PROGRAM = ["-c", "from cluster_model.paced import main; main()"]


def trace(replicas: int, seconds: float, rng: random.Random) -> list[Conversation]:
    """Conversations that fit the context."""
    found = conversations(SHAPE, round(RATE * replicas * seconds), RATE * replicas, rng)
    return [one for one in found if one.turns[-1].prompt + one.turns[-1].output <= CONTEXT]


def prompts(talk: Conversation) -> list[Prompt]:
    """The prompts of a conversation as the trace has them: equal where its hashes of blocks are equal."""
    shared, own = (np.random.default_rng(seed) for seed in ((0, talk.sort), (1, talk.key)))
    ids: list[int] = shared.integers(6, 250, SHAPE.shared).tolist()
    found = []
    for turn in talk.turns:
        ids = [*ids, *own.integers(6, 250, turn.prompt - len(ids)).tolist()]
        found.append(Prompt(ids, turn.output))
        ids = [*ids, *[TOKEN] * turn.output]
    return found


async def delay(url: str) -> float:
    """Seconds that a first token takes, one request at a time, besides the engine's step."""
    rng, found = np.random.default_rng(), []
    async with Client(Target(url=url, fields={"ignore_eos": True})) as client:
        for _ in range(20):
            answer = await client.ask(Prompt(rng.integers(6, 250, 20).tolist(), 1))
            found.append(answer.ttft - SPEED.step(1, 20))
    return float(np.median(found))


async def asked(url: str, talks: Sequence[Conversation]) -> tuple[list[float], float]:
    """Have the conversations with the real replicas; return seconds to the first tokens, and to the end."""
    found: list[float] = []
    began = time.monotonic()
    async with Client(Target(url=url, fields={"ignore_eos": True})) as client:

        async def talking(talk: Conversation) -> None:
            await asyncio.sleep(talk.start)
            for turn, prompt in zip(talk.turns, prompts(talk), strict=True):
                await asyncio.sleep(turn.pause)
                found.append((await client.ask(prompt)).ttft)

        await asyncio.gather(*map(talking, talks))
    return found, time.monotonic() - began


def values(ttft: Sequence[float], seconds: float, hits: float) -> list[float]:
    """Answers a second in time, the time to the first token in milliseconds, and the share of cached tokens."""
    times = np.array(ttft)
    return [float((times <= LIMIT).sum()) / seconds, *(np.quantile(times, (0.5, 0.99)) * 1e3), hits]


def cached(url: str) -> float:
    """The mean share of prompts that the replicas' caches had."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return float(np.mean([float(v) for v in re.findall(r"^bitnet_replica_cached_ratio\{.*\} (\S+)$", text, re.M)]))


def compare(replicas: int, seconds: float, draws: int) -> None:
    """Print what simulation and real replicas have of one trace."""
    talks = trace(replicas, seconds, random.Random(random.randrange(1 << 30)))
    options = ["--ray", "--replicas", str(replicas), "--device", "cpu", "-c", str(CONTEXT), "-np", str(PLACES)]
    with server(options, "Logs: ", PROGRAM) as url:
        besides = asyncio.run(delay(url))
        ttft, ended = asyncio.run(asked(url, talks))
        real = values(ttft, ended, cached(url))
    rng = random.Random()
    delays = (besides * rng.uniform(0.9, 1.1) for _ in range(draws))
    runs = (simulate(talks, replicas, SPEED, "prefix", rng, delay=each) for each in delays)
    simulated = np.array([values(list(one.ttft), one.seconds, one.hits) for one in runs])
    print(f"{replicas} replicas, {len(ttft)} requests in {ended:.0f} s, {besides * 1e3:.1f} ms besides steps")
    for name, it, drawn in zip(("answers/s within 1 s", "p50 ms", "p99 ms", "cached"), real, simulated.T, strict=True):
        median = float(np.median(drawn))
        print(
            f"  {name}: real {it:.3g}, simulated {median:.3g} ({drawn.min():.3g} to {drawn.max():.3g}), "
            f"ratio {median / it:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=positive, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seconds", type=positive, default=100, help="during which conversations begin")
    parser.add_argument("--draws", type=positive, default=20, help="runs of the simulation")
    given = parser.parse_args()
    tools = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([tools, *filter(None, [os.environ.get("PYTHONPATH")])])
    for replicas in given.replicas:
        compare(replicas, given.seconds, given.draws)


if __name__ == "__main__":
    run_tool(main)
