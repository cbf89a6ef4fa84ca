"""Prompts that arrive together and begin alike: what they share is computed once, and no answer depends on that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.common_prefix import MIN_SHARED
from bitnet.core.hal import Device, Limits
from bitnet.core.model.delta_net import DeltaNet
from bitnet.core.model.experts import Windows

MakeRig = Callable[..., Any]
WIDE = Limits(max_tokens=48, max_seqs=6, max_rows=8, max_blocks=128)
BLOCK = 4
HYBRID: dict[str, Any] = {
    "architecture": "qwen35",
    "layers": 2,
    "activation": "silu",
    "sub_norms": False,
    "head_norms": True,
    "rotary_dim": 8,
    "output_gate": True,
    "delta_net": DeltaNet((True, False), 2, 4, 16, 16, 4),
    "state_entries": 24,
}
SLIDING: dict[str, Any] = {"layers": 3, "windows": Windows(9, (True, False, True))}
SHAPES = pytest.mark.parametrize("shape", [{}, SLIDING, HYBRID], ids=["full", "windows", "states"])
LEVELS = pytest.mark.parametrize("device", ["cpu:scalar", "cpu:avx2", "cpu:avx512"], indirect=True)
"""Not numpy, whose sums depend on the batch."""


def text(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, 250, count).tolist()
    return tokens


def computed(rig: Any, prompts: Sequence[list[int]]) -> int:
    """Tokens of prompts that an engine computes for prompts that arrive together, a token being generated of each."""
    total, start = 0, rig.executable.start

    def counted(step: Any, count: int = 1) -> None:
        nonlocal total
        total += step.tokens
        start(step, count)

    rig.executable.start = counted
    try:
        rig.run(prompts, max_tokens=1)
    finally:
        rig.executable.start = start
    return total


@SHAPES
def test_a_common_prefix_is_computed_once(make_rig: MakeRig, shape: dict[str, Any]) -> None:
    rng = np.random.default_rng()
    for _ in range(10):
        common = text(rng, int(rng.integers(MIN_SHARED + BLOCK, 200)))
        prompts = [[*common, i, *text(rng, int(rng.integers(1, 60)))] for i in range(int(rng.integers(2, 6)))]
        rig = make_rig(limits=WIDE, num_blocks=800, **shape)
        shared = len(common) // BLOCK * BLOCK
        assert computed(rig, prompts) == sum(map(len, prompts)) - (len(prompts) - 1) * shared


def test_trunks_of_trunks_are_computed_once(make_rig: MakeRig) -> None:
    """All share one prefix, and some of them a longer one."""
    rng = np.random.default_rng()
    trunk = text(rng, 80)
    branch = trunk + text(rng, 120)
    prompts = [trunk + [1] * 40, *([*branch, i, i] for i in (1, 2, 3))]
    rig = make_rig(limits=WIDE, num_blocks=400)
    assert computed(rig, prompts) == len(prompts[0]) + (202 - 80) + 2 * (202 - 200)


def test_a_prompt_that_comes_while_its_prefix_is_computed(make_rig: MakeRig) -> None:
    rng = np.random.default_rng()
    common = text(rng, 200)
    rig = make_rig(limits=WIDE, num_blocks=400)
    first, second = (rig.engine.preparer.prepare([*common, i], GenerationOptions(max_tokens=1))[0] for i in (1, 2))
    rig.engine.add([first])
    rig.engine.step()
    assert 0 < first.placement.computed < 200
    rig.engine.add([second])
    done = rig.finish()
    assert done[second.number].timings.cached_tokens == 200


def test_a_short_common_prefix_is_computed_twice(make_rig: MakeRig) -> None:
    """As its step would be longer than what is saved."""
    prompts = [[*range(MIN_SHARED - 1), i, i, i] for i in (240, 241)]
    rig = make_rig(limits=Limits(256, 6, 8, 128), num_blocks=400)
    assert computed(rig, prompts) == sum(map(len, prompts))


def test_who_waits_for_a_prefix_stops_nobody_and_keeps_its_place(make_rig: MakeRig) -> None:
    rng = np.random.default_rng()
    common = text(rng, 200)
    rig = make_rig(limits=Limits(16, 3, 4, 128), num_blocks=400)
    options = GenerationOptions(max_tokens=1)
    prepared = [[*common, 1], [*common, 2], text(rng, 8), text(rng, 8)]
    first, follower, other, last = (rig.engine.preparer.prepare(prompt, options)[0] for prompt in prepared)
    for sequence in (first, follower, other, last):
        rig.engine.add([sequence])
    rig.engine.step()
    scheduler = rig.engine._scheduler
    assert scheduler.sequences == (first, follower, last), "the other one has its token"
    assert list(scheduler._waiting) == [follower, last]
    assert list(rig.finish()) == [last.number, first.number, follower.number]


@pytest.mark.parametrize("ends", ["cancelled", "preempted"])
def test_a_prompt_goes_on_when_the_one_before_it_is_gone(make_rig: MakeRig, ends: str) -> None:
    rng = np.random.default_rng()
    common = text(rng, 200)
    rig = make_rig(limits=WIDE, num_blocks=400)
    first, second = (rig.engine.preparer.prepare([*common, i], GenerationOptions(max_tokens=2))[0] for i in (1, 2))
    for sequence in (first, second):
        rig.engine.add([sequence])
    rig.engine.step()
    scheduler = rig.engine._scheduler
    assert second.placement.table is None
    if ends == "cancelled":
        rig.engine.cancel(first)
    else:
        scheduler._running.remove(first)
        scheduler._leave_cache(first)
        scheduler._waiting.append(first)
    rig.engine.step()
    assert second.placement.table is not None
    assert second.number in rig.finish()
    assert rig.free_blocks == scheduler.pool.size


@LEVELS
@SHAPES
def test_no_token_depends_on_who_computes_a_prefix(device: Device, make_rig: MakeRig, shape: dict[str, Any]) -> None:
    """Requests that arrive at any time, in a cache that is often too small; each is compared with itself alone."""
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 32)))
    print("seed", seed)
    stems = [text(rng, int(rng.integers(20, 300))) for _ in range(3)]
    asked = []
    for _ in range(24):
        stem = stems[rng.integers(3)]
        prompt = stem[: int(rng.integers(len(stem) // 2, len(stem) + 1))] + text(rng, int(rng.integers(1, 20)))
        asked.append((prompt, {"max_tokens": int(rng.integers(1, 30)), "ignore_eos": True}))
    alone = make_rig(device, limits=WIDE, num_blocks=1000, **shape)
    expected = [list(alone.one(prompt=prompt, **options).tokens) for prompt, options in asked]
    for blocks in (200, 1000):
        rig = make_rig(device, limits=WIDE, num_blocks=blocks, **shape)
        found = rig.arriving(asked, rng)
        assert [list(one.tokens) for one in found] == expected
        assert rig.free_blocks == rig.engine._scheduler.pool.size
