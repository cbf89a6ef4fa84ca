"""Several engines behind one queue: tokens do not depend on the replica, and a lost device loses no request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.ticket import Ticket
from bitnet.core.engine.worker import Worker
from bitnet.core.errors import DeviceError, DeviceLostError, InvalidInputError, QueueFullError
from bitnet.core.hal import Limits

MakeRig = Callable[..., Any]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 3}
LONG = GenerationOptions(**OPTIONS)


@pytest.fixture
def make_worker(make_rig: MakeRig) -> Iterator[Callable[..., Worker]]:
    """``make_worker(2)``: so many replicas of the tiny model, named ``one``, ``two``, ``three``."""
    made: list[Worker] = []

    def make(count: int, *, rig: dict[str, Any] | None = None, **options: Any) -> Worker:
        engines = [make_rig(**rig or {}).engine for _ in range(count)]
        for engine, name in zip(engines, ("one", "two", "three"), strict=False):
            engine.device = name
        made.append(Worker(*engines, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@contextmanager
def held(worker: Worker) -> Iterator[None]:
    """Inside, no engine steps."""
    opened = threading.Event()
    for replica in worker.replicas:
        engine: Any = replica.engine
        engine.advance = lambda deliver, advance=engine.advance: opened.wait(60) and advance(deliver)
    try:
        yield
    finally:
        opened.set()


def lose(worker: Worker, which: int, after: int, error: BaseException | None = None) -> None:
    """Let the device of a replica fail in its step number ``after``."""
    executable: Any = worker.replicas[which].engine._executable
    collect, steps = executable.collect, iter(range(10**9))

    def failing() -> Any:
        if next(steps) >= after:
            raise error or DeviceLostError("it stopped answering.", device=worker.replicas[which].engine.device)
        return collect()

    executable.collect = failing


def submit(worker: Worker, prompt: Sequence[int], options: GenerationOptions = LONG) -> Ticket:
    return worker.submit(*worker.engine.preparer.prepare(prompt, options))


def result(ticket: Ticket) -> Any:
    *_, last = ticket
    return last.result


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, 40)).tolist() for _ in range(count)]


def test_work_is_shared_and_tokens_do_not_tell_who_answered(
    make_worker: Callable[..., Worker], make_rig: MakeRig
) -> None:
    worker, texts = make_worker(3), prompts(24)
    with ThreadPoolExecutor(24) as pool:
        done = list(pool.map(lambda text: result(submit(worker, text)), texts))
    alone = make_rig()
    assert [c.tokens for c in done] == [alone.one(text, **OPTIONS).tokens for text in texts]
    answered = [c.devices for c in done]
    assert all(len(devices) == 1 for devices in answered)
    assert {name for (name,) in answered} == {"one", "two", "three"}
    assert not any(replica.held for replica in worker.replicas)


def test_requests_wait_in_one_queue(make_worker: Callable[..., Worker]) -> None:
    """A replica holds what it runs and one that waits; the others go to whoever has a place first, in order."""
    worker = make_worker(2)
    most = worker.engine.limits.max_seqs
    with held(worker):
        tickets = [submit(worker, [i, i]) for i in range(20)]
        assert [len(replica.held) for replica in worker.replicas] == [most + 1] * 2
        assert worker.load().waiting == 20
        assert [g.sequences[0].tokens[0] for g in worker._queue] == list(range(2 * most + 2, 20))
    started = [result(ticket).timings for ticket in tickets]
    assert all(timings.total > 0 for timings in started)
    assert worker.load().waiting == worker.load().running == 0


def test_a_prefix_is_answered_where_it_is_cached(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(3, rig={"block_size": 4})
    rng = np.random.default_rng()
    chats = [rng.integers(0, 256, 60).tolist() for _ in range(3)]
    with held(worker):
        first = [submit(worker, chat, GenerationOptions(max_tokens=1)) for chat in chats]
    where = [result(ticket).devices for ticket in first]
    assert len(set(where)) == 3
    for _ in range(2):
        for chat, device in zip(chats, where, strict=True):
            done = result(submit(worker, [*chat, *rng.integers(0, 256, 5).tolist()], GenerationOptions(max_tokens=1)))
            assert done.devices == device
            assert done.timings.cached_tokens == 60
    other = result(submit(worker, rng.integers(0, 256, 60).tolist(), GenerationOptions(max_tokens=1)))
    assert other.timings.cached_tokens == 0


def test_a_busy_replica_is_left_for_an_idle_one_though_it_has_the_prefix(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2)
    chat = np.random.default_rng().integers(0, 256, 60).tolist()
    (busy,) = result(submit(worker, chat, GenerationOptions(max_tokens=1))).devices
    with held(worker):
        first, second = (submit(worker, [*chat, i]) for i in range(2))
    assert result(first).devices == (busy,)
    assert result(second).devices != (busy,)


def test_completions_of_one_prompt_stay_together(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2)
    tickets = worker.submit_all([worker.engine.preparer.prepare([i] * 20, LONG, 3) for i in range(4)])
    done = [result(ticket) for ticket in tickets]
    for i in range(0, 12, 3):
        assert len({c.devices for c in done[i : i + 3]}) == 1
        assert [c.timings.cached_tokens for c in done[i + 1 : i + 3]] == [
            16,
            16,
        ]  # the prompt's full blocks but the last


@pytest.mark.parametrize("after", [0, 3, 17])
def test_a_device_that_is_lost_loses_no_request(
    make_worker: Callable[..., Worker], make_rig: MakeRig, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    worker, texts = make_worker(2), prompts(18, seed=after)
    lose(worker, 0, after)
    with caplog.at_level(logging.WARNING, "bitnet"):
        groups = [worker.engine.preparer.prepare(text, LONG, 1 + i % 2) for i, text in enumerate(texts)]
        tickets = worker.submit_all(groups)
        chunks = [[*ticket] for ticket in tickets]
    done: list[Any] = [updates[-1].result for updates in chunks]
    alone = make_rig().run
    expected = [c for i, text in enumerate(texts) for c in alone([text], n=1 + i % 2, **OPTIONS)]
    assert [c.tokens for c in done] == [c.tokens for c in expected]
    assert [c.text for c in done] == [c.text for c in expected]
    for updates in chunks:  # what was streamed before and after fits together
        assert sum((u.chunk.tokens for u in updates if u.chunk), ()) == updates[-1].result.tokens
    if after:
        assert ("one", "two") in {c.devices for c in done}
    assert {c.devices[-1] for c in done} == {"two"} if after < 17 else {"one", "two"}
    assert worker.load().lost == ("one",)
    assert "one: it stopped answering. Its " in caplog.text
    assert "requests continue on two." in caplog.text
    assert result(submit(worker, [1, 2])).devices == ("two",)


def test_log_probabilities_go_on_where_they_were(make_worker: Callable[..., Worker], make_rig: MakeRig) -> None:
    worker, tokens = make_worker(2), np.random.default_rng(5).integers(0, 256, 90).tolist()
    lose(worker, 0, 2)
    ticket = worker.submit(worker.engine.preparer.prepare_score(tokens))
    rig = make_rig()
    rig.engine.add([rig.engine.preparer.prepare_score(tokens)])
    (expected,) = rig.finish().values()
    np.testing.assert_allclose(result(ticket), expected, atol=1e-5)
    assert worker.load().lost == ("one",)


def test_the_last_device_ends_every_request(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2)
    lose(worker, 0, 2)
    lose(worker, 1, 4)
    tickets = worker.submit_all([worker.engine.preparer.prepare(text, LONG) for text in prompts(20)])
    for ticket in tickets:
        with pytest.raises(DeviceLostError):
            list(ticket)
    with pytest.raises(DeviceLostError):
        submit(worker, [1])


def test_an_error_that_is_not_the_devices_ends_all(make_worker: Callable[..., Worker]) -> None:
    """As where the model's file was cut short: no other replica can do better."""
    worker = make_worker(2)
    lose(worker, 1, 2, RuntimeError("a fault of the host"))
    tickets = worker.submit_all([worker.engine.preparer.prepare(text, LONG) for text in prompts(20)])
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="a fault of the host"):
            list(ticket)
    assert worker.load().lost == ()


