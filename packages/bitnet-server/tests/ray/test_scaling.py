"""How many replicas there should be: as many as the work needs, and no change without a clear reason."""

from __future__ import annotations

import math
import random
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core import Load
from bitnet.server.ray import scaling
from bitnet.server.ray.scaling import KV_SHARE, SLACK, WAITING_TOKENS, Use, needed, wanted

IDLE = Use(0, 0, 0)


def test_a_load_survives_as_metrics() -> None:
    load = Load(running=3, waiting=2, waiting_tokens=700, kv_blocks=200, kv_used=50, kv_cached=9, block_size=16)
    use = Use.of(load, 4)
    assert use == Use(0.75, 700, 0.25)
    assert Use.read(use.metrics()) == use
    assert Use.read({}) == IDLE


@pytest.mark.parametrize(
    ("uses", "queued", "need"),
    [
        ([IDLE, IDLE], 0, 0),
        ([Use(1, 0, 0.1), Use(0.5, 0, 0.1)], 0, 1.5),
        ([Use(1, WAITING_TOKENS, 0.1)], 0, 2),
        ([Use(1, 0, 0.1)], 8, 3),
        ([Use(1, WAITING_TOKENS, 0.1)], 8, 3),  # the same requests are not counted twice
        ([Use(0.1, 0, 1.0)], 0, 1 / KV_SHARE),
        ([], 4, 1),
    ],
)
def test_what_is_needed(uses: list[Use], queued: float, need: float) -> None:
    assert needed(uses, queued, 4) == pytest.approx(need)


def test_it_grows_at_once_and_shrinks_one_by_one() -> None:
    assert wanted(1, 2.1) == wanted(2, 2.1) == 3
    assert [wanted(3, need) for need in (2.9, 2.0, 1.41, 1.39, 0.0)] == [3, 3, 3, 2, 2]
    assert [wanted(1, need) for need in (1.0, 0.01, 0.0)] == [1, 1, 0]
    assert [wanted(0, need) for need in (0.0, 0.01)] == [0, 1]


@pytest.mark.parametrize("_", range(20))
def test_a_steady_load_with_noise_does_not_flap(_: int) -> None:
    """Whatever the number from which it begins, it settles, and noise of 10 % moves it in one direction at most."""
    base = random.uniform(0.3, 20)
    replicas = random.randrange(1, 30)
    for _step in range(40):
        replicas = wanted(replicas, base)
    assert math.ceil(base) <= replicas <= math.ceil(base / SLACK) + 1
    seen = [replicas]
    for _step in range(200):
        seen.append(wanted(seen[-1], base * random.uniform(0.9, 1.1)))
    assert seen in (sorted(seen), sorted(seen, reverse=True))


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)")
def test_the_policy_reads_what_serve_knows() -> None:
    from bitnet.server.ray.policy import TokenPolicy

    def decide(target: int, requests: float, queued: float, uses: dict[str, Use]) -> int:
        metrics: dict[str, dict[str, float]] = {}
        for replica, use in uses.items():
            for name, value in use.metrics().items():
                metrics.setdefault(name, {})[replica] = value
        context: Any = SimpleNamespace(
            aggregated_metrics=metrics,
            running_replicas=["a", "b"][: len(uses)],
            total_queued_requests=queued,
            total_num_requests=requests,
            target_num_replicas=target,
        )
        return TokenPolicy(4)(context)[0]

    busy = Use(1, 2 * WAITING_TOKENS, 0.2)
    assert decide(1, 12, 0, {"a": busy}) == 3
    assert decide(2, 1, 0, {"a": Use(0.25, 0, 0.1), "b": IDLE}) == 1
    assert decide(1, 0, 0, {"a": IDLE}) == 0
    assert decide(1, 2, 0, {"a": IDLE}) == 1  # a request runs that no metric has yet
    assert decide(1, 0, 0, {"a": busy, "gone": busy}) == scaling.wanted(1, 3.0)
    assert decide(0, 0, 0, {}) == 0
    assert decide(0, 1, 1, {}) == 1  # it wakes
    assert [decide(target, 0, 0, {}) for target in (1, 3)] == [1, 3]  # they start: none has been idle
    assert decide(3, 1, 1, {}) == 3
    assert decide(1, 12, 12, {}) == 3


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)")
def test_idle_time_begins_when_a_replica_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own delays around the policy: a model that loads for longer than its idle time is not given up."""
    from ray.serve import autoscaling_policy
    from ray.serve.config import AutoscalingConfig

    from bitnet.server.ray.policy import TokenPolicy

    config = AutoscalingConfig(
        min_replicas=0, max_replicas=4, upscale_delay_s=5, downscale_delay_s=60, downscale_to_zero_delay_s=300
    )
    decide = autoscaling_policy._apply_autoscaling_config(TokenPolicy(4))
    target, running = 1, random.randrange(400, 2000)
    state: dict[str, Any] = {}
    stopped = None
    now = [0.0]
    monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=lambda: now[0]))
    while stopped is None and now[0] < running + 1000:
        replicas = ["a"] if now[0] >= running else []
        context: Any = SimpleNamespace(
            aggregated_metrics={},
            running_replicas=replicas,
            current_num_replicas=len(replicas),
            total_queued_requests=0.0,
            total_num_requests=0.0,
            target_num_replicas=target,
            policy_state=state,
            config=config,
        )
        target, state = decide(context)
        stopped = now[0] if target == 0 else None
        now[0] += 1.0
    assert stopped is not None
    assert running + 300 <= stopped <= running + 302


def test_the_models_of_a_replica_count_together() -> None:
    assert Use.together([Use(0.5, 100, 0.25), Use(1.0, 50, 0.75)]) == Use(1.5, 150, 0.75)
    assert Use.together([]) == IDLE
