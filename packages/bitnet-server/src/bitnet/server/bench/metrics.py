"""Metrics of a load test, with the definitions and names of ``vllm bench serve``: latencies, throughput, goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Time between two events of a stream",
    "e2el": "End-to-end latency",
}


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered completely. Times are seconds on the same clock.

    Attributes:
        sent: When it was sent.
        times: Arrival time of each event with text; at least one. An event may hold several tokens.
    """

    sent: float
    times: Sequence[float]
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the last text."""
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 if there is only one."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def within(self, slos: Mapping[str, float]) -> bool:
        """Whether it meets every objective: maximum milliseconds for ``ttft``, ``tpot`` or ``e2el``."""
        return all(getattr(self, name) * 1e3 <= most for name, most in slos.items())


def summary(answers: Sequence[Answered], failed: int, seconds: float, slos: Mapping[str, float]) -> dict[str, Any]:
    """The results under vLLM's names: ``mean_ttft_ms``, ``p99_itl_ms``, ``output_throughput`` and so on.

    A request of one output token has no TPOT. Percentiles are interpolated linearly.

    Args:
        failed: Number of requests refused or broken off; they count in no other metric.
        seconds: Seconds from the first request to the last answer.
        slos: Objectives for goodput, as for :meth:`Answered.within`; empty: goodput is omitted.
    """
    read = sum(answer.prompt_tokens for answer in answers)
    written = sum(answer.output_tokens for answer in answers)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(answers),
        "failed": failed,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(answers) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
    }
    if slos:
        found["request_goodput"] = sum(answer.within(slos) for answer in answers) / seconds
    series = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [answer.tpot for answer in answers if answer.output_tokens > 1],
        "itl": [gap for answer in answers for gap in np.diff(answer.times).tolist()],
        "e2el": [answer.e2el for answer in answers],
    }
    for name, values in series.items():
        found |= _statistics(name, np.asarray(values) * 1e3)
    return found


def _statistics(name: str, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of milliseconds; None where there is no value."""
    labels = [f"{label}_{name}_ms" for label in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))]
    if not values.size:
        return dict.fromkeys(labels)
    statistics = [values.mean(), np.median(values), values.std(), *np.percentile(values, PERCENTILES)]
    return dict(zip(labels, map(float, statistics), strict=True))
