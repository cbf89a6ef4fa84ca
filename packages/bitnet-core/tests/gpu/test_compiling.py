"""Compiling side by side: each key once, the first error, and nothing begun after it."""

from __future__ import annotations

import os
import threading

import pytest

from bitnet.core.gpu import compiling
from bitnet.core.gpu.compiling import compile_all


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_processors", lambda: 3)


def test_each_key_once_and_side_by_side() -> None:
    """Three at a time wait for one another: one after the other they would wait for ever."""
    together = threading.Barrier(3, timeout=20)
    seen: list[int] = []

    def make(key: int) -> int:
        seen.append(key)
        together.wait()
        return key * key

    assert compile_all(make, [3, 1, 2, 3, 1]) == {3: 9, 1: 1, 2: 4}
    assert sorted(seen) == [1, 2, 3]


def test_nothing_and_one_take_no_thread() -> None:
    here = threading.get_ident()
    assert compile_all(lambda key: threading.get_ident(), []) == {}
    assert compile_all(lambda key: threading.get_ident(), ["a", "a"]) == {"a": here}


def test_the_first_error_ends_it() -> None:
    started: list[int] = []
    wait = threading.Event()

    def make(key: int) -> int:
        started.append(key)
        if key == 0:
            raise ValueError("kernel 0")
        wait.wait(0.2)
        return key

    with pytest.raises(ValueError, match="kernel 0"):
        compile_all(make, range(50))
    assert len(started) < 50
    settled = len(started)
    wait.wait(0.5)
    assert len(started) == settled  # what had begun has ended, and nothing begins any more


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not limit a process to processors")
def test_a_thread_for_each_processor_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 7})
    assert compiling._processors() == 2
