"""Serve's autoscaling policy of a model's replicas: a thin adapter of :mod:`bitnet.server.ray.scaling`.

Serve copies this module by value into its controller, with every object that it names; only modules stay what they are.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from bitnet.server.ray import scaling


class TokenPolicy:
    """How many replicas there should be. Serve waits before it follows, and keeps to the bounds.

    Args:
        places: Requests that a replica computes at the same time.
    """

    def __init__(self, places: int) -> None:
        self._places = places

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        by_replica: dict[Any, dict[str, float]] = {}
        for name, values in (context.aggregated_metrics or {}).items():
            for replica, value in values.items():
                by_replica.setdefault(replica, {})[name] = value
        uses = [scaling.Use.read(by_replica.get(replica, {})) for replica in context.running_replicas]
        need = scaling.needed(uses, context.total_queued_requests or 0.0, self._places)
        if need == 0 and context.total_num_requests > 0:  # metrics of replicas come late
            need = context.total_num_requests / self._places
        target = context.target_num_replicas
        found = scaling.wanted(target, need)
        # While no replica runs, those that start have had no request to refuse: their idle time begins when they run.
        return (found if context.running_replicas else max(found, target)), {}
