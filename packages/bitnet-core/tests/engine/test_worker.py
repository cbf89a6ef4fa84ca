"""The engine's worker thread: callers share steps, and none is left waiting."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import GenerationOptions, Update
from bitnet.core.engine.blocks import prefix_digests
from bitnet.core.engine.request import Request
from bitnet.core.engine.ticket import Ticket, wake
from bitnet.core.engine.worker import Worker
from bitnet.core.errors import BitNetError, DeviceLostError, InvalidInputError, QueueFullError

MakeRig = Callable[..., Any]
LONG = GenerationOptions(max_tokens=100, ignore_eos=True)


@pytest.fixture
def worker(make_rig: MakeRig) -> Iterator[Worker]:
    worker = Worker(make_rig().engine)
    yield worker
    worker.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Worker], AbstractContextManager[None]]:
    """Inside, the engine's thread waits before its first step."""

    @contextmanager
    def closed(worker: Worker) -> Iterator[None]:
        opened, advance = threading.Event(), worker.engine.advance

        def wait(deliver: Any) -> None:
            assert opened.wait(60)
            advance(deliver)

        monkeypatch.setattr(worker.engine, "advance", wait)
        try:
            yield
        finally:
            opened.set()

    return closed


@pytest.fixture
def some_steps(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine's thread waits for this after its first steps: it could have made all before the test's next line."""
    go_on, advance, steps = threading.Event(), worker.engine.advance, itertools.count()

    def held(deliver: Any) -> None:
        assert next(steps) < 4 or go_on.wait(60)
        advance(deliver)

    monkeypatch.setattr(worker.engine, "advance", held)
    return go_on


def complete(worker: Worker, prompt: list[int], options: GenerationOptions = LONG) -> Any:
    return result(worker.submit(*worker.engine.preparer.prepare(prompt, options)))


def result(ticket: Ticket) -> Any:
    *_, last = ticket
    return last.result


def test_many_threads_at_once(worker: Worker, make_rig: MakeRig) -> None:
    prompts = [[i, 2 * i, 3] for i in range(20)]
    with ThreadPoolExecutor(20) as pool:
        done = list(pool.map(lambda prompt: complete(worker, prompt).tokens, prompts))
    alone = make_rig()
    assert done == [alone.one(prompt, max_tokens=100, ignore_eos=True).tokens for prompt in prompts]


def test_cancel_from_another_thread(worker: Worker, some_steps: threading.Event) -> None:
    ticket = worker.submit(*worker.engine.preparer.prepare([1, 2], LONG))
    updates: Any = iter(ticket)
    next(updates)
    canceller = threading.Thread(target=ticket.cancel)
    canceller.start()
    canceller.join(60)
    some_steps.set()
    *_, last = updates
    assert last.result.finish_reason == "cancelled"
    assert 0 < len(last.result.tokens) < 100
    ticket.cancel()  # a second time: nothing to do
    assert complete(worker, [5]).finish_reason == "length"


def test_every_waiting_caller_gets_the_devices_error(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = worker.engine._executable.collect
    steps = 0

    def lose() -> Any:
        nonlocal steps
        steps += 1
        if steps > 5:
            raise DeviceLostError("it stopped answering.", device="cpu:numpy")
        return collect()

    def call(i: int) -> BaseException:
        with pytest.raises(DeviceLostError) as caught:
            complete(worker, [i])
        return caught.value

    monkeypatch.setattr(worker.engine._executable, "collect", lose)
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


def test_an_error_that_was_told_is_told_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose() -> Any:
        raise DeviceLostError("it stopped answering.", device="cpu:numpy")

    monkeypatch.setattr(worker.engine._executable, "collect", lose)
    request = Request(None, worker.submit(*worker.engine.preparer.prepare([1, 2], LONG)))
    with pytest.raises(DeviceLostError, match="stopped answering"):
        list(request)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="stopped answering"):
            request.result()
    request.close()


def test_close_ends_what_runs_and_what_waits(make_rig: MakeRig) -> None:
    worker = Worker(make_rig().engine)
    tickets = [worker.submit(*worker.engine.preparer.prepare([i], LONG)) for i in range(9)]
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


def test_tasks_and_threads_get_the_same_tokens(worker: Worker, make_rig: MakeRig) -> None:
    prompts = [[i, 3, i] for i in range(12)]

    async def one(prompt: list[int]) -> tuple[int, ...]:
        updates: Any = [update async for update in worker.submit(*worker.engine.preparer.prepare(prompt, LONG))]
        assert [u.result is None for u in updates] == [True] * (len(updates) - 1) + [False]
        tokens: tuple[int, ...] = updates[-1].result.tokens
        return tokens

    async def every() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(one, prompts))

    alone = make_rig()
    assert asyncio.run(every()) == [alone.one(p, max_tokens=100, ignore_eos=True).tokens for p in prompts]


def test_an_update_that_comes_as_a_task_begins_to_wait_reaches_it(worker: Worker) -> None:
    """Between the task's look at the queue and its wait; the engine's thread may be anywhere meanwhile."""

    class Queue:
        def __init__(self) -> None:
            self.updates: list[Update] = []

        def put(self, update: Update) -> None:
            self.updates.append(update)

        def empty(self) -> bool:
            return not self.updates

        def get_nowait(self) -> Update:
            if self.updates:
                return self.updates.pop()
            wake([ticket.put(Update(0))])
            raise queue.Empty

    prompt = worker.engine.preparer.prepare([1, 2], LONG)
    ticket = Ticket(worker, *prompt)
    waiting: Any = Queue()
    ticket._updates = waiting

    async def read() -> Update:
        return await asyncio.wait_for(anext(ticket), 20)

    assert asyncio.run(read()) == Update(0)


def test_who_waits_for_the_result_alone_is_not_woken_for_each_token(worker: Worker) -> None:
    ticket = Ticket(worker, *worker.engine.preparer.prepare([1, 2], LONG))
    ticket.put(Update(0))
    ticket.skip_chunks()
    ticket.put(Update(1))
    last = Update(2, result=np.zeros(1))
    ticket.put(last)
    assert list(ticket) == [Update(0), last]


def test_a_task_that_is_cancelled_while_it_waits_loses_no_update(worker: Worker) -> None:
    async def impatient() -> int:
        ticket = worker.submit(*worker.engine.preparer.prepare([1, 2], LONG))
        updates: list[Update] = []
        while not updates or updates[-1].result is None:
            with suppress(asyncio.TimeoutError):
                updates.append(await asyncio.wait_for(anext(ticket), 1e-4))
        result: Any = updates[-1].result
        assert sum((u.chunk.tokens for u in updates if u.chunk), ()) == result.tokens
        return len(result.tokens)

    assert asyncio.run(impatient()) == 100


@pytest.mark.parametrize("call", ["close", "aclose", "result"])
def test_a_result_that_an_interrupt_took_away_is_there(worker: Worker, call: str) -> None:
    """It comes when the queue has handed out the last update, and before anybody has it."""

    class Queue(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            update = super().get(block, timeout)
            if update.result is not None:
                raise KeyboardInterrupt
            return update

    ticket = Ticket(worker, *worker.engine.preparer.prepare([1, 2], GenerationOptions(max_tokens=3)))
    ticket._updates = Queue()
    for update in (*worker.submit(*worker.engine.preparer.prepare([1, 2], GenerationOptions(max_tokens=3))),):
        ticket.put(update)
    request = Request(None, ticket)
    with pytest.raises(KeyboardInterrupt):
        list(request)
    if call == "aclose":
        asyncio.run(asyncio.wait_for(request.aclose(), 20))
    else:
        caller = threading.Thread(target=getattr(request, call), daemon=True)
        caller.start()
        caller.join(20)
        assert not caller.is_alive()
    assert request.completion is not None
    assert len(request.completion.tokens) == 3


def test_a_second_task_that_waits_is_told(worker: Worker, gate: Any) -> None:
    """Only one can be woken: the other would wait for ever."""

    async def both() -> None:
        with gate(worker):
            ticket = worker.submit(*worker.engine.preparer.prepare([1, 2], LONG))
            first = asyncio.ensure_future(anext(ticket))
            await asyncio.sleep(0)
            with pytest.raises(InvalidInputError, match="another task waits"):
                await asyncio.wait_for(anext(ticket), 5)
        assert (await first).chunk is not None
        assert (await anext(ticket)).chunk is not None

    asyncio.run(both())


def test_a_loop_that_is_gone_disturbs_nobody(worker: Worker) -> None:
    async def leave() -> Any:
        ticket = worker.submit(*worker.engine.preparer.prepare([1, 2], LONG))
        await anext(ticket)
        waiting = asyncio.ensure_future(anext(ticket))
        await asyncio.sleep(0)
        waiting.cancel()
        return ticket

    ticket = asyncio.run(leave())
    assert complete(worker, [4]).finish_reason == "length"
    *_, last = ticket
    assert last.result.finish_reason == "length"


def test_the_queue_takes_so_many_requests(make_rig: MakeRig, gate: Any) -> None:
    engine = make_rig().engine
    most = engine.limits.max_seqs + 2
    worker = Worker(engine, max_queue=2)
    with gate(worker):
        taken = [worker.submit(*engine.preparer.prepare([i], LONG)) for i in range(most)]
        with pytest.raises(QueueFullError, match=f"{most} requests run or wait, and the limit is {most}"):
            worker.submit(*engine.preparer.prepare([9], LONG))
        taken.pop().cancel()
    assert [result(ticket).finish_reason for ticket in taken] == ["length"] * len(taken)
    with pytest.raises(InvalidInputError, match=f"asks for {most + 1} generations; at most {most} may"):
        worker.submit_all([engine.preparer.prepare([i], LONG) for i in range(most + 1)])
    with gate(worker):
        first = worker.submit(*engine.preparer.prepare([1], LONG))
        with pytest.raises(QueueFullError):  # all or none
            worker.submit_all([engine.preparer.prepare([i], LONG) for i in range(most)])
    assert result(first).finish_reason == "length"
    assert worker.load().running == worker.load().waiting == 0
    assert len(worker.submit_all([engine.preparer.prepare([i], LONG) for i in range(most)])) == most
    worker.close()


def test_the_queue_takes_so_many_prompt_tokens(make_rig: MakeRig, gate: Any) -> None:
    engine = make_rig().engine
    worker = Worker(engine, max_queue_tokens=5)
    with gate(worker):
        first = worker.submit(*engine.preparer.prepare([1] * 9, LONG))  # none waits, so it may be long
        with pytest.raises(QueueFullError, match="9 prompt tokens wait, and the limit is 5"):
            worker.submit(*engine.preparer.prepare([1], LONG))
    assert len(result(first).tokens) == 100
    worker.close()


def test_the_load_says_what_runs_waits_and_is_cached(worker: Worker, gate: Any, some_steps: threading.Event) -> None:
    engine = worker.engine
    with gate(worker):
        tickets = [worker.submit(*engine.preparer.prepare([1, 2, i], LONG)) for i in range(3)]
        load = worker.load()
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 3, 9)
    updates = [iter(ticket) for ticket in tickets]
    for update in updates:
        next(update)
    load = worker.load()
    assert (load.running, load.kv_used >= 3) == (3, True)
    some_steps.set()
    assert [[*update][-1].result is not None for update in updates] == [True] * 3
    idle = worker.load()
    assert (idle.running, idle.waiting, idle.kv_used) == (0, 0, 0)
    assert idle.kv_cached >= 100 // idle.block_size
    assert len(worker.cached_blocks()) == idle.kv_cached
    (first, *_) = prefix_digests([*tickets[0].sequence.tokens], idle.block_size)
    assert first in worker.cached_blocks()
