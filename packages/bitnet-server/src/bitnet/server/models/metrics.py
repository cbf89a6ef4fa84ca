"""Prometheus metrics: counters and histograms of requests, and the engine's current load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from bitnet.core import Completion, Load

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Counted(Protocol):
    """A loaded model, as far as it is counted."""

    names: tuple[str, ...]

    @property
    def model(self) -> Any: ...
    @property
    def devices(self) -> str: ...


Loaded: TypeAlias = Callable[[], Sequence[Counted]]

_GAUGES: dict[str, tuple[str, Callable[[Load], float]]] = {
    "bitnet_requests_running": ("Generations that take part in steps", lambda load: load.running),
    "bitnet_requests_waiting": ("Generations that wait for a place", lambda load: load.waiting),
    "llamacpp:requests_processing": ("As bitnet_requests_running", lambda load: load.running),
    "llamacpp:requests_deferred": ("As bitnet_requests_waiting", lambda load: load.waiting),
    "bitnet_prompt_tokens_waiting": ("Prompt tokens that wait", lambda load: load.waiting_tokens),
    "bitnet_kv_blocks": ("Blocks of the KV cache", lambda load: load.kv_blocks),
    "bitnet_kv_blocks_used": ("Blocks that generations hold", lambda load: load.kv_used),
    "bitnet_kv_blocks_cached": ("Unused blocks whose content can be used again", lambda load: load.kv_cached),
}
_LLAMA_COUNTERS: dict[str, tuple[str, Callable[[Completion], float]]] = {
    "llamacpp:prompt_tokens": (
        "Computed prompt tokens",
        lambda one: one.timings.prompt_tokens - one.timings.cached_tokens,
    ),
    "llamacpp:prompt_tokens_cached": ("Cached prompt tokens", lambda one: one.timings.cached_tokens),
    "llamacpp:prompt_seconds": ("Time of prompts", lambda one: one.timings.prefill_seconds),
    "llamacpp:tokens_predicted": ("Generated tokens", lambda one: len(one.tokens)),
    "llamacpp:tokens_predicted_seconds": ("Time of tokens after the first", lambda one: one.timings.decode_seconds),
    "llamacpp:spec_decode_num_draft_tokens": ("Drafted tokens", lambda one: one.timings.drafted_tokens),
    "llamacpp:spec_decode_num_accepted_tokens": ("Accepted drafted tokens", lambda one: one.timings.accepted_tokens),
}
"""What dashboards made for llama.cpp's server read, of each generation."""


def _reading(loaded: Loaded, read: Callable[[Load], float]) -> float:
    return sum(read(one.model.load()) for one in loaded())


def _kv_use(loaded: Loaded) -> float:
    """Share of the KV cache's blocks that generations hold."""
    loads: list[Load] = [one.model.load() for one in loaded()]
    return sum(load.kv_used for load in loads) / max(1, sum(load.kv_blocks for load in loads))


class Metrics:
    """One registry per server, so that a process may have several.

    Attributes:
        began: When counting began, in seconds since 1970.

    Args:
        loaded: Returns the loaded models; gauges are summed over them, and the share of KV blocks is of all theirs.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._registry = registry = CollectorRegistry()
        self.began = int(time.time())
        self._loaded = loaded
        self._info = Gauge("bitnet_info", "The loaded models and their devices", ["model", "device"], registry=registry)
        self.responses = Counter(
            "bitnet_http_responses", "Answers by path and status", ["path", "status"], registry=registry
        )
        self.refused = Counter("bitnet_requests_refused", "Requests that found the queue full", registry=registry)
        self._ends = Counter("bitnet_generations", "Generations by how they ended", ["reason"], registry=registry)
        self._tokens = Counter("bitnet_tokens", "Tokens by kind", ["kind"], registry=registry)
        self._queue = Histogram("bitnet_queue_seconds", "Wait for a place", buckets=SECONDS, registry=registry)
        self._first = Histogram(
            "bitnet_time_to_first_token_seconds", "TTFT, waiting included", buckets=SECONDS, registry=registry
        )
        self._inter = Histogram(
            "bitnet_inter_token_seconds",
            "Mean time between two tokens of a generation",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self._llama = [
            (Counter(name, meaning, registry=registry), read) for name, (meaning, read) in _LLAMA_COUNTERS.items()
        ]
        for gauge, (meaning, read) in _GAUGES.items():
            Gauge(gauge, meaning, registry=registry).set_function(partial(_reading, loaded, read))
        use = Gauge("bitnet_kv_use_ratio", "Share of the KV cache's blocks that generations hold", registry=registry)
        use.set_function(partial(_kv_use, loaded))

    def add(self, collector: Collector) -> None:
        """Show more metrics beside these."""
        self._registry.register(collector)

    def count(self, completion: Completion) -> None:
        """Count a generation that has ended."""
        timings = completion.timings
        self._ends.labels(completion.finish_reason).inc()
        self._tokens.labels("prompt").inc(timings.prompt_tokens - timings.cached_tokens)
        self._tokens.labels("cached").inc(timings.cached_tokens)
        self._tokens.labels("generated").inc(len(completion.tokens))
        self._tokens.labels("drafted").inc(timings.drafted_tokens)
        self._tokens.labels("accepted").inc(timings.accepted_tokens)
        for counter, read in self._llama:
            counter.inc(read(completion))
        self._queue.observe(timings.started)
        if timings.first_token is not None:
            self._first.observe(timings.first_token)
        if rate := timings.decode_tokens_per_second:
            self._inter.observe(1 / rate)

    def text(self) -> bytes:
        self._info.clear()
        for one in self._loaded():
            self._info.labels(one.names[0], one.devices).set(1)
        return generate_latest(self._registry)
