"""The index of caches between replicas and ingresses, which may each be restarted."""

from __future__ import annotations

import asyncio
import math

from bitnet.core import Load
from bitnet.server.ray.gauges import Readings
from bitnet.server.ray.index import SILENT_SECONDS, Index, Mirror
from bitnet.server.ray.summary import Summary
from bitnet.server.ray.work import Facts, Held, State


def state(replica: str, deployment: str = "engine", model: str = "") -> State:
    return State(Facts(deployment, model, replica, "node", 512, 16, 1000, ()), Load(0, 0, 0, 100, 0, 0, 16))


def held(replica: str, *states: State, models: frozenset[int] = frozenset()) -> Held:
    return Held(states, Readings("engine", replica, "node", 0.0, 0.0, 0.0), models)


def publish(index: Index, replica: str, summary: Summary, known: int) -> int:
    return asyncio.run(index.publish(replica, held(replica, state(replica)), summary.since(known)))


def test_a_mirror_knows_what_replicas_hold_and_how_old_that_is() -> None:
    now = [0.0]
    index, mirror = Index(lambda: now[0]), Mirror(lambda: now[0])
    summary = Summary()
    summary.update([1, 2])
    assert publish(index, "a", summary, 0) == 1
    mirror.update(asyncio.run(index.poll(mirror.versions())))
    assert mirror.seen("a") == 0.0
    assert mirror.holders.leading([1, 2, 3]) == {"a": 2}
    assert mirror.seen("b") == -math.inf
    assert mirror.states("engine", "") == [state("a")]
    assert mirror.states("other", "") == []
    now[0] = 1.5
    mirror.update(asyncio.run(index.poll(mirror.versions())))  # the index is there, and the replica silent
    assert mirror.seen("a") == 0.0
    summary.update([2, 3])
    assert publish(index, "a", summary, 1) == 2
    mirror.update(asyncio.run(index.poll(mirror.versions())))
    assert mirror.seen("a") == 1.5
    assert (mirror.holders.leading([2, 3]), mirror.holders.leading([1])) == ({"a": 2}, {})
    mirror.update({})
    assert mirror.holders.leading([2, 3]) == {}


def test_a_restarted_index_asks_for_everything() -> None:
    index, summary, mirror = Index(), Summary(), Mirror()
    for i in range(100):
        summary.update(range(i, i + 10))
        known = publish(index, "a", summary, summary.version - 1)
    mirror.update(asyncio.run(index.poll(mirror.versions())))
    index = Index()
    summary.update([7])
    known = publish(index, "a", summary, known)
    assert known == 0  # it refuses a change from a version that it does not have
    assert publish(index, "a", summary, known) == summary.version
    mirror.update(asyncio.run(index.poll(mirror.versions())))
    assert mirror.holders.leading([7]) == {"a": 1}
    assert mirror.holders._sets.keys() == {7}


def test_a_silent_replica_is_forgotten() -> None:
    now = [0.0]
    index, summary = Index(lambda: now[0]), Summary()
    publish(index, "a", summary, 0)
    now[0] = SILENT_SECONDS + 1
    publish(index, "b", summary, 0)
    assert asyncio.run(index.poll({})).keys() == {"b"}


def test_a_replica_may_have_several_models_or_none_yet() -> None:
    index, mirror, summary = Index(), Mirror(), Summary()
    known = asyncio.run(index.publish("a", held("a", models=frozenset({5})), summary.since(0)))
    mirror.update(asyncio.run(index.poll(mirror.versions())))
    assert mirror.seen("a") > 0.0
    assert mirror.states("folder", "small") == []
    assert mirror.models("a") == {5}
    both = state("a", "folder", "small"), state("a", "folder", "large")
    asyncio.run(index.publish("a", held("a", *both), summary.since(known)))
    asyncio.run(index.publish("b", held("b", both[0], models=frozenset({5, 6})), Summary().since(0)))
    mirror.update(asyncio.run(index.poll(mirror.versions())))
    assert mirror.states("folder", "small") == [both[0], both[0]]
    assert mirror.states("folder", "large") == [both[1]]
    assert [set(mirror.models(name)) for name in "abc"] == [set(), {5, 6}, set()]
