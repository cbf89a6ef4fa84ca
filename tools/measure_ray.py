"""What `bitnet serve --ray` costs beside `bitnet serve`, in pairs: first tokens at one stream, tokens a second at many.

    uv run --group ray tools/measure_ray.py
    uv run --group ray tools/measure_ray.py --rounds 20 -m model.gguf

Both serve the same model with one thread, and run at the same time; one is idle while the other is measured. A pair is
one measurement of each, in random order, with the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from bitnet.core.errors import BitNetError
from bitnet.server.bench.client import Client, Outcome, Target, press
from bitnet.server.bench.prompts import Prompt, Random
from running import positive, run_tool

START_SECONDS = 300


@contextmanager
def server(arguments: Sequence[str], ready: str, program: Sequence[str] = ("-m", "bitnet.core")) -> Iterator[str]:
    """Run `bitnet serve` with these arguments until the context ends; its value is the server's address.

    Args:
        program: Arguments of Python that stand for `bitnet`.
    """
    port = random.randrange(10_000, 20_000)  # below those that the system gives Ray's processes meanwhile
    command = [sys.executable, *program, "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        last = ""
        for line in process.stderr:
            if ready in line:
                break
            last = line.strip() or last
        else:
            raise BitNetError(f"'{' '.join(command)}' ended with {process.wait()}: {last}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


async def load(url: str, prompts: Sequence[Prompt], streams: int) -> Outcome:
    """Send prompts to a server, ``streams`` at a time."""
    async with Client(Target(url=url, fields={"temperature": 0, "ignore_eos": True})) as client:
        found = await press(client, prompts, [0.0] * len(prompts), streams)
    if found.failures:
        raise BitNetError(f"{url}: {found.failures}")
    return found


def first_token(found: Outcome) -> float:
    """The median TTFT in milliseconds."""
    return float(np.median([answer.ttft for answer in found.answers])) * 1e3


def rate(found: Outcome) -> float:
    """Generated tokens a second."""
    return sum(answer.output_tokens for answer in found.answers) / found.seconds


def quartiles(values: Sequence[float]) -> str:
    """The median and the quartiles."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"median {median:.3g}, quartiles {low:.3g} and {high:.3g}"


def pairs(
    urls: tuple[str, str], shape: Random, count: int, streams: int, rounds: int, value: Callable[[Outcome], float]
) -> list[tuple[float, float]]:
    """The values of both servers, a pair a round. A first round does not count."""
    found = []
    for _ in range(rounds + 1):
        rng = np.random.default_rng(time.monotonic_ns())
        prompts = [Prompt(ids, output) for ids, output in shape.draw(count, 250, rng)]
        both = [0.0, 0.0]
        for which in random.sample((0, 1), 2):
            both[which] = value(asyncio.run(load(urls[which], prompts, streams)))
        found.append((both[0], both[1]))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="a model file instead of the demo model")
    parser.add_argument("--streams", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=200, help="that each of them generates")
    parser.add_argument("--rounds", type=positive, default=10)
    given = parser.parse_args()
    common = ["--device", "cpu", "-t", "1", "-c", "1024", "-np", str(given.streams)]
    common += [] if given.model is None else ["-m", given.model]
    with ExitStack() as stack:
        alone = stack.enter_context(server(common, "Serving"))
        ray = stack.enter_context(server([*common, "--ray"], "Logs: "))
        first = pairs((alone, ray), Random(input=32, output=2), 20, 1, given.rounds, first_token)
        shape = Random(input=32, output=given.tokens)
        rates = pairs((alone, ray), shape, given.streams, given.streams, given.rounds, rate)
    more = [with_ray - without for without, with_ray in first]
    ratios = [with_ray / without for without, with_ray in rates]
    print("TTFT at one stream, ms:", ", ".join(f"{a:.2f}|{b:.2f}" for a, b in first))
    print(f"  more with Ray, ms: {quartiles(more)}")
    print(f"tokens/s at {given.streams} streams:", ", ".join(f"{a:.0f}|{b:.0f}" for a, b in rates))
    print(f"  ratio: {quartiles(ratios)}")


if __name__ == "__main__":
    run_tool(main)
