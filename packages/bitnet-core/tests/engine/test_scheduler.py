"""What a step may contain, over random loads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet.core.engine import GenerationOptions, pacing
from bitnet.core.engine import engine as engine_module
from bitnet.core.engine.scheduler import shares
from bitnet.core.hal import Limits, Step
from bitnet.core.model.experts import Windows

MakeRig = Callable[..., Any]


@given(wanted=st.lists(st.integers(0, 50), max_size=8), budget=st.integers(0, 120))
def test_shares_waste_nothing_and_nobody_starves(wanted: list[int], budget: int) -> None:
    given = shares(wanted, budget)
    assert sum(given) == min(sum(wanted), budget)
    assert all(0 <= share <= want for share, want in zip(given, wanted, strict=True))
    if wanted:
        assert given[0] >= min(wanted[0], budget // len(wanted))
    for one, want in list(zip(given, wanted, strict=True))[1:]:
        if one < want:  # nobody who wants more, or as much and came later, has anything; but the oldest
            assert not any(share for share, other in list(zip(given, wanted, strict=True))[1:] if other > want)


SLIDING: dict[str, Any] = {"layers": 3, "windows": Windows(9, (True, False, True))}
"""Three block tables, of one layer each."""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [{}, SLIDING], ids=["full", "windows"])
def test_every_step_of_a_random_load(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, seed: int, shape: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    limits = Limits(max_tokens=16, max_seqs=4, max_rows=6, max_blocks=16)
    blocks = int(rng.integers(16, 40))
    rig = make_rig(limits=limits, num_blocks=blocks + (2 * 7 if shape else 0), **shape)
    scheduler = rig.engine._scheduler
    plan = scheduler.plan
    first_seen: list[int] = []
    last_step: dict[int, int] = {}
    steps = 0

    def checked(repeat: int) -> Any:
        nonlocal steps
        before = {s.number: s.placement.computed for s in scheduler.sequences}
        decoding = {
            s.number
            for s in scheduler._running
            if s.target - s.placement.computed == 1 and s.placement.table is not None
        }
        result = plan(repeat)
        steps += 1
        if result is None:
            return result
        work = {item.sequence.number: item for item in result.work}
        assert len(work) == len(result.work) <= limits.max_seqs
        assert sum(item.count for item in result.work) <= limits.max_tokens
        assert sum(len(item.rows) for item in result.work) <= limits.max_rows
        running = {s.number for s in scheduler._running}
        for number in decoding & running:
            assert work[number].count == 1, "a decoding sequence was passed over"
        if decoding & set(work):
            prefill = sum(i.count for n, i in work.items() if n not in decoding)
            assert prefill <= max(limits.max_tokens // 4, scheduler._pace.beside_decode)
        assert work.keys() <= running
        assert scheduler._running[0].number in work, "the oldest sequence made no progress"
        first_seen.extend(s.number for s in scheduler._running if s.number not in first_seen)
        for number, item in work.items():
            assert item.start + item.count <= item.sequence.target
            assert item.start == before[number] or before[number] == 0
            last_step[number] = steps
        return result

    monkeypatch.setattr(scheduler, "plan", checked)
    order: list[int] = []
    cancelled = {}
    wanted = {}
    for _ in range(60):
        kind = rng.integers(0, 10)
        tokens = rng.integers(0, 40, int(rng.integers(2, 40))).tolist()
        if kind < 3:
            options = GenerationOptions(
                max_tokens=int(rng.integers(1, 24)),
                temperature=float(rng.integers(0, 2)),
                seed=1,
                ignore_eos=True,
                logprobs=1 if kind == 0 else None,
            )
            sequences = rig.engine.preparer.prepare(tokens, options, int(rng.integers(1, 3)))
            rig.engine.add(sequences)
            order.append(sequences[0].number)
            wanted.update({s.number: options.max_tokens for s in sequences})
        elif kind == 3:
            sequence = rig.engine.preparer.prepare_score(tokens, int(rng.integers(1, len(tokens))))
            rig.engine.add([sequence])
            order.append(sequence.number)
            wanted[sequence.number] = len(tokens) - sequence._start
        elif kind == 4 and scheduler.sequences:
            sequence = scheduler.sequences[int(rng.integers(len(scheduler.sequences)))]
            cancelled[sequence.number] = rig.engine.cancel(sequence).result
        elif rig.engine.busy:
            for update in rig.engine.step():
                if update.result is not None:
                    assert len(getattr(update.result, "tokens", update.result)) == wanted.pop(update.sequence)
    for number, result in rig.finish().items():
        assert len(getattr(result, "tokens", result)) == wanted.pop(number)
    assert wanted.keys() == cancelled.keys()
    began = [number for number in first_seen if number in set(order)]
    assert began == sorted(began), "a later request began before an earlier one"
    assert rig.free_blocks == scheduler.pool.size


def test_a_short_prompt_does_not_wait_for_a_long_one(make_rig: MakeRig) -> None:
    rig = make_rig(limits=Limits(max_tokens=16, max_seqs=4, max_rows=4, max_blocks=32))
    (long,) = rig.engine.preparer.prepare([1] * 120, GenerationOptions(max_tokens=1))
    (short,) = rig.engine.preparer.prepare([2] * 8, GenerationOptions(max_tokens=1))
    for sequence in (long, short):
        rig.engine.add([sequence])
    done = [update.sequence for _ in range(3) for update in rig.engine.step()]
    assert done == [short.number]
    assert list(rig.finish()) == [long.number]


def test_equal_prompts_end_one_after_the_other(make_rig: MakeRig) -> None:
    """With even shares all prompts would have their first tokens when the last one has it."""
    rig = make_rig(limits=Limits(max_tokens=16, max_seqs=4, max_rows=4, max_blocks=32))
    prompts = [rig.engine.preparer.prepare([i] * 30, GenerationOptions(max_tokens=1))[0] for i in range(4)]
    for prompt in prompts:
        rig.engine.add([prompt])
    ends: dict[int, int] = {}
    while rig.engine.busy:
        step = len(ends)
        for update in rig.engine.step():
            ends[update.sequence] = step
    assert [*ends] == [p.number for p in prompts]


def test_who_was_preempted_comes_before_who_waits(make_rig: MakeRig) -> None:
    rig = make_rig(limits=Limits(max_tokens=16, max_seqs=2, max_rows=4, max_blocks=32), num_blocks=32)
    options = GenerationOptions(max_tokens=70, ignore_eos=True)
    first, second, third = (rig.engine.preparer.prepare([i] * 20, options)[0] for i in (1, 2, 3))
    for sequence in (first, second, third):
        rig.engine.add([sequence])
    scheduler = rig.engine._scheduler
    rig.engine.step()
    while second in scheduler._running:  # both need 90 positions; there are 128
        rig.engine.step()
    assert list(scheduler._waiting) == [second, third]
    assert list(rig.finish()) == [first.number, second.number, third.number]


def test_a_newcomer_leaves_each_running_sequence_a_block(make_rig: MakeRig) -> None:
    rig = make_rig(limits=Limits(max_tokens=16, max_seqs=4, max_rows=4, max_blocks=8), num_blocks=10)
    runs, waits = (rig.engine.preparer.prepare([i] * 16, GenerationOptions(max_tokens=3))[0] for i in (1, 2))
    rig.engine.add([runs])
    rig.engine.step()  # holds four blocks; a fifth comes with the next token, and the newcomer needs five
    rig.engine.add([waits])
    rig.engine.step()
    assert rig.engine._scheduler.sequences == (runs, waits)
    assert waits.placement.table is None
    assert list(rig.finish()) == [runs.number, waits.number]


@pytest.mark.parametrize(("seconds", "most"), [(0.025, 50), (0.001, 16), (1.0, 63)])
def test_prompts_beside_decoding_take_a_set_time(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """At 0.5 ms a token, 25 ms are 50 tokens of a prompt. A quarter of the budget of 64 is the least, 64 the most."""
    rig = make_rig(limits=Limits(64, 4, 8, 128), num_blocks=256)
    start, steps, now = rig.executable.start, list[tuple[int, int]](), [0.0]

    def timed(step: Step, count: int = 1) -> None:
        steps.append((step.seqs, step.tokens))
        now[0] += 0.0005 * step.tokens * count
        start(step, count)

    monkeypatch.setattr(rig.executable, "start", timed)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(pacing, "PROMPT_SECONDS", seconds)
    rig.run([list(range(250)), [1, 2, 3]], max_tokens=30, ignore_eos=True)
    beside = [tokens - 1 for seqs, tokens in steps if seqs == 2 and tokens > 4]  # the first step has both prompts
    assert max(beside[1:]) == most


def test_a_long_sequence_holds_the_blocks_of_its_windows_only(make_rig: MakeRig) -> None:
    """With windows of 9, the next token attends to 8 positions in the cache, in at most 3 blocks of 4 positions."""
    rig = make_rig(limits=Limits(16, 2, 2, 60), num_blocks=60 + 2 * 20, **SLIDING)
    (sequence,) = rig.engine.preparer.prepare([1] * 100, GenerationOptions(max_tokens=120, ignore_eos=True))
    rig.engine.add([sequence])
    scheduler, seen = rig.engine._scheduler, 0
    while rig.engine.busy:
        rig.engine.step()
        placement = sequence.placement
        if placement.table is None:
            break
        assert scheduler.pool.size - rig.free_blocks == placement.table.held
        scheduler._slide(sequence)  # as the next step does first
        filled = -(-placement.computed // 4)
        for blocks, released in zip(placement.table.tables[1:], placement.table._released[1:], strict=True):
            assert filled - released <= 3
            assert len(blocks) - released <= 3 + 16  # a chunk of 16 tokens or a burst of 64 takes blocks ahead
        assert placement.table._released[0] == 0
        seen = max(seen, placement.computed)
    assert seen > 120
    assert rig.free_blocks == scheduler.pool.size


def test_prefixes_of_layers_with_windows_are_shared(make_rig: MakeRig) -> None:
    """A prompt goes on after a prefix whose last window is cached, and computes it again where that is gone."""
    rng = np.random.default_rng()
    limits = Limits(16, 4, 4, 40)
    kept, freed = (make_rig(limits=limits, num_blocks=120, tables=n, **SLIDING) for n in (1, None))
    shared = rng.integers(0, 200, 60).tolist()
    cached = []
    for _ in range(12):
        prompt = [*shared[: int(rng.integers(40, 61))], *rng.integers(0, 200, int(rng.integers(1, 30))).tolist()]
        ours, theirs = (rig.one(prompt, max_tokens=20, ignore_eos=True) for rig in (freed, kept))
        assert list(ours.tokens) == list(theirs.tokens)
        cached.append(ours.timings.cached_tokens)
    assert cached[0] == 0
    assert sum(count >= 36 for count in cached) >= 4
