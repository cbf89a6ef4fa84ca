"""What each replica shows of itself, in two forms: as Ray's metrics of its node, and in the ingress's ``/metrics``.

This module knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX = "bitnet_replica_"
GAUGES = {
    "prompt_tokens_waiting": "Prompt tokens that wait on a replica",
    "kv_use_ratio": "Share of the blocks of a replica's KV cache that generations hold",
    "cached_ratio": "Share of all prompt tokens of a replica's answers that its KV cache had",
}
"""The gauges' names without :data:`PREFIX`, and their meanings."""


@dataclass(frozen=True, slots=True)
class Readings:
    """A replica and its gauges; attributes that :data:`GAUGES` names are explained there.

    Attributes:
        deployment, replica, node: Serve's name and ids of its deployment, itself and its node.
    """

    deployment: str
    replica: str
    node: str
    prompt_tokens_waiting: float
    kv_use_ratio: float
    cached_ratio: float


class ReplicaGauges(Collector):
    """The gauges of all replicas, for a Prometheus registry.

    Args:
        readings: Returns what the replicas last said.
    """

    def __init__(self, readings: Callable[[], Sequence[Readings]]) -> None:
        self._readings = readings

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges, as the registry asks for them."""
        found = self._readings()
        for name, meaning in GAUGES.items():
            family = GaugeMetricFamily(f"{PREFIX}{name}", meaning, labels=["deployment", "replica", "node"])
            for one in found:
                family.add_metric([one.deployment, one.replica, one.node], getattr(one, name))
            yield family
