"""The speed of generations with prompt look-up relative to the speed without, on a device; the tokens are the same.

    python tools/bench_lookup.py cuda:0

Runs with and without it alternate on one executable. Each line has the median and the least ratio of their pairs.

The model has the shape of 2B4T and random weights, so that its steps take as long as that model's. Layers add so little
to the logits that the next token depends on the last one alone: answers follow a fixed order of the vocabulary. So the
answer to each task is known:

- quote: passages of 40 tokens of the prompt, each after 10 tokens that are not in it: a summary that quotes.
- fresh: no token comes twice. Nothing is drafted; this measures the cost of the look-up.
- misled: the prompt has each three tokens of the answer, followed by another token: every draft is wrong.
- sampled: a temperature at which any token may come.

In ``story again`` the demo model is asked for a story that it has told already; in ``story`` it tells it first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from bench_device import BLOCK, POSITIONS, build
from bitnet.core import load_model, select_device
from bitnet.core.engine import Completion, Engine, GenerationOptions
from bitnet.core.engine.preparer import Preparer
from bitnet.core.hal import DenseMatmul, DenseWeight, Device, Limits, Program, TernaryData, TernaryWeight
from random_shapes import PRESETS
from running import positive, run_tool

SHAPE = PRESETS["2b4t"]
VOCAB = SHAPE.vocab
QUOTED, OWN = 40, 10
"""Tokens of a quoted passage, and of the new text before it."""
SEQS = 8


class NoText:
    """The text of tokens that have none."""

    def push(self, *tokens: int) -> str:
        return ""

    def lacks(self, character: str, tokens: Sequence[int]) -> bool:
        return True

    def flush(self) -> str:
        return ""


def ordered(rng: np.random.Generator, limits: Limits, blocks: int) -> tuple[Program, list[int]]:
    """A program whose greedy answers follow an order of the vocabulary, and that order."""
    program, order = build(SHAPE, rng, limits, blocks, "f16"), rng.permutation(VOCAB)
    embedding = program.weights["embd"]
    assert isinstance(embedding, DenseWeight)
    table = embedding.load()
    head = np.empty_like(table)
    head[np.roll(order, -1)] = table[order]
    weights = {
        name: weight if not isinstance(weight, TernaryWeight) else quiet(weight)
        for name, weight in program.weights.items()
    }
    weights["norm"] = DenseWeight((table.shape[1],), "f32", lambda: np.ones(table.shape[1], np.float32))
    weights["head"] = replace(embedding, load=lambda: head)
    ops = [replace(op, weight="head") if isinstance(op, DenseMatmul) else op for op in program.ops]
    return replace(program, ops=ops, weights=weights), order.tolist()


def quiet(weight: TernaryWeight) -> TernaryWeight:
    """The same codes with a scale so small that they change no token."""
    return replace(weight, load=lambda: TernaryData(weight.load().codes, np.array([1e-6], np.float32)))


class Tasks:
    """Prompts whose greedy answers are known. No two share a token of their walk, so none finds another's cache."""

    def __init__(self, rng: np.random.Generator, order: list[int], answer: int) -> None:
        self._rng, self._order, self._answer, self._at = rng, order, answer, 0

    def _walk(self) -> list[int]:
        """The last token of a prompt, and what comes after it."""
        self._at += self._answer + 2
        return [self._order[(self._at + i) % VOCAB] for i in range(self._answer + 1)]

    def _filler(self, count: int) -> list[int]:
        return [int(token) for token in self._rng.integers(0, VOCAB, count)]

    def quote(self) -> list[int]:
        walk, parts = self._walk(), []
        for begin in range(1 + OWN, len(walk), OWN + QUOTED):
            parts.append([*walk[begin : begin + QUOTED], *self._filler(5)])
        self._rng.shuffle(parts)
        return [*self._filler(20), *itertools.chain(*parts), walk[0]]

    def fresh(self) -> list[int]:
        return [*self._filler(self._answer), self._walk()[0]]

    def misled(self) -> list[int]:
        walk = self._walk()
        parts = [[*walk[i : i + 3], *self._filler(1)] for i in range(len(walk) - 2)]
        self._rng.shuffle(parts)
        return [*self._filler(20), *itertools.chain(*parts), walk[0]]


def timed(
    engine: Engine, prompts: Sequence[Sequence[int]], options: GenerationOptions
) -> tuple[float, list[Completion]]:
    """Seconds of decoding, from when all have their first token, and the completions."""
    numbers, done = [], {}
    for prompt in prompts:
        (sequence,) = engine.preparer.prepare(prompt, options)
        engine.add([sequence])
        numbers.append(sequence.number)
    while engine.busy:
        done.update({u.sequence: u.result for u in engine.step() if isinstance(u.result, Completion)})
    answers = [done[number] for number in numbers]
    return mean_seconds(answers), answers


