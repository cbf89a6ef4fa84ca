"""When tokens are reported: while prompts arrive, first and last ones at once, and others together a little later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import GenerationOptions, engine, pacing
from bitnet.core.engine.results import Update

MAX_TOKENS = (3, 12, 9, 1)


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [
        (60.0, [{}, {0: 1}, {1: 1}, {0: 2, 2: 1}, {1: 2, 2: 1, 3: 1}]),
        (0.0, [{}, {0: 1}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 1, 3: 1}]),
    ],
)
def test_what_each_step_reports(
    make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, seconds: float, reported: list[dict[int, int]]
) -> None:
    """A prompt arrives before each of four steps; the first answer ends in the third."""
    monkeypatch.setattr(engine, "UPDATE_SECONDS", seconds)
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e-9)
    rng = np.random.default_rng()
    prompts = [rng.integers(97, 123, rng.integers(2, 7)).tolist() for _ in MAX_TOKENS]
    options: list[dict[str, Any]] = [
        {"max_tokens": most, "ignore_eos": True, "seed": int(rng.integers(1 << 30))} for most in MAX_TOKENS
    ]
    rig, places, every = make_rig(), dict[int, int](), list[list[Update]]()
    for prompt, given in zip(prompts, options, strict=True):
        (sequence,) = rig.engine.preparer.prepare(prompt, GenerationOptions(temperature=1.0, **given))
        places[sequence.number] = len(places)
        rig.engine.add([sequence])
        every.append([])
        rig.engine.advance(every[-1].extend)
    while rig.engine.busy:
        every.append([])
        rig.engine.advance(every[-1].extend)
    counts = [{places[update.sequence]: len(update.chunk.tokens) for update in step if update.chunk} for step in every]
    assert counts[:5] == reported
    for number, place in places.items():
        chunks = [update for step in every for update in step if update.sequence == number]
        tokens = [token for update in chunks if update.chunk for token in update.chunk.tokens]
        expected = make_rig().one(prompts[place], temperature=1.0, **options[place])
        assert tuple(tokens) == expected.tokens
        assert [update.result is not None for update in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_late_step_waits_for_nothing(make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step that took long, and when the last update was long ago, all tokens are reported."""
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e-9)
    for slow in ("step", "update"):
        monkeypatch.setattr(engine, "UPDATE_SECONDS", 60.0)
        rig, every = make_rig(), list[list[Update]]()
        for place in range(4):
            rig.engine.add(
                rig.engine.preparer.prepare([97, 98, 99 + place], GenerationOptions(max_tokens=9, ignore_eos=True))
            )
            if place == 2:
                assert rig.engine._mixed_seconds < 60.0
                if slow == "step":
                    rig.engine._mixed_seconds = 61.0
                else:
                    rig.engine._reported -= 61.0
            every.append([])
            rig.engine.advance(every[-1].extend)
        assert [len(step) for step in every] == [0, 1, 2, 1]
