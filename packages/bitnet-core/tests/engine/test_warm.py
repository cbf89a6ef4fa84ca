"""Warm-up: a GPU records each step size before users would have to wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.engine import Engine, GenerationOptions, warm
from bitnet.core.engine.warm import WarmUp, prepare_stand_ins, usual_steps
from bitnet.core.errors import OutOfMemoryError
from bitnet.core.gpu import Buffer, GpuDevice, Launch, Lowering
from bitnet.core.hal import (
    LOGPROBS,
    PENALTIES,
    PREPARES,
    Adjustment,
    DeviceInfo,
    DeviceType,
    KVSpec,
    Limits,
    Logprobs,
    Op,
    Step,
)

INFO = DeviceInfo("none", "0", "none", "none", "none", DeviceType.DISCRETE, features=(PREPARES,))
LIMITS = Limits(max_tokens=512, max_seqs=64, max_rows=64, max_blocks=128)


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Counting:
    """A driver that counts what it records and computes nothing: each token is 0."""

    def __init__(self) -> None:
        self.recorded = self.submitted = 0

    def alloc(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def free(self, buffer: Buffer) -> None: ...

    def upload(self, buffer: Buffer, array: np.ndarray[Any, Any], offset: int = 0) -> None: ...

    def download(self, buffer: Buffer, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        array[...] = 0

    def record(self, launches: Sequence[Launch]) -> object:
        self.recorded += 1
        return launches

    def submit(self, recording: object) -> None:
        self.submitted += 1

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None: ...


LOWERING = Lowering(dict.fromkeys((*get_args(Op), Adjustment, Logprobs), lambda ctx, op, bucket: []), lambda _: True)


@pytest.fixture
def driver() -> Counting:
    return Counting()


@pytest.fixture
def make_engine(make_rig: Callable[..., Any]) -> Callable[[], tuple[Engine, Counting]]:
    """An engine over a driver that counts."""

    def make() -> tuple[Engine, Counting]:
        driver = Counting()
        device = GpuDevice(INFO, driver, LOWERING)
        return make_rig(device, limits=LIMITS, num_blocks=4096, block_size=32, context_length=4096).engine, driver

    return make


def traffic(engine: Engine, rng: np.random.Generator, requests: int, *, together: bool) -> None:
    """Requests with prompts of any length, at once or as they come."""
    waiting = []
    for i in range(requests):
        options = GenerationOptions(
            max_tokens=int(rng.integers(1, 100)), temperature=float(i % 2), top_p=0.9 if i % 4 == 1 else 1.0
        )
        waiting.append(engine.preparer.prepare(rng.integers(0, 16, rng.integers(1, 800)).tolist(), options))
    while waiting or engine.busy:
        for _ in range(len(waiting) if together else int(rng.integers(0, 2))):
            if waiting:
                engine.add(waiting.pop())
        engine.step()


def prepare(engine: Engine, driver: Counting) -> int:
    """Prepare all usual steps and the stand-ins; the number of recordings made."""
    executable: Any = engine._executable
    prepare_stand_ins(executable, engine.stand_ins(), "none:0")
    for step in usual_steps(engine.limits, engine.kv, engine.preparer.context):
        executable.prepare(step)
    return driver.recorded


@pytest.mark.parametrize("together", [True, False])
def test_traffic_finds_what_it_needs_recorded(
    make_engine: Callable[[], tuple[Engine, Counting]], together: bool
) -> None:
    recorded = missed = 0
    for seed in map(int, np.random.default_rng().integers(1 << 32, size=6)):
        cold, warm = make_engine(), make_engine()
        ready = prepare(*warm)
        assert warm[1].submitted == 0  # nothing ran
        for engine, _ in (cold, warm):
            traffic(engine, np.random.default_rng(seed), 100, together=together)
        assert warm[1].recorded == ready
        executable: Any = warm[0]._executable
        recorded, missed = recorded + cold[1].recorded, missed + len(executable._missed)
        print(f"seed {seed}; recorded by then: {recorded} cold, {missed} warm")
    assert missed * 5 <= recorded  # seldom sizes, far into a context


def test_64_prompts_at_once_record_nothing(make_engine: Callable[[], tuple[Engine, Counting]]) -> None:
    engine, driver = make_engine()
    ready = prepare(engine, driver)
    rng = np.random.default_rng()
    for _ in range(64):
        engine.add(
            engine.preparer.prepare(
                rng.integers(0, 260, 512).tolist(), GenerationOptions(max_tokens=64, ignore_eos=True)
            )
        )
    while engine.busy:
        engine.step()
    assert driver.recorded == ready


def test_penalties_and_logprobs_record_nothing(make_rig: Callable[..., Any]) -> None:
    driver, able = Counting(), replace(INFO, features=(PENALTIES, LOGPROBS, PREPARES))
    device = GpuDevice(able, driver, LOWERING)
    rig = make_rig(device, limits=LIMITS, num_blocks=4096, block_size=32, context_length=4096)
    prepare_stand_ins(rig.executable, rig.engine.stand_ins(), "none:0")
    for step in rig.engine.usual_steps():
        rig.executable.prepare(step)
    ready, rng = driver.recorded, np.random.default_rng()
    for options in ({"repetition_penalty": 1.2}, {"logprobs": 5}, {"frequency_penalty": 0.1, "top_p": 0.9}):
        for _ in range(64):
            given = GenerationOptions(max_tokens=24, ignore_eos=True, temperature=1.0, **options)
            rig.engine.add(rig.engine.preparer.prepare(rng.integers(0, 260, 100).tolist(), given))
        while rig.engine.busy:
            rig.engine.step()
    assert driver.recorded == ready
    assert all(size.tokens > size.rows for size in rig.executable._missed)  # decoding finds its own sizes


@pytest.mark.parametrize("together", [True, False])
def test_what_stands_in_for_all_other_sizes(make_rig: Callable[..., Any], together: bool) -> None:
    """Traffic that comes before any usual size is prepared records nothing; what it missed is prepared afterwards."""
    driver, able = Counting(), replace(INFO, features=(PENALTIES, LOGPROBS, PREPARES))
    device = GpuDevice(able, driver, LOWERING)
    engine = make_rig(device, limits=LIMITS, num_blocks=4096, block_size=32, context_length=4096).engine
    executable: Any = engine._executable
    prepare_stand_ins(executable, engine.stand_ins(), "none:0")
    ready, rng = driver.recorded, np.random.default_rng()
    assert ready <= 8  # each delays the loading of a model
    traffic(engine, rng, 60, together=together)
    for options in ({"repetition_penalty": 1.2}, {"logprobs": 5}, {"frequency_penalty": 0.1, "top_p": 0.9}):
        given = GenerationOptions(max_tokens=24, ignore_eos=True, temperature=1.0, **options)
        engine.add(engine.preparer.prepare(rng.integers(0, 260, 100).tolist(), given))
        while engine.busy:
            engine.step()
    assert driver.recorded == ready
    missed = [*executable._missed]
    assert missed
    (step, *_) = engine.usual_steps()
    for _ in missed:
        executable.prepare(step)
    assert set(missed) <= set(executable._recordings)
    assert not executable._missed


class Slow:
    """An executable whose preparing can be watched."""

    def __init__(self) -> None:
        self.prepared = threading.Semaphore(0)
        self.error: Exception | None = None

    def prepare(self, step: Step, count: int = 1, stands_in: bool = False) -> None:
        if self.error is not None:
            raise self.error
        self.prepared.release()


def steps() -> Any:
    return usual_steps(Limits(16, 2, 2, 4), KVSpec(1, 1, 32, 8, 32, "f16"), 128)


def test_nothing_is_prepared_while_somebody_waits() -> None:
    slow: Any = Slow()
    busy = threading.Event()
    busy.set()
    warm_up = WarmUp(slow, steps(), busy.is_set, "none:0")
    assert not slow.prepared.acquire(timeout=0.2)
    assert not warm_up.wait(0)
    busy.clear()
    assert warm_up.wait(60)
    assert warm_up.ready
    warm_up.close()


def test_who_never_waits_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests never stop, sizes are prepared beside them, one at a time."""
    monkeypatch.setattr(warm, "PATIENCE", 0.3)
    monkeypatch.setattr(warm, "BESIDE", 0.01)
    slow: Any = Slow()
    begun = time.monotonic()
    warm_up = WarmUp(slow, steps(), lambda: True, "none:0")
    assert slow.prepared.acquire(timeout=60)
    assert time.monotonic() - begun >= 0.3
    assert warm_up.wait(60)
    warm_up.close()


