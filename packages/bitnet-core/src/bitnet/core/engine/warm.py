"""Warm-up: has a device prepare the usual step sizes before users would wait for that."""

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
    Executable,
    KVSpec,
    Limits,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
)
from bitnet.core.support.log import logger

PAUSE = 0.05
"""Seconds between checks for waiting requests. The first pause keeps a command's immediate request from being
delayed."""
FIRST_LENGTH, FIRST_CHUNK = 512, 16
"""The smallest context, and the smallest prompt chunk beside decoding sequences, that are prepared, in tokens."""
PATIENCE, BESIDE = 10.0, 1.0
"""Seconds to wait for a moment without requests; after that, seconds between two sizes prepared despite requests."""
FILTERED = SamplingParams(temperature=1.0, top_p=0.9)


def powers(first: int, most: int) -> Iterator[int]:
    """Powers of two from ``first`` on that are below ``most``, then ``most`` itself."""
    while first < most:
        yield first
        first *= 2
    yield most


def stand_ins(limits: Limits, kv: KVSpec, context: int, *, features: Collection[str] = ()) -> Iterator[Step]:
    """A few large steps that stand in for all others. They are only prepared, never run.

    Prefill with the maximum number of tokens, with all logits wanted or none, and decode with the maximum number of
    sequences. If the device has these features, also with penalties and with log-probabilities.
    """
    layout, most = StepLayout(limits), min(limits.max_seqs, kv.num_blocks, limits.max_tokens)

    def step(
        tokens: int, rows: bool, sampling: SamplingParams, *, slot: bool = False, logprobs: int | None = None
    ) -> Step:
        parts = []
        for i, count in enumerate([1] * (most - 1) + [tokens - most + 1]):
            length = context if i == 0 else count
            blocks = [0] * (-(-length // kv.block_size) - 1) + [kv.num_blocks - 1 - i]
            adjustment = Adjustment(0) if slot and i == 0 else None
            wanted = [count - 1] if rows else []
            tables = [blocks] * (limits.tables - 1)
            parts.append(SequenceStep([0] * count, length, blocks, wanted, sampling, adjustment, -1, i, tables))
        return Step(layout, parts, block_size=kv.block_size, logits=tokens > most and rows, logprobs=logprobs)

    largest = min(limits.max_tokens, most - 1 + context)
    yield step(largest, True, FILTERED)
    yield step(largest, False, GREEDY)
    for sampling in (GREEDY, FILTERED):
        yield step(most, True, sampling)
    if PENALTIES in features:
        yield step(largest, True, FILTERED, slot=True)
    if LOGPROBS in features:
        yield step(largest, True, GREEDY, logprobs=0)


def usual_steps(
    limits: Limits, kv: KVSpec, context: int, *, features: Collection[str] = (), lookup: bool = False
) -> Iterator[Step]:
    """A step of each usual size, the most frequent first. They are only prepared, never run.

    In order: decode, greedy and with filters; chunks of one prompt; chunks beside decoding sequences, and several
    prompts at once; drafts, if ``lookup``; and, if the device has these features, decode with penalties and with
    log-probabilities.
    """
    layout = StepLayout(limits)
    most = min(limits.max_seqs, kv.num_blocks)

    def part(
        i: int, count: int, length: int, sampling: SamplingParams = GREEDY, *, row: bool = True, slot: bool = False
    ) -> SequenceStep:
        """A sequence's part. All sequences share their blocks, except the block written last."""
        length = max(length, count)
        blocks = [0] * (-(-length // kv.block_size) - 1) + [kv.num_blocks - 1 - i]
        adjustment = Adjustment(i) if slot and i < limits.slots else None
        rows, tables = [count - 1] if row else [], [blocks] * (limits.tables - 1)
        return SequenceStep([0] * count, length, blocks, rows, sampling, adjustment, -1, i, tables)

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


def prepare_stand_ins(executable: Executable, steps: Iterator[Step], name: str) -> None:
    """Prepare steps that stand in for others. ``name`` is the device's, for logs."""
    try:
        for step in steps:
            executable.prepare(step, stands_in=True)
    except BitNetError as error:  # the first request that needs it gets the error
        logger.debug("%s: it is not prepared for the largest steps: %s", name, error)


class WarmUp:
    """Prepares steps in a thread of its own while no request runs, or slowly if requests never pause.

    Args:
        busy: Returns whether any request runs or waits.
        name: The device's name, for logs.
        pause: Seconds until the first step is prepared.
    """

    def __init__(
        self,
        executable: Executable,
        steps: Iterator[Step],
        busy: Callable[[], bool],
        name: str,
        *,
        pause: float = PAUSE,
    ) -> None:
        self._executable, self._steps, self._busy, self._name = executable, steps, busy, name
        self._first = pause
        self._closing, self._done = threading.Event(), threading.Event()
        self.ready = False
        """Whether all steps are prepared."""
        self.thread = threading.Thread(target=self._work, name=f"bitnet-warm-{name}", daemon=True)
        self.thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the warm-up ends; return whether all steps are prepared."""
        self._done.wait(timeout)
        return self.ready

    def close(self) -> None:
        """Finish the current step and end. Closing twice is allowed."""
        self._closing.set()
        self.thread.join()

    def _work(self) -> None:
        try:
            self._closing.wait(self._first)
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
        except BitNetError as error:  # the first request that needs it gets the error
            logger.debug("%s: it is not prepared for all sizes of steps: %s", self._name, error)
        finally:
            self._done.set()
