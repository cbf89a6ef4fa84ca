"""Who gets a helper that renders templates, and when another one is started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias

import pytest

from bitnet.core.support.helper import HelperStartError
from bitnet.core.text.sandbox import pool
from bitnet.core.text.sandbox.pool import HELPERS, Pool

Asked: TypeAlias = "SimpleQueue[tuple[str, Future[None]]]"
START = '["", []]'


class Scripted:
    """Stands for a helper: it answers, and starts, when the test says so.

    Attributes:
        asked: What was asked of all helpers, each with what lets it go on: an error that it raises, or None.
    """

    asked: Asked

    def ask(self, request: bytes) -> list[str | None]:
        goes_on = Future[None]()
        self.asked.put((request.decode(), goes_on))
        goes_on.result(30)
        return [request.decode()]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    Scripted.asked = SimpleQueue()
    monkeypatch.setattr(pool, "Renderer", Scripted)
    return Scripted.asked


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not so():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_whoever_has_waited_longest_is_next(
    asked: Asked, callers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 60.0)
    tried = Pool()

    def twice() -> None:
        tried.render("first", [])
        tried.render("again", [])

    done: list[Future[object]] = [callers.submit(twice)]
    _, go_on = asked.get(timeout=30)
    for place in range(4):
        done.append(callers.submit(tried.render, f"waits {place}", []))
        until(lambda: len(tried._turns) == place + 1)  # noqa: B023 - awaited here
    order: list[str] = []
    while len(order) < 5:
        go_on.set_result(None)
        request, go_on = asked.get(timeout=30)
        order.append(request)
    go_on.set_result(None)
    for one in done:
        one.result(30)
    assert order == [*(f'["waits {place}", []]' for place in range(4)), '["again", []]']
    assert len(tried._all) == 1


def test_nobody_waits_for_a_helper_that_starts(asked: Asked, callers: ThreadPoolExecutor) -> None:
    tried = Pool()
    first = callers.submit(tried.render, "a", [])
    _, ends_first = asked.get(timeout=30)
    second = callers.submit(tried.render, "b", [])
    request, starts = asked.get(timeout=30)
    assert request == START  # after some patience
    ends_first.set_result(None)
    request, ends_second = asked.get(timeout=30)
    assert request == '["b", []]'
    ends_second.set_result(None)
    assert (first.result(30), second.result(30)) == (['["a", []]'], ['["b", []]'])
    assert len(tried._idle) == 1
    starts.set_result(None)
    until(lambda: len(tried._idle) == 2)


def test_helpers_are_started_one_by_one_up_to_the_limit(
    asked: Asked, callers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 0.001)
    tried = Pool()
    done = [callers.submit(tried.render, str(n), []) for n in range(HELPERS + 2)]
    goes_on: list[Future[None]] = []
    starts = 0
    while len(goes_on) < HELPERS:
        request, go_on = asked.get(timeout=30)
        if request == START:
            starts += 1
            assert len(tried._all) == starts + 1
            time.sleep(0.02)
            assert len(tried._all) == starts + 1
            go_on.set_result(None)
        else:
            goes_on.append(go_on)
    assert starts == HELPERS - 1
    time.sleep(0.02)
    assert asked.empty()
    for _ in range(2):
        goes_on.pop(0).set_result(None)
        goes_on.append(asked.get(timeout=30)[1])
    for go_on in goes_on:
        go_on.set_result(None)
    assert [one.result(30) for one in done] == [[f'["{n}", []]'] for n in range(HELPERS + 2)]


def test_a_helper_that_does_not_start_is_tried_again(
    asked: Asked, callers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 0.001)
    tried = Pool()
    first = callers.submit(tried.render, "a", [])
    _, ends_first = asked.get(timeout=30)
    second = callers.submit(tried.render, "b", [])
    for _ in range(3):
        request, starts = asked.get(timeout=30)
        assert request == START
        starts.set_exception(HelperStartError("chat templates are rendered", "python", "it broke"))
    _, starts = asked.get(timeout=30)
    ends_first.set_result(None)
    request, ends_second = asked.get(timeout=30)
    assert request == '["b", []]'
    ends_second.set_result(None)
    assert (first.result(30), second.result(30)) == (['["a", []]'], ['["b", []]'])
    starts.set_result(None)
    until(lambda: len(tried._idle) == 2)


def test_an_interrupted_wait_keeps_no_helper(
    asked: Asked, callers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is interrupted as it begins, or when its turn has come."""
    tried = Pool()
    first = callers.submit(tried.render, "a", [])
    _, ends_first = asked.get(timeout=30)
    for came in (False, True):

        def interrupted(came: bool = came) -> None:
            if came:
                ends_first.set_result(None)
                first.result(30)
                until(lambda: not tried._turns)
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "PATIENCE", 0.001)
        monkeypatch.setattr(tried, "_start_another", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tried.render("b", [])
        assert not tried._turns
    assert len(tried._idle) == len(tried._all) == 1
