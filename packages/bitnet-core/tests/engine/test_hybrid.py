"""Models with recurrent layers: no token depends on how states are kept, cut, snapshotted, rolled back or lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core.cpu.backend import BACKEND
from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.pacing import DraftCosts
from bitnet.core.engine.prompt_lookup import Draft
from bitnet.core.engine.states import StatePool
from bitnet.core.engine.worker import Worker
from bitnet.core.hal import Device, Limits, OpenOptions
from bitnet.core.model.delta_net import DeltaNet

MakeRig = Callable[..., Any]
HYBRID: dict[str, Any] = {
    "architecture": "qwen35",
    "layers": 3,
    "activation": "silu",
    "sub_norms": False,
    "head_norms": True,
    "rotary_dim": 8,
    "output_gate": True,
    "delta_net": DeltaNet((True, False, True), 2, 4, 16, 16, 4),
    "context_length": 32_768,
}
WIDE = Limits(max_tokens=64, max_seqs=4, max_rows=16, max_blocks=64)
LEVELS = pytest.mark.parametrize("device", ["cpu:scalar", "cpu:avx2", "cpu:avx512"], indirect=True)
"""Not numpy, whose sums depend on the batch."""


def requests(rng: np.random.Generator, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that share beginnings and repeat themselves, and options; many end before their time."""
    stems = [rng.integers(0, 40, int(rng.integers(1, 60))).tolist() for _ in range(6)]
    made = []
    for _ in range(count):
        prompt = stems[rng.integers(len(stems))] + rng.integers(0, 9, int(rng.integers(1, 30))).tolist()
        prompt += prompt[-int(rng.integers(1, 12)) :] * int(rng.integers(0, 4))
        options: dict[str, Any] = {"max_tokens": int(rng.integers(1, 60)), "ignore_eos": bool(rng.integers(2))}
        options |= {"temperature": 0.7, "seed": int(rng.integers(99)), "top_k": 20} if rng.random() < 0.4 else {}
        made.append((prompt, options))
    return made


def answers(rig: Any, asked: Sequence[tuple[list[int], dict[str, Any]]], rng: np.random.Generator) -> list[list[int]]:
    """The tokens of all requests, which arrive while others run."""
    done = rig.arriving(asked, rng, lambda: nothing_leaks(rig, idle=not rig.engine.busy))
    return [list(completion.tokens) for completion in done]


def nothing_leaks(rig: Any, *, idle: bool) -> None:
    """Each entry is free, a snapshot or a running sequence's; without sequences, none is held."""
    pool, running = rig.engine._scheduler.states, rig.engine._scheduler._running
    held = [s.placement.states for s in running]
    own = [states.entry for states in held] + [states.spare for states in held if states.spare is not None]
    entries = [*pool._free, *pool._snapshots.values(), *own]
    assert sorted(entries) == list(range(pool.size))
    assert not idle or not own