def test_cancelled_ones_end_wherever_they_are(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2)
    with held(worker):
        tickets = [submit(worker, [i]) for i in range(14)]
        for ticket in tickets[1::2]:
            ticket.cancel()
        assert not any(s.number % 2 for group in worker._queue for s in group.sequences)
        lose(worker, 0, 1)
    done = [result(ticket) for ticket in tickets]
    assert [c.finish_reason for c in done] == ["length", "cancelled"] * 7
    assert not worker._tickets


def test_one_that_is_cancelled_as_its_device_fails_ends(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2)
    executable: Any = worker.replicas[0].engine._executable

    def failing() -> Any:
        tickets[0].cancel()
        raise DeviceLostError("it stopped answering.", device="one")

    executable.collect = failing
    with held(worker):
        tickets = worker.submit_all([worker.engine.preparer.prepare([i], LONG) for i in range(3)])
    assert [result(ticket).finish_reason for ticket in tickets] == ["cancelled", "length", "length"]


def test_the_queue_is_bounded_for_all_replicas_together(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2, max_queue=3)
    most = 2 * worker.engine.limits.max_seqs + 3
    with held(worker):
        tickets = [submit(worker, [i]) for i in range(most)]
        with pytest.raises(QueueFullError, match=f"{most} requests run or wait"):
            submit(worker, [99])
    assert all(result(ticket).finish_reason == "length" for ticket in tickets)


def test_close_ends_what_is_queued(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2)
    tickets = worker.submit_all([worker.engine.preparer.prepare([i], LONG) for i in range(20)])
    worker.close()
    for ticket in tickets[10:]:
        with pytest.raises(InvalidInputError, match="closed"):
            list(ticket)
    assert not worker._tickets


def test_the_load_adds_up_caches(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(2, rig={"num_blocks": 40, "limits": Limits(32, 4, 8, 32)})
    assert worker.load().kv_blocks == 80
    lose(worker, 1, 0)
    with held(worker):
        tickets = [submit(worker, [i] * 9) for i in range(4)]
    for ticket in tickets:
        result(ticket)
    load = worker.load()
    assert (load.kv_blocks, load.kv_used, load.lost) == (40, 0, ("two",))
    assert load.kv_cached > 0


def test_a_device_error_names_its_device(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(1)
    lose(worker, 0, 0, DeviceError("out of order.", device="one"))
    with pytest.raises(DeviceError, match="one: out of order"):
        result(submit(worker, [1]))
