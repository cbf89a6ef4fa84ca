"""Gauges of the engines' load."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core import Load, Model
from bitnet.server.models.metrics import Metrics


def test_the_share_of_kv_blocks_is_of_all_models_together() -> None:
    loads = [
        Load(0, 0, 0, kv_blocks=blocks, kv_used=random.randrange(blocks + 1), kv_cached=0, block_size=16)
        for blocks in random.choices(range(1, 1000), k=3)
    ]
    for own in (loads, loads[:1], []):
        models: list[Any] = [
            SimpleNamespace(names=("m",), devices="cpu", model=SimpleNamespace(load=partial(copy, load)))
            for load in own
        ]
        (line,) = re.findall(rb"^bitnet_kv_use_ratio (\S+)$", Metrics(partial(list, models)).text(), re.MULTILINE)
        share = sum(load.kv_used for load in own) / max(1, sum(load.kv_blocks for load in own))
        assert float(line) == pytest.approx(share)


def test_counts_for_dashboards_of_llama_cpp(demo_model: Model, running: Callable[..., Any]) -> None:
    """They are what the answers' timings say."""

    def shown(server: Any) -> dict[str, float]:
        text = server.client.get("/metrics").text
        found = dict(re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.MULTILINE))
        assert set(found) <= set(re.findall(r"^# TYPE llamacpp:(\w+) (?:counter|gauge)$", text, re.MULTILINE))
        return {name: float(value) for name, value in found.items() if not name.endswith("_created")}

    with running(demo_model) as server:
        assert set(shown(server).values()) == {0}
        assert 0 <= time.time() - int(server.client.get("/metrics").headers["process-start-time-unix"]) < 60
        asked = [(f"{random.random()} " * 9, random.randrange(1, 9)) for _ in range(3)]
        body = [{"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True} for prompt, n in asked * 2]
        every = [server.client.post("/completion", json=one).json()["timings"] for one in body]
        total = {name: sum(one[name] for one in every) for name in every[0]}
        found = shown(server)
    assert total["cache_n"] > 0
    assert found["prompt_tokens_total"] == total["prompt_n"]
    assert found["prompt_tokens_cached_total"] == total["cache_n"]
    assert found["tokens_predicted_total"] == total["predicted_n"] == sum(n for _, n in asked) * 2
    assert found["prompt_seconds_total"] == pytest.approx(total["prompt_ms"] / 1e3)
    assert found["tokens_predicted_seconds_total"] == pytest.approx(total["predicted_ms"] / 1e3)
    assert found["requests_processing"] == found["requests_deferred"] == 0