def test_closing_ends_it() -> None:
    slow: Any = Slow()
    warm_up = WarmUp(slow, steps(), lambda: True, "none:0")
    warm_up.close()
    assert not warm_up.thread.is_alive()
    assert not warm_up.wait(60)
    assert not slow.prepared.acquire(blocking=False)


def test_a_device_that_refuses_is_left_alone() -> None:
    slow: Any = Slow()
    slow.error = OutOfMemoryError("full.", device="none:0")
    warm_up = WarmUp(slow, steps(), lambda: False, "none:0")
    assert not warm_up.wait(60)
    warm_up.close()


def test_a_model_is_made_ready_after_it_is_loaded(driver: Counting) -> None:
    with load_model(device=GpuDevice(INFO, driver, LOWERING), context=128, max_seqs=2) as model:
        assert model.warm(60)
        assert driver.recorded > 10
        ready = driver.recorded
        model.generate("Hi", max_tokens=9, ignore_eos=True)
        assert driver.recorded == ready
    with load_model(device="cpu", context=128) as model:
        assert model.warm(0)  # there is nothing to prepare


def test_a_model_that_is_closed_at_once_waits_for_one_size_at_most(driver: Counting) -> None:
    threads = threading.active_count()
    load_model(device=GpuDevice(INFO, driver, LOWERING), context=128).close()
    assert threading.active_count() == threads


@pytest.mark.parametrize(("declared", "given", "taken"), [(0, None, 512), (64, None, 64), (64, 32, 32)])
def test_a_step_has_as_many_tokens_as_the_device_computes_best(declared: int, given: int | None, taken: int) -> None:
    device = GpuDevice(replace(INFO, step_tokens=declared), Counting(), LOWERING)
    with load_model(device=device, context=128, step_tokens=given) as model:
        assert model._worker.engine.limits.max_tokens == taken
        assert model.receipt(model.generate("Hi", max_tokens=1))["setup"]["step_tokens"] == taken
