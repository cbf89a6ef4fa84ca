"""Making ready what a device prepares for each size of step, before users wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product

from bitnet.core.errors import BitNetError
from bitnet.core.hal import (
    GREEDY,
    LOGPROBS,
    PENALTIES,
    Adjustment,
    KVSpec,
    Limits,
    Preparing,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
)
from bitnet.core.support.log import logger

PAUSE = 0.05
"""Seconds between looks whether somebody waits. A command that asks at once is not delayed by what it may not need."""
FIRST_LENGTH, FIRST_CHUNK = 512, 16
"""The least context, and the least part of a prompt beside decoding sequences, that are prepared."""
PATIENCE, BESIDE = 10.0, 1.0
"""Seconds that the warm-up waits for a moment without requests; then, seconds between two sizes beside requests."""
FILTERED = SamplingParams(temperature=1.0, top_p=0.9)


def powers(first: int, most: int) -> Iterator[int]:
    """Powers of two from ``first`` on, and ``most`` as the last."""
    while first < most:
        yield first
        first *= 2
    yield most


def stand_ins(limits: Limits, kv: KVSpec, context: int, *, features: Collection[str] = ()) -> Iterator[Step]:
    """A few large steps that can stand in for all others: they are not for running.

    As many tokens as there may be, of which all logits are wanted, or none; and decoding of as many sequences as there
    may be. With penalties and with log-probabilities as well, where the device has the feature.
    """
    layout, most = StepLayout(limits), min(limits.max_seqs, kv.num_blocks, limits.max_tokens)

    def step(tokens: int, rows: bool, sampling: SamplingParams, *, slot: bool = False, told: int | None = None) -> Step:
        parts = []
        for i, count in enumerate([1] * (most - 1) + [tokens - most + 1]):
            length = context if i == 0 else count
            blocks = [0] * (-(-length // kv.block_size) - 1) + [kv.num_blocks - 1 - i]
            adjustment = Adjustment(0) if slot and i == 0 else None
            parts.append(SequenceStep([0] * count, length, blocks, [count - 1] if rows else [], sampling, adjustment))
        return Step(layout, parts, block_size=kv.block_size, logits=tokens > most and rows, logprobs=told)

    largest = min(limits.max_tokens, most - 1 + context)
    yield step(largest, True, FILTERED)
    yield step(largest, False, GREEDY)
    for sampling in (GREEDY, FILTERED):
        yield step(most, True, sampling)
    if PENALTIES in features:
        yield step(largest, True, FILTERED, slot=True)
    if LOGPROBS in features:
        yield step(largest, True, GREEDY, told=0)


def usual_steps(
    limits: Limits, kv: KVSpec, context: int, *, features: Collection[str] = (), lookup: bool = False
) -> Iterator[Step]:
    """A step of each size that traffic brings, the most frequent first: they are not for running.

    Decoding, greedy and with filters; then the parts of one prompt; then parts beside decoding sequences, and several
    prompts at once; then drafts, where there is ``lookup``. Decoding with penalties and with log-probabilities is the
    last, where the device has the feature.
    """
    layout = StepLayout(limits)
    most = min(limits.max_seqs, kv.num_blocks)

    def part(
        i: int, count: int, length: int, sampling: SamplingParams = GREEDY, *, row: bool = True, slot: bool = False
    ) -> SequenceStep:
        """A sequence's part: it shares all blocks with the others, but the one it writes last."""
        length = max(length, count)
        blocks = [0] * (-(-length // kv.block_size) - 1) + [kv.num_blocks - 1 - i]
        adjustment = Adjustment(i) if slot and i < limits.slots else None
        return SequenceStep([0] * count, length, blocks, [count - 1] if row else [], sampling, adjustment)

    def step(parts: list[SequenceStep], logprobs: int | None = None) -> Step:
        return Step(layout, parts, block_size=kv.block_size, logits=False, logprobs=logprobs)

    lengths = [*powers(min(FIRST_LENGTH, context), context)]
    for length in lengths:
        for seqs in powers(1, most):
            for sampling in (GREEDY, FILTERED):
                yield step([part(i, 1, length, sampling) for i in range(seqs)])
    largest = min(limits.max_tokens, context)
    chunks = [*powers(min(2, largest), largest)]
    for length in lengths:
        for count in chunks:
            for row in (True, False):
                yield step([part(0, count, length, row=row)])
    beside = [*powers(min(FIRST_CHUNK, largest), largest)]
    for length, sampling in product(lengths, (GREEDY, FILTERED)):
        for seqs, count in product((1, *powers(8, most - 1)), beside if length in lengths[:2] else beside[-1:]):
            if 0 < seqs < most and seqs <= limits.max_tokens - count:
                decoding = [part(i, 1, length, sampling) for i in range(seqs)]
                yield step([*decoding, part(seqs, count, length, row=False)])
    for seqs in powers(1, most):
        yield step([part(i, max(1, largest // seqs), lengths[0]) for i in range(seqs)])
    drafted = powers(2, min(limits.max_rows, largest)) if lookup and min(limits.max_rows, largest) > 1 else ()
    for length, count, sampling in product(lengths, drafted, (GREEDY, FILTERED)):
        yield step([replace(part(0, count, length, sampling), rows=range(count))])
    for length, seqs in product(lengths, powers(1, most)):
        for sampling in (GREEDY, FILTERED) if PENALTIES in features else ():
            yield step([part(i, 1, length, sampling, slot=True) for i in range(seqs)])
        if LOGPROBS in features:
            yield step([part(i, 1, length) for i in range(seqs)], logprobs=0)


def prepare_stand_ins(executable: Preparing, steps: Iterator[Step], name: str) -> None:
    """Prepare steps that stand in for others; on the device ``name``, for logs."""
    try:
        for step in steps:
            executable.prepare(step, stands_in=True)
    except BitNetError as error:  # the first request that needs it is told
        logger.debug("%s: it is not prepared for the largest steps: %s", name, error)


class WarmUp:
    """Prepares steps in a thread of its own while nobody waits for an answer, or slowly where somebody always does.

    Args:
        busy: Whether somebody does.
        name: The device's, for logs.
    """

    def __init__(self, executable: Preparing, steps: Iterator[Step], busy: Callable[[], bool], name: str) -> None:
        self._executable, self._steps, self._busy, self._name = executable, steps, busy, name
        self._closing, self._done = threading.Event(), threading.Event()
        self.ready = False
        """Whether all steps are prepared."""
        self.thread = threading.Thread(target=self._work, name=f"bitnet-warm-{name}", daemon=True)
        self.thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ends; whether all steps are prepared then."""
        self._done.wait(timeout)
        return self.ready

    def close(self) -> None:
        """Finish the step in hand and end. Closing twice is allowed."""
        self._closing.set()
        self.thread.join()

    def _work(self) -> None:
        try:
            self._closing.wait(PAUSE)
            patience = PATIENCE
            for step in self._steps:
                begun = time.monotonic()
                while self._busy() and time.monotonic() < begun + patience and not self._closing.is_set():
                    self._closing.wait(PAUSE)
                patience = BESIDE if self._busy() else PATIENCE
                if self._closing.is_set():
                    return
                self._executable.prepare(step)
            self.ready = True
        except BitNetError as error:  # the first request that needs it is told
            logger.debug("%s: it is not prepared for all sizes of steps: %s", self._name, error)
        finally:
            self._done.set()
