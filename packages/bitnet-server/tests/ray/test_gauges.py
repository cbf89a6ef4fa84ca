"""Gauges of replicas, from the index to the text of ``/metrics``."""

from __future__ import annotations

import asyncio
import random

from prometheus_client.parser import text_string_to_metric_families

from bitnet.server.models.metrics import Metrics
from bitnet.server.ray.gauges import GAUGES, PREFIX, Readings, ReplicaGauges
from bitnet.server.ray.index import Index, Mirror
from bitnet.server.ray.summary import Summary
from bitnet.server.ray.work import Held


def test_metrics_have_the_gauges_of_each_replica_until_it_is_forgotten() -> None:
    index, mirror, metrics = Index(), Mirror(), Metrics(lambda: ())
    metrics.add(ReplicaGauges(lambda: mirror.readings))
    assert shown(metrics) == {}
    said = [Readings("engine", name, f"node-{name}", *(random.random() for _ in GAUGES)) for name in "ab"]
    for one in said:
        asyncio.run(index.publish(one.replica, Held((), one), Summary().since(0)))
    mirror.update(asyncio.run(index.poll({})))
    assert shown(metrics) == {
        (name, one.deployment, one.replica, one.node): getattr(one, name) for one in said for name in GAUGES
    }
    mirror.update({})
    assert shown(metrics) == {}


def shown(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """The replicas' gauges as Prometheus' own parser reads them, by name without prefix and labels."""
    return {
        (sample.name.removeprefix(PREFIX), *(sample.labels[key] for key in ("deployment", "replica", "node"))): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }
