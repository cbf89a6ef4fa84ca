"""The thread around the engine: callers share steps, and none is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.worker import Worker
from bitnet.core.errors import BitNetError, DeviceLostError, InvalidInputError

MakeRig = Callable[..., Any]
LONG = GenerationOptions(max_tokens=100, ignore_eos=True)


@pytest.fixture
def worker(make_rig: MakeRig) -> Iterator[Worker]:
    worker = Worker(make_rig().engine)
    yield worker
    worker.close()


def complete(worker: Worker, prompt: list[int], options: GenerationOptions = LONG) -> Any:
    *_, last = worker.submit(*worker.engine.prepare(prompt, options))
    return last.result


def test_many_threads_at_once(worker: Worker, make_rig: MakeRig) -> None:
    prompts = [[i, 2 * i, 3] for i in range(20)]
    with ThreadPoolExecutor(20) as pool:
        done = list(pool.map(lambda prompt: complete(worker, prompt).tokens, prompts))
    alone = make_rig()
    assert done == [alone.one(prompt, max_tokens=100, ignore_eos=True).tokens for prompt in prompts]


def test_cancel_from_another_thread(worker: Worker) -> None:
    ticket = worker.submit(*worker.engine.prepare([1, 2], LONG))
    updates: Any = iter(ticket)
    next(updates)
    threading.Thread(target=ticket.cancel).start()
    *_, last = updates
    assert last.result.finish_reason == "cancelled"
    assert 0 < len(last.result.tokens) < 100
    ticket.cancel()  # a second time: nothing to do
    assert complete(worker, [5]).finish_reason == "length"


def test_every_waiting_caller_gets_the_devices_error(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = worker.engine._executable.run
    steps = 0

    def lose(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 20:
            raise DeviceLostError("it stopped answering.", device="cpu:numpy")
        return run(*arguments)

    def call(i: int) -> BaseException:
        with pytest.raises(DeviceLostError) as caught:
            complete(worker, [i])
        return caught.value

    monkeypatch.setattr(worker.engine._executable, "run", lose)
    with ThreadPoolExecutor(6) as pool:  # two more than run at a time
        errors = list(pool.map(call, range(6)))
    assert all(error is errors[0] for error in errors)
    monkeypatch.undo()
    lengths = []
    for _ in range(3):
        with pytest.raises(DeviceLostError) as caught:
            complete(worker, [1])
        lengths.append(len(caught.traceback))
    assert lengths[0] == lengths[-1]  # each caller's own, or they would hold on to all that ever asked
    assert "lose" in [entry.name for entry in caught.traceback]


def test_close_ends_what_runs_and_what_waits(make_rig: MakeRig) -> None:
    worker = Worker(make_rig().engine)
    tickets = [worker.submit(*worker.engine.prepare([i], LONG)) for i in range(9)]
    next(iter(tickets[0]))
    worker.close()
    for ticket in tickets:
        with pytest.raises(InvalidInputError, match="closed"):
            list(ticket)
    with pytest.raises(BitNetError, match="closed"):
        complete(worker, [1])
    worker.close()


def test_a_worker_that_was_never_used_closes(make_rig: MakeRig) -> None:
    Worker(make_rig().engine).close()