@LEVELS
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_no_token_depends_on_the_others(
    device: Device, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Alone; then in batches, in chunks, preempted, from snapshots, with drafts that are right and wrong."""
    preempted = snapshots = right = wrong = 0

    def whenever_known(self: DraftCosts, drafts: Sequence[Draft], budget: int) -> int:
        """As soon as plain steps were timed, which costs of drafts are estimated from."""
        return 3 if self.token and 3 * len(drafts) <= budget else 0

    monkeypatch.setattr(DraftCosts, "choose", whenever_known)
    for _ in range(8):  # until all that is named above has happened; drafts are seldom right
        rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 32)))
        print("seed", seed)
        asked, expected = requests(rng, count), []
        for prompt, options in asked:
            rig = make_rig(device, limits=WIDE, state_entries=2, **HYBRID)
            expected.append(list(rig.one(prompt=prompt, **options).tokens))
            rig.executable.close()
        for lookup, blocks, entries in ((False, 40, 8), (True, 40, 8), (True, 256, 30)):
            rig = make_rig(
                device, limits=WIDE, num_blocks=max(64, blocks), state_entries=entries, lookup=lookup, **HYBRID
            )
            scheduler = rig.engine._scheduler
            verified, leave = scheduler.verified, scheduler._leave_cache

            def watched(item: Any, accepted: int, verified: Any = verified) -> None:
                nonlocal right, wrong
                right += accepted > len(item.draft)
                wrong += accepted <= len(item.draft)
                verified(item, accepted)

            def left(sequence: Any, leave: Any = leave) -> None:
                nonlocal preempted
                preempted += not sequence.finished
                leave(sequence)

            monkeypatch.setattr(scheduler, "verified", watched)
            monkeypatch.setattr(scheduler, "_leave_cache", left)
            assert answers(rig, asked, rng) == expected
            snapshots += scheduler.states.snapshots
        if preempted and snapshots > 10 and right and wrong:
            break
    assert snapshots > 10
    assert right
    assert wrong
    assert preempted > 0


@LEVELS
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_replicas_give_the_same_tokens(device: Device, make_rig: MakeRig, count: int) -> None:
    asked = requests(np.random.default_rng(5), count)
    rigs = [make_rig(device, limits=WIDE, state_entries=12, **HYBRID) for _ in range(3)]
    expected = [list(rigs[0].one(prompt=prompt, **options).tokens) for prompt, options in asked]
    worker = Worker(*(rig.engine for rig in rigs[1:]))
    try:
        tickets = [
            worker.submit(rigs[0].engine.preparer.prepare(prompt, GenerationOptions(**options))[0])
            for prompt, options in asked
        ]
        results: list[Any] = [list(updates)[-1].result for updates in tickets]
        assert [list(result.tokens) for result in results] == expected
    finally:
        worker.close()


def test_a_turn_computes_what_is_new(make_rig: MakeRig) -> None:
    """An agent's session: from the second turn on, less than 3 % of the prompt is computed."""
    rng = np.random.default_rng(1)
    limits = Limits(max_tokens=512, max_seqs=2, max_rows=8, max_blocks=1024)
    device = BACKEND.open(BACKEND.probe().devices[0], OpenOptions())
    try:
        rig = make_rig(device, limits=limits, num_blocks=1100, block_size=32, state_entries=20, **HYBRID)
        text = rng.integers(0, 250, 20_000).tolist()
        for turn in range(20):
            text += rng.integers(0, 250, 80).tolist()
            done = rig.one(prompt=text, max_tokens=60, ignore_eos=True)
            computed = len(text) - done.timings.cached_tokens
            assert computed < 0.03 * len(text) or turn == 0, f"turn {turn} computed {computed} of {len(text)} tokens"
            text += done.tokens
    finally:
        device.close()


def test_branches_find_their_trunk(make_rig: MakeRig) -> None:
    """A beginning that two prompts share gets a snapshot with the second, and the third goes on from there."""
    rig = make_rig(limits=WIDE, state_entries=12, **HYBRID)
    trunk = list(range(100, 142))
    cached = [rig.one(prompt=trunk + [i] * 30, max_tokens=1).timings.cached_tokens for i in (1, 2, 3, 3)]
    assert cached == [0, 0, 40, 68]


@pytest.mark.parametrize("size", [2, 3, 9, 70])
def test_snapshots_are_bounded(size: int) -> None:
    """10,000 branches: entries are never lost, nor given to two at once, and the least recently used goes first."""
    rng, pool = np.random.default_rng(size), StatePool(size)
    held: list[int] = []
    recent: list[bytes] = []
    for step in range(10_000):
        spared = next(iter(pool._snapshots)) if pool.snapshots and len(pool._free) + pool.snapshots > 2 else None
        pool.next_step(
            [] if spared is None else [pool._snapshots[spared]]
        )  # the one that would go next is yet to be read
        if held and (len(held) == pool.sequences or rng.random() < 0.5):
            entry = held.pop(int(rng.integers(len(held))))
            digest = int(rng.integers(step // 2 + 1)).to_bytes(8, "little")
            recent = [d for d in recent if d != digest] + [digest]
            pool.keep(entry, digest)
        elif recent and rng.random() < 0.3:
            digest = recent[int(rng.integers(len(recent)))]
            recent = [d for d in recent if d != digest] + [digest]
            entry = pool.use(digest)
            taken = pool.allocate()
            assert taken != entry
            held.append(taken)
        else:
            held.append(pool.allocate())
        assert spared is None or pool.holds(spared), "a snapshot went that a sequence is to read"
        recent = recent[len(recent) - pool.snapshots + (spared is not None) :]
        assert all(pool.holds(digest) for digest in recent), "another one than the least recently used went"
        assert sorted([*pool._free, *pool._snapshots.values(), *held]) == list(range(size))
