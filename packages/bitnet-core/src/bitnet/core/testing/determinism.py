"""Tests that deterministic programs give a request the same bits, whatever else runs or was computed before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from bitnet.core.engine.engine import Engine
from bitnet.core.engine.options import GenerationOptions
from bitnet.core.engine.preparer import Preparer
from bitnet.core.engine.results import Completion
from bitnet.core.hal import DETERMINISTIC, Device, Executable, KVDtype, Limits, Program
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, needs
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.rig import not_yet


class Load(NamedTuple):
    """Size of a run: total requests, sequences and tokens per step, longest sequence, new tokens."""

    requests: int
    seqs: int
    context: int
    new: int


LOADS: dict[Size, Load] = {
    "small": Load(4, 4, 96, 32),
    "quick": Load(24, 16, 640, 40),
    "full": Load(200, 64, 640, 40),
}
PREFIXES = (5, 24, 40)
"""Tokens that prompts have in common."""


class _NoText:
    """A decoder that returns no text, for tests that ignore it."""

    def push(self, *tokens: int) -> str:
        return ""

    def lacks(self, character: str, tokens: Sequence[int]) -> bool:
        return True

    def flush(self) -> str:
        return ""


class Ask(NamedTuple):
    prompt: list[int]
    options: GenerationOptions


def asked(rng: np.random.Generator, vocab: int, load: Load) -> list[Ask]:
    """Requests of all kinds; some prompts share a prefix, one fills the context."""
    shared = [rng.integers(0, vocab, n).tolist() for n in PREFIXES]
    made = []
    for i in range(load.requests):
        own = rng.integers(0, vocab, 1 + 7 * i % 12).tolist()  # lengths are fixed: what is preempted is no luck
        if i == 1:
            own = rng.integers(0, vocab, load.context - load.new - PREFIXES[0]).tolist()
        kind: dict[str, Any] = (
            {},
            {"temperature": 0.9},
            {"temperature": 1.1, "top_p": 0.9},
            {"temperature": 0.8, "top_k": 20, "min_p": 0.01},
            {"repetition_penalty": 1.2, "presence_penalty": 0.3},
        )[i % 5]
        logprobs = (0, 3, None)[i % 3] if i % 5 else 2
        options = GenerationOptions(max_tokens=load.new, ignore_eos=True, logprobs=logprobs, seed=100 + i, **kind)
        made.append(Ask(shared[0 if i == 1 else i % len(shared)] + own, options))
    return made


def answers(engine: Engine, asks: Sequence[Ask], arrivals: Sequence[int]) -> tuple[list[Completion], int]:
    """The completion of each request, submitted before a given step, and how often a request was preempted."""
    coming = sorted(range(len(asks)), key=lambda i: arrivals[i])
    sequences, done, lost, step = dict[int, Any](), dict[int, Completion](), 0, 0
    while coming or engine.busy:
        while coming and (arrivals[coming[0]] <= step or not engine.busy):
            i = coming.pop(0)
            (sequences[i],) = engine.preparer.prepare(asks[i].prompt, asks[i].options)
            engine.add([sequences[i]])
        had = {i: s.placement.computed for i, s in sequences.items() if not s.finished}
        for update in engine.step():
            if isinstance(update.result, Completion):
                done[update.sequence] = update.result
        lost += sum(sequences[i].placement.computed < n for i, n in had.items() if not sequences[i].finished)
        step += 1
    return [done[sequences[i].number] for i in range(len(asks))], lost


def bits(completion: Completion) -> tuple[Any, ...]:
    """The values that must be equal: tokens and log-probabilities, bit for bit."""
    return completion.tokens, completion.logprobs


@contextmanager
def engines(device: Device, program: Program, load: Load, vocab: int) -> Iterator[Any]:
    """Makes engines over one executable, each with an empty KV cache."""
    with not_yet():
        executable: Executable = device.compile(program)
    made: list[Engine] = []
    entries = max((spec.entries for spec in program.states.values()), default=0)

    def make(*, lookup: bool = False) -> Engine:
        assert program.kv is not None
        preparer = Preparer(
            context=load.context, vocab_size=vocab, eos=frozenset(), text=lambda prompt: _NoText(), lookup=lookup
        )
        made.append(
            Engine(
                executable,
                preparer,
                limits=program.limits,
                kv=program.kv,
                device=device.info.name,
                features=device.info.features,
                state_entries=entries,
            )
        )
        return made[-1]

    try:
        yield make
    finally:
        for engine in made:
            engine.close()
        executable.close()


class DeterminismTests(DeviceTests):
    @needs(DETERMINISTIC)
    @pytest.mark.parametrize("kv_dtype", ["f16", "i8"])
    def test_a_request_is_alone_among_others(self, device: Device, rng: np.random.Generator, kv_dtype: KVDtype) -> None:
        """Alone; with others that come and go, in chunks, preempted; with what a cache has left of the same prompts."""
        load = LOADS[self.run_size]
        model = TinyModel(rng, positions=load.context)
        limits = Limits(load.seqs, load.seqs, load.seqs, load.context // BLOCK)
        # The cache holds the longest request and no more: others that grow in it push each other out.
        program = model.program(limits, limits.max_blocks, kv_dtype)
        asks = asked(rng, model.vocab, load)
        with engines(device, replace(program, deterministic=self.asks_for_it), load, model.vocab) as make:
            alone = [bits(answers(make(), [ask], [0])[0][0]) for ask in asks]
            together, others = make(), [i for i in range(len(asks)) if i != 1]
            short, lost = answers(together, [asks[i] for i in others], [0] * len(others))
            assert lost, "nothing was preempted"
            wrong = [i for i, found in zip(others, short, strict=True) if bits(found) != alone[i]]
            order = rng.permutation(len(asks)).tolist()
            mixed, _ = answers(together, [asks[i] for i in order], rng.integers(0, 3 * len(asks), len(asks)).tolist())
            wrong += [i for i, found in zip(order, mixed, strict=True) if bits(found) != alone[i]]
            again, half = make(), load.new // 2
            (first,), (cached,) = (answers(again, [asks[2]], [0])[0] for _ in range(2))
            assert cached.timings.cached_tokens, "nothing was found in the cache"
            wrong += [2] if not bits(first) == bits(cached) == alone[2] else []
            for i in (1, 2):  # what was decoded is a prompt now: the cache is computed in chunks, not token by token
                tokens, reported = alone[i]
                options = replace(asks[i].options, max_tokens=load.new - half)
                (rest,), _ = answers(make(), [Ask([*asks[i].prompt, *tokens[:half]], options)], [0])
                wrong += [i] if bits(rest) != (tokens[half:], reported and reported[half:]) else []
        assert not wrong, f"requests {sorted(set(wrong))} of {len(asks)} depend on what else was computed"

    asks_for_it = True
    """False shows that the test can fail."""
