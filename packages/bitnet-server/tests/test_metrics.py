"""Gauges of the engines' load."""

from __future__ import annotations

import random
import re
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core import Load
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
