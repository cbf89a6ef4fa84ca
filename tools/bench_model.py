"""The speed that a caller of `load_model` gets: streams, sampling, time to first token, and the cost of determinism.

    uv run tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run tools/bench_model.py /tmp/2b4t.gguf cuda:0

Each stream is read by a thread of its own. Rates are the best of the rounds; "decode" counts from the first token of
the last stream that begins to the end, "whole" from the request. `tools/bench_device.py` says what the device alone
does. ``--at-once`` begins as soon as the model is loaded and counts the sizes of steps recorded while requests ran.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from bitnet.core import Model, load_model
from running import positive, run_tool

DRAWN = {"temperature": 0.8, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_p": DRAWN,
    "penalty": {"repetition_penalty": 1.1},
    "penalty+top_p": {"repetition_penalty": 1.1, **DRAWN},
    "logprobs": {"logprobs": 5},
}


class Run(NamedTuple):
    """Seconds from the request to the end, and the seconds at which each stream had its first token; all tokens."""

    seconds: float
    firsts: tuple[float, ...]
    tokens: int

    @property
    def decode(self) -> float:
        """Tokens a second once every stream has begun."""
        return (self.tokens - len(self.firsts)) / (self.seconds - max(self.firsts))


def answer(model: Model, prompts: Sequence[Sequence[int]], tokens: int, options: dict[str, Any]) -> Run:
    """Answer all prompts at once, each to a thread."""
    begun = time.perf_counter()

    def read(prompt: Sequence[int]) -> tuple[float, int]:
        (request,) = model.submit(prompt, max_tokens=tokens, ignore_eos=True, **options)
        next(request)
        first = time.perf_counter() - begun
        return first, len(request.result().tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        firsts, counts = zip(*pool.map(read, prompts), strict=True)
    return Run(time.perf_counter() - begun, firsts, sum(counts))


def recorded(model: Model) -> int:
    """Sizes of steps that the devices have recorded; 0 where they record none."""
    return sum(len(getattr(replica.executable, "_recordings", ())) for replica in model._replicas)


def watch(model: Model) -> list[str]:
    """The threads in which sizes are recorded from now on; requests wait for recordings in the engine's threads."""
    threads: list[str] = []
    for replica in model._replicas:
        driver: Any = getattr(replica.executable, "_driver", None)
        if driver is None:
            continue

        def record(launches: Any, made: Callable[[Any], Any] = driver.record) -> Any:
            threads.append(threading.current_thread().name)
            return made(launches)

        driver.record = record
    return threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("device")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 64])
    parser.add_argument("--places", type=positive, help="answers at the same time on each device; default: all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--prompts", type=int, default=64, help="prompts of 512 tokens at once; 0: none")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--at-once", action="store_true")
    given = parser.parse_args()
    rng, begun = np.random.default_rng(), time.perf_counter()
    places = given.places or max(*given.streams, given.prompts, 1)
    # Answers of random weights repeat themselves, and drafts of repeated text would count as speed.
    options: dict[str, Any] = {"max_seqs": places, "deterministic": given.deterministic or None, "prompt_lookup": False}
    model = load_model(given.model, device=given.device, **options)

    def prompts(count: int, length: int) -> list[list[int]]:
        ids = rng.integers(0, 1000, (count, length))
        return [row.tolist() for row in ids]

    with model:
        print(f"{model.device.name}: loaded in {time.perf_counter() - begun:.1f} s", flush=True)
        if given.at_once:
            threads, ends, sent = watch(model), time.perf_counter() + 5, 0
            while time.perf_counter() < ends:
                count = int(rng.integers(1, places + 1))
                run = answer(model, prompts(count, int(rng.integers(8, 600))), 64, DRAWN if sent % 2 else {})
                sent += count
                print(
                    f"  {count:3} at once: first tokens after {statistics.median(run.firsts) * 1e3:.0f} ms", flush=True
                )
            waited = sum(name.startswith("bitnet-engine") for name in threads)
            idle = len(threads) - waited
            print(
                f"5 s of {sent} requests waited for {waited} sizes to be recorded; {idle} were between them", flush=True
            )
        model.warm()
        print(f"ready after {time.perf_counter() - begun:.1f} s: {recorded(model)} sizes", flush=True)
        for streams in given.streams:
            best: dict[str, list[Run]] = {kind: [] for kind in given.kinds}
            for _ in range(given.rounds):
                for kind, runs in best.items():
                    runs.append(answer(model, prompts(streams, 32), given.tokens, KINDS[kind]))
            for kind, runs in best.items():
                whole = max(run.tokens / run.seconds for run in runs)
                decode = max(run.decode for run in runs)
                print(f"{streams:3} streams {kind:14} decode {decode:8,.0f} tokens/s, whole {whole:8,.0f}", flush=True)
        if given.prompts:
            firsts = [statistics.median(answer(model, prompts(given.prompts, 512), 8, {}).firsts) for _ in range(3)]
            times = ", ".join(f"{first * 1e3:.0f}" for first in firsts)
            print(f"{given.prompts} prompts of 512: median time to first token {times} ms", flush=True)


if __name__ == "__main__":
    run_tool(main)
