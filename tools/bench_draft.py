"""The speed of a model with the drafts of a layer relative to the speed without, on a device; the tokens are the same.

    python tools/bench_draft.py draft.gguf cuda:0

First, what drafts can gain at all: the times of a step that verifies a draft and of drafting it, and the speed that
follows from them where each drafted token is right with a probability. This leaves out what the host does between two
steps. Then answers of the demo model to questions that it was not trained on, with and
without drafts in turns, on one executable: greedy, and drawn with a temperature.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bitnet.core import Model, load_model
from bitnet.core.engine import Completion
from bitnet.core.engine.drafter import Drafter
from bitnet.core.hal import Executable, SequenceStep, Step, StepLayout, run
from demo_model.unseen import problems, story_requests
from running import positive, run_tool

CONTEXT = 200
SIZES = (1, 3, 7)
CHANCES = (0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def least(action: Callable[[], object], rounds: int = 60) -> float:
    """The least microseconds that it takes."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return min(took) * 1e6


def bounds(target: Executable, drafter: Drafter, layout: StepLayout, block_size: int) -> None:
    """Print the times of steps and drafts, and the speed that they allow."""
    blocks = range(-(-(CONTEXT + 16) // block_size))
    own, executable = drafter._layout, drafter.executable

    def step(of: StepLayout, count: int, rows: Sequence[int]) -> Step:
        return Step(of, [SequenceStep([9] * count, CONTEXT + count, blocks, rows)], block_size=block_size, logits=False)

    plain = least(partial(run, target, step(layout, 1, [0]), 8), 20) / 8
    print(f"plain: {plain:.0f} µs a token, eight at once, behind {CONTEXT} tokens")
    for size in SIZES:
        verifying = least(partial(run, target, step(layout, size + 1, range(size + 1))))
        drafting = least(partial(run, executable, step(own, 2, [1])))
        if size > 1:
            drafting += least(partial(run, executable, step(own, 1, [0]), size - 1))
        gains = []
        for chance in CHANCES:
            tokens = sum(chance**i for i in range(size + 1))
            gains.append(f"{chance:.0%} {tokens * plain / (verifying + drafting):.2f}")
        print(f"drafts of {size}: {drafting:.0f} µs, verified in {verifying:.0f} µs; times as fast: {', '.join(gains)}")


def compare(model: Model, drafter: Drafter, name: str, asked: Sequence[str], pairs: int, temperature: float) -> None:
    """Print how answers with and without drafts compare, over pairs of runs in turns."""
    engine = model._worker.engine
    ratios, answers = [], list[Completion]()
    for pair in range(pairs + 1):  # the first pair only warms up
        took, tokens = dict[bool, float](), dict[bool, list[tuple[int, ...]]]()
        for drafts in (False, True) if pair % 2 else (True, False):
            engine.drafter = engine._scheduler.drafts._drafter = drafter if drafts else None
            done = [
                model.chat([{"role": "user", "content": text}], max_tokens=300, temperature=temperature, seed=pair)
                for text in asked
            ]
            took[drafts] = sum(c.timings.token_times[-1] - c.timings.token_times[0] for c in done)
            tokens[drafts] = [tuple(c.tokens) for c in done]
            if drafts and pair:
                answers += done
        if tokens[False] != tokens[True]:
            print(f"{name}: OTHER TOKENS", flush=True)
        if pair:
            ratios.append(took[False] / took[True])
    drafted, accepted = (sum(getattr(c.timings, f"{kind}_tokens") for c in answers) for kind in ("drafted", "accepted"))
    print(
        f"{name:16s} {statistics.median(ratios):5.2f} x (least {min(ratios):.2f}, {pairs} pairs); of "
        f"{sum(len(c.tokens) for c in answers)} tokens {accepted} drafted rightly, {drafted} drafted",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path, help="file of a draft layer")
    parser.add_argument("device", help="such as cuda:0")
    parser.add_argument("--model", type=Path, help="the model (the demo model)")
    parser.add_argument("--threads", type=positive, help="of a CPU")
    parser.add_argument("--pairs", type=positive, default=5, help="pairs of runs (5)")
    given = parser.parse_args()
    with load_model(given.model, device=given.device, draft=given.draft, threads=given.threads) as model:
        engine = model._worker.engine
        drafter = engine.drafter
        assert drafter is not None
        engine.preparer.lookup = False
        print(engine.device, flush=True)
        bounds(engine._executable, drafter, StepLayout(engine.limits), engine.kv.block_size)
        rng = np.random.default_rng(3)
        some = [str(text) for text in rng.permutation(problems(4, seed=3))[:30]]
        for temperature in (0.0, 0.8):
            kind = "greedy" if temperature == 0 else "drawn"
            compare(model, drafter, f"stories, {kind}", story_requests(4, seed=3), given.pairs, temperature)
            compare(model, drafter, f"problems, {kind}", some, given.pairs, temperature)


if __name__ == "__main__":
    run_tool(main)
