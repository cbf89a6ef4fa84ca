"""Measure the host's overhead per step (engine, worker, text) with a device that only waits.

    uv run tools/bench_host.py --streams 64 --step-ms 2.3

Each stream is read by a thread of its own. The device is idle while the host decides what it computes next; its part
of the time is printed, as are tokens a second, those of a host that takes no time, and the processor time a token.
``--profile`` prints where the engine's thread spends it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.engine import Engine, GenerationOptions
from bitnet.core.engine.preparer import Preparer
from bitnet.core.engine.worker import Worker
from bitnet.core.hal import KVSpec, Limits, Step
from bitnet.core.model import open_model
from bitnet.core.model.default import default_model_path
from bitnet.core.text.tokenizer import StreamDecoder
from running import positive, run_tool

PROMPT, BLOCK, CONTEXT = 32, 32, 4096


class Waiting:
    """A device's executable as far as the engine uses it: a pass takes ``seconds``, and samples tokens at random."""

    def __init__(self, seconds: float, vocabulary: int) -> None:
        self._seconds, self._vocabulary = seconds, vocabulary
        self._started: tuple[Step, int] | None = None
        self._rng = np.random.default_rng(0)
        self.busy, self.runs, self.passes = 0.0, 0, 0

    def start(self, step: Step, count: int = 1) -> None:
        self._started = step, count

    def collect(self) -> npt.NDArray[np.int32]:
        assert self._started is not None
        (step, count), begun = self._started, time.perf_counter()
        tokens = self._rng.integers(0, self._vocabulary, (count, step.rows), np.int32)
        end = begun + count * self._seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        self.busy += time.perf_counter() - begun
        self.runs += 1
        self.passes += count
        return tokens

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[Any]:
        return self._rng.standard_normal((rows or 1, self._vocabulary), np.float32)


def engine_over(executable: Any, places: int) -> Engine:
    """An engine with the demo model's tokenizer."""
    tokenizer = open_model(default_model_path()).tokenizer
    limits = Limits(max_tokens=512, max_seqs=places, max_rows=max(places, 32), max_blocks=CONTEXT // BLOCK)
    preparer = Preparer(
        context=CONTEXT,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos_ids,
        text=lambda prompt: StreamDecoder(tokenizer, after=prompt),
        lookup=False,
    )
    kv = KVSpec(1, 1, 32, places * limits.max_blocks, BLOCK, "f16")
    return Engine(executable, preparer, limits=limits, kv=kv, device="waiting:0")


def serve(worker: Worker, streams: int, options: GenerationOptions) -> tuple[float, int]:
    """Seconds in which every stream is answered, each to a thread of its own, and the tokens."""

    def read(prompt: Sequence[int]) -> int:
        (ticket,) = worker.submit_all([worker.engine.preparer.prepare(prompt, options)])
        return sum(len(update.chunk.tokens) for update in ticket if update.chunk is not None)

    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, PROMPT).tolist() for _ in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        begun = time.perf_counter()
        tokens = sum(pool.map(read, prompts))
        return time.perf_counter() - begun, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=positive, default=64)
    parser.add_argument("--places", type=positive, help="streams that run at a time; the others wait  [default: all]")
    parser.add_argument("--step-ms", type=float, default=2.3)
    parser.add_argument("--tokens", type=positive, default=256)
    parser.add_argument("--stop", action="append", default=[], help="a stop string; may be repeated")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    options = GenerationOptions(max_tokens=given.tokens, ignore_eos=True, stop=given.stop)
    for _ in range(given.rounds):
        device = Waiting(given.step_ms / 1e3, 500)
        worker = Worker(engine_over(device, given.places or given.streams))
        profile = cProfile.Profile()
        if given.profile:
            engine: Any = worker.engine
            engine.advance = partial(profile.runcall, engine.advance)
        spent = time.process_time()
        seconds, tokens = serve(worker, given.streams, options)
        spent = time.process_time() - spent
        worker.close()
        print(
            f"{given.streams} streams: {tokens / seconds:,.0f} tokens/s of {tokens / device.busy:,.0f}; "
            f"device idle {1 - device.busy / seconds:.1%}; {device.passes} passes in {device.runs} runs; "
            f"{spent / tokens * 1e6:.1f} us of processor time a token"
        )
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    run_tool(main)
