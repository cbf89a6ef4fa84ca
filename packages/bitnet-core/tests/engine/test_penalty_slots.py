"""Penalties, biases and log-probabilities on the device equal the host's, and multi-token steps still work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import Completion, GenerationOptions
from bitnet.core.hal import Device, Limits, Step, program

MakeRig = Callable[..., Any]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def random_request(rng: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and options that change logits in any combination."""
    biased = rng.choice(256, 5, replace=False).tolist()
    options: dict[str, Any] = {
        "max_tokens": int(rng.integers(12, 40)),
        "min_tokens": int(rng.choice([0, 0, 3, 9])),
        "temperature": float(rng.choice([0.0, 0.0, 0.8, 1.2])),
        "top_k": int(rng.choice([0, 0, 20])),
        "top_p": float(rng.choice([1.0, 0.9])),
        "repetition_penalty": float(rng.choice([1.0, 1.1, 1.4])),
        "presence_penalty": float(rng.choice([0.0, 0.6])),
        "frequency_penalty": float(rng.choice([0.0, 0.3, -0.2])),
        "logit_bias": {t: float(rng.choice([-np.inf, 2.0, -1.0])) for t in biased} if rng.random() < 0.5 else None,
        "stop_tokens": rng.choice(256, 20, replace=False).tolist(),
        "seed": int(rng.integers(2**62)),
        "logprobs": [None, None, 0, 5, 20, 21][rng.integers(6)],
    }
    return rng.integers(0, 256, rng.integers(3, 30)).tolist(), options


def complete(rig: Any, requests: list[tuple[list[int], dict[str, Any]]], *, on_host: bool = False) -> list[Completion]:
    """All requests at once."""
    if on_host:
        rig.engine._slots, rig.engine._max_logprobs = None, -1
    numbers = []
    for prompt, options in requests:
        sequences = rig.engine.preparer.prepare(prompt, GenerationOptions(**options))
        rig.engine.add(sequences)
        numbers.append(sequences[0].number)
    done = rig.finish()
    return [done[number] for number in numbers]


def same(found: list[Completion], wanted: list[Completion]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.tokens, a.finish_reason, a.stop_reason) == (b.tokens, b.finish_reason, b.stop_reason), a.options
        assert (a.logprobs is None) == (b.logprobs is None)
        for found_one, wanted_one in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert found_one.token == wanted_one.token
            # Tokens whose log-probabilities are equal but for rounding may change places.
            tops = dict(found_one.top), dict(wanted_one.top)
            for token in {*tops[0], *tops[1]}:
                p, q = (top.get(token, min(top.values())) for top in tops)
                assert np.isclose(p, q, rtol=1e-5, atol=1e-5), token
            x, y = ((o.logprob, *(value for _, value in o.top)) for o in (found_one, wanted_one))
            assert np.allclose(x, y, rtol=1e-5, atol=1e-5)


def test_tokens_are_those_of_the_host(make_rig: MakeRig, device: Device, rng: np.random.Generator) -> None:
    requests = [random_request(rng) for _ in range(12)]
    same(complete(make_rig(device), requests), complete(make_rig(device), requests, on_host=True))


def test_with_little_cache_slots_change_hands(
    make_rig: MakeRig, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences give their cache back for others; one that has no slot takes theirs, and they go on with another."""
    requests = [random_request(rng) for _ in range(12)]
    for _, options in requests:
        options |= {"max_tokens": 60, "repetition_penalty": 1.1, "stop_tokens": [], "ignore_eos": True}
    wanted = [complete(make_rig(), [request], on_host=True)[0] for request in requests]
    monkeypatch.setattr(program, "MAX_SLOTS", 2)
    rig = make_rig(num_blocks=32)
    claim = rig.engine._slots.claim
    changes: list[Any] = []

    def watched(sequence: Any) -> None:
        before = list(rig.engine._slots._owners)
        claim(sequence)
        changes.extend(o for o, now in zip(before, rig.engine._slots._owners, strict=True) if o is not now)

    monkeypatch.setattr(rig.engine._slots, "claim", watched)
    same(complete(rig, requests), wanted)
    assert any(owner is not None and owner.placement.slot is None for owner in changes), "no slot changed hands"


def test_more_sequences_than_slots(
    make_rig: MakeRig, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host sees to those that get none."""
    requests = [random_request(rng) for _ in range(8)]
    wanted = complete(make_rig(), requests, on_host=True)
    monkeypatch.setattr(program, "MAX_SLOTS", 2)
    same(complete(make_rig(), requests), wanted)


def test_bursts_go_on(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with slots runs for many tokens, up to where end tokens are allowed; no logits are read."""
    rig = make_rig(limits=Limits(max_tokens=32, max_seqs=4, max_rows=8, max_blocks=32))
    counts: list[int] = []
    start = rig.executable.start

    def counted(step: Step, count: int = 1) -> None:
        counts.append(count)
        start(step, count)

    rig.executable.start = counted
    rig.executable.read = lambda *given: pytest.fail("logits are read")
    rig.engine._pace._token_seconds = 0.001
    monkeypatch.setattr(rig.engine, "_timed", lambda step, rounds, wanted, _: rig.engine._compute(step, rounds, wanted))
    options = {"max_tokens": 60, "repetition_penalty": 1.2, "min_tokens": 21, "ignore_eos": True, "stop_tokens": [3]}
    options["logprobs"] = 5
    prompts = [list(range(5, 14)), list(range(40, 60))]
    done = rig.run(prompts, **options)
    assert max(counts) == 16
    assert len(counts) <= 12, counts
    same(done, complete(make_rig(), [(prompt, options) for prompt in prompts], on_host=True))


def test_a_generation_that_another_engine_goes_on_with(make_rig: MakeRig, rng: np.random.Generator) -> None:
    """It takes a slot of that one."""
    requests = [random_request(rng) for _ in range(3)]
    wanted = complete(make_rig(), requests, on_host=True)
    first, second = make_rig(), make_rig()
    numbers = []
    for prompt, options in requests:
        sequences = first.engine.preparer.prepare(prompt, GenerationOptions(**options))
        first.engine.add(sequences)
        numbers.append(sequences[0].number)
    done: dict[int, Any] = {}
    for _ in range(4):
        done |= {u.sequence: u.result for u in first.engine.step() if u.result is not None}
    for group in first.engine.surrender():
        second.engine.add(group)
    done |= {u.sequence: u.result for u in first.engine.updates() if u.result is not None} | second.finish()
    same([done[number] for number in numbers], wanted)
