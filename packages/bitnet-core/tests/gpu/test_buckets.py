"""The choice of a step's recording, from what the host knows before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest

from bitnet.core.gpu import Bucket, Buffer, Context, GpuExecutable, Launch, Lowering
from bitnet.core.hal import DeviceInfo, DeviceType, Limits, Op, SamplingParams, SequenceStep, Step, run
from bitnet.core.testing.model import BLOCK, TinyModel

LIMITS = Limits(16, 4, 4, 6)


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class NoDevice:
    """A driver that computes nothing."""

    def alloc(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def free(self, buffer: Buffer) -> None: ...

    def upload(self, buffer: Buffer, array: np.ndarray[Any, Any], offset: int = 0) -> None: ...

    def download(self, buffer: Buffer, array: np.ndarray[Any, Any], offset: int = 0) -> None: ...

    def record(self, launches: Sequence[Launch]) -> object:
        return launches

    def submit(self, recording: object) -> None: ...

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None: ...


def bucket_of(
    sequences: Sequence[SequenceStep], *, logits: bool = False, count: int = 1, able: bool = True, filters: int = 0
) -> Bucket:
    """The bucket of a step; the lowering can leave out logits or not, with filters in a number of rows or not."""
    buckets: list[Bucket] = []

    def nothing(ctx: Context, op: Op, bucket: Bucket) -> list[Launch]:
        buckets.append(bucket)
        return []

    program = TinyModel(np.random.default_rng(), layers=1).program(LIMITS, 24)
    info = DeviceInfo("none", "0", "none", "none", "none", DeviceType.DISCRETE)
    table = dict.fromkeys(get_args(Op), nothing)
    lowering = Lowering(table, lambda _: able, filters=lambda _, bucket: bucket.rows <= filters)
    executable = GpuExecutable(NoDevice(), info, program, lowering, lambda _: None)
    first = len(buckets)
    run(executable, Step(executable.context.layout, sequences, block_size=BLOCK, logits=logits), count)
    return buckets[first] if len(buckets) > first else buckets[0]


def sequence(length: int, blocks: Sequence[int], sampling: SamplingParams | None = None) -> SequenceStep:
    return SequenceStep([1], length, blocks, [0], sampling or SamplingParams())


@pytest.mark.parametrize(
    ("sampling", "alone"),
    [
        (SamplingParams(), True),
        (SamplingParams(0.0, top_k=5, top_p=0.5, min_p=0.1), True),  # greedy all the same
        (SamplingParams(0.8, seed=3), True),
        (SamplingParams(0.8, top_k=5), False),
        (SamplingParams(0.8, top_p=0.9), False),
        (SamplingParams(0.8, min_p=0.1), False),
    ],
)
def test_logits_are_left_out_where_the_greatest_number_wins(sampling: SamplingParams, alone: bool) -> None:
    steps = [sequence(3, [0]), sequence(5, [1], sampling)]
    assert bucket_of(steps).logits is not alone
    assert bucket_of(steps, logits=True).logits
    assert bucket_of(steps, able=False, filters=2).logits
    assert not bucket_of(steps).filtered
    bucket = bucket_of(steps, filters=2)  # the lowering leaves out logits of filtered rows too
    assert not bucket.logits
    assert bucket.filtered is not alone
    assert bucket_of(steps, logits=True, filters=2) == bucket_of(steps, logits=True)
    assert bucket_of([*steps, sequence(3, [2])], filters=2).logits is not alone


def test_sequences_are_apart_unless_one_reads_what_another_writes() -> None:
    shared, own = [0, 1], [0, 2]
    assert bucket_of([sequence(20, shared), sequence(25, own)]).apart  # the first block is full: nobody writes it
    assert not bucket_of([sequence(10, [0]), sequence(25, own)]).apart  # one writes into it
    assert not bucket_of([sequence(BLOCK + 1, [3, 4]), sequence(2 * BLOCK + 1, [3, 4, 5])]).apart
    assert bucket_of([sequence(BLOCK, [3, 4]), sequence(2, [4])], count=1).apart  # block 4 is the second's alone
    assert not bucket_of([sequence(BLOCK, [3, 4]), sequence(2, [4])], count=2).apart  # and in the next step not


def test_several_tokens_of_a_sequence_are_not_apart() -> None:
    assert not bucket_of([SequenceStep([1, 2], 2, [0], [1]), sequence(5, [1])]).apart
    assert bucket_of([sequence(7, [0])]).apart