def asked(
    engines: Mapping[bool, Engine],
    prompts: Sequence[Sequence[list[int]]],
    options: GenerationOptions,
    pair: int,
    lookup: bool,
) -> tuple[float, list[Completion]]:
    return timed(engines[lookup], prompts[pair], options)


def mean_seconds(answers: Sequence[Completion]) -> float:
    return statistics.mean(c.timings.token_times[-1] - c.timings.token_times[0] for c in answers)


def compare(name: str, pairs: int, run: Callable[[int, bool], tuple[float, list[Completion]]]) -> None:
    """Print how the two compare, over ``pairs`` of runs in alternation."""
    ratios, answers = [], []
    for pair in range(pairs + 1):  # the first pair only warms up
        took: dict[bool, float] = {}
        completions: dict[bool, list[Completion]] = {}
        for lookup in (False, True) if pair % 2 else (True, False):
            took[lookup], completions[lookup] = run(pair, lookup)
        if [c.tokens for c in completions[False]] != [c.tokens for c in completions[True]]:
            print(f"{name}: OTHER TOKENS", flush=True)
        if pair:
            ratios.append(took[False] / took[True])
            answers += completions[True]
    drafted, accepted = (sum(getattr(c.timings, f"{kind}_tokens") for c in answers) for kind in ("drafted", "accepted"))
    tokens = sum(len(c.tokens) for c in answers)
    print(
        f"{name:12s} {statistics.median(ratios):5.2f} x (least {min(ratios):.2f}, {pairs} pairs); of {tokens} tokens "
        f"{accepted} looked up, {drafted} drafted",
        flush=True,
    )


def constructed(device: Device, answer: int, pairs: int) -> None:
    """The tasks of the model whose order is known."""
    rng = np.random.default_rng(1)
    each = -(-(6 * answer + 64) // BLOCK)
    limits = Limits(512, SEQS, 32, min(POSITIONS // BLOCK, each))
    program, order = ordered(rng, limits, SEQS * each)
    executable = device.compile(program)
    assert program.kv is not None
    engines = {
        lookup: Engine(
            executable,
            Preparer(
                context=limits.max_blocks * BLOCK,
                vocab_size=VOCAB,
                eos=frozenset(),
                text=lambda prompt: NoText(),
                lookup=lookup,
            ),
            limits=limits,
            kv=program.kv,
            device=device.info.name,
            features=device.info.features,
        )
        for lookup in (False, True)
    }
    tasks = Tasks(rng, order, answer)
    greedy, drawn = (
        GenerationOptions(max_tokens=answer),
        GenerationOptions(max_tokens=answer, temperature=100.0, seed=1),
    )
    for name, make, options in (
        ("quote", tasks.quote, greedy),
        ("fresh", tasks.fresh, greedy),
        ("misled", tasks.misled, greedy),
        ("sampled", tasks.fresh, drawn),
    ):
        for seqs in (1, SEQS):
            # Each engine keeps its own books of the shared cache, so different pairs have different prompts.
            prompts = [[make() for _ in range(seqs)] for _ in range(pairs + 1)]
            compare(f"{name}, {seqs}", pairs, partial(asked, engines, prompts, options))
    executable.close()


def story(device: str, pairs: int) -> None:
    """The demo model tells a story for the first time, and again.

    It is loaded once: where its weights lie in memory moves the speed on a CPU by as much as there is to measure.
    """
    completions = [{"role": "user", "content": "Tell me a story about a cat."}]
    with load_model(device=device) as model:
        first = model.chat(completions, max_tokens=400)
        again = [*completions, {"role": "assistant", "content": first.text}, *completions]
        for name, messages in (("story again", again), ("story", completions)):

            def run(
                pair: int, lookup: bool, messages: list[dict[str, str]] = messages
            ) -> tuple[float, list[Completion]]:
                model._worker.engine.preparer.lookup = lookup  # of the sequences that it prepares from now on
                done = model.chat(messages, max_tokens=400)
                return mean_seconds([done]), [done]

            compare(name, pairs, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="such as cuda:0")
    parser.add_argument("--answer", type=positive, default=250, help="tokens of an answer (250)")
    parser.add_argument("--pairs", type=positive, default=5, help="pairs of runs (5)")
    parser.add_argument("--only", choices=["constructed", "story"], help="the model to ask; both if left out")
    given = parser.parse_args()
    selection = select_device(given.device)
    print(f"{selection.info.name}: {selection.info.description}, driver {selection.info.driver_version}", flush=True)
    if given.only != "constructed":
        story(given.device, given.pairs)
    if given.only != "story":
        device = selection.open()
        try:
            constructed(device, given.answer, given.pairs)
        finally:
            device.close()


if __name__ == "__main__":
    run_tool(main)
