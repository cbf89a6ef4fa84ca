"""Text is decoded while the device computes, possibly one round ahead. No result depends on that."""

from __future__ import annotations

import copy
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import GenerationOptions, pacing
from bitnet.core.engine.generation import Generation
from bitnet.core.engine.pacing import DraftCosts
from bitnet.core.engine.worker import Worker
from bitnet.core.errors import DeviceLostError
from bitnet.core.hal import LOOK_AHEAD, NO_TOKEN, Executable, Program, Step, run
from bitnet.core.reference import NUMPY_INFO, ReferenceDevice
from bitnet.core.text.thinking import Marks, Thinking

from .conftest import CONFIG
from .test_constraint import Lazy

MakeRig = Callable[..., Any]


class Ahead:
    """The numpy device's executable, with rounds that are computed when they are begun and taken later."""

    def __init__(self, executable: Executable) -> None:
        self._executable: Any = executable
        self._flying: deque[tuple[Any, Any]] = deque()
        self.most = 0
        """Rounds in flight at a time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def start(self, step: Step, count: int = 1) -> None:
        assert not self._flying, "a start while rounds are under way"
        self._step = copy.copy(step)
        self._step.data = step.data.copy()
        self._begin(count)

    def go_on(self, count: int) -> None:
        assert self._flying, "there is nothing to go on with"
        self._begin(count)

    def collect(self) -> Any:
        tokens, self._logprobs = self._flying.popleft()
        return tokens

    def logprobs(self) -> Any:
        return self._logprobs

    def _begin(self, count: int) -> None:
        step, at = self._step, self._step.layout.offsets
        tokens = run(self._executable, step, count)
        self._flying.append((tokens, self._executable.logprobs() if step.data[6] else None))
        self.most = max(self.most, len(self._flying))
        step.data[at["tokens"] :][: step.rows] = np.where(tokens[-1] == NO_TOKEN, 0, tokens[-1])
        step.data[at["seq_len"] :][: step.seqs] += count


class AheadDevice(ReferenceDevice):
    def __init__(self) -> None:
        super().__init__(replace(NUMPY_INFO, features=(*NUMPY_INFO.features, LOOK_AHEAD)))

    def compile(self, program: Program, *, keep: bool = False) -> Any:
        return Ahead(super().compile(program, keep=keep))


@pytest.fixture
def worker(make_rig: MakeRig) -> Iterator[Worker]:
    worker = Worker(make_rig().engine)
    yield worker
    worker.close()


def options_of(rng: np.random.Generator) -> dict[str, Any]:
    """Stop rules of every kind, alone and together."""
    kinds: dict[str, Any] = {
        "stop": ["".join(map(chr, rng.integers(32, 127, 1 + i // 12))) for i in range(16)],
        "stop_tokens": rng.integers(0, 260, 6).tolist(),
        "logprobs": 1,
        "min_tokens": int(rng.integers(1, 6)),
        "repetition_penalty": 1.3,
    }
    chosen = {name: value for name, value in kinds.items() if rng.random() < 0.4}
    sampled = {"temperature": 1.0, "seed": int(rng.integers(1 << 30))}
    return {"max_tokens": int(rng.integers(1, 60)), "ignore_eos": bool(rng.integers(2)), **sampled, **chosen}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("burst", [1e-9, 1e9])
def test_every_stop_rule_holds(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, burst: float, ahead: bool) -> None:
    """Against an engine that has one request, and nothing to do while a step runs."""
    monkeypatch.setattr(pacing, "BURST_SECONDS", burst)
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    asked = [(rng.integers(97, 123, rng.integers(1, 30)).tolist(), options_of(rng)) for _ in range(40)]
    worker = Worker(make_rig(AheadDevice() if ahead else None).engine)
    tickets = [
        worker.submit(*worker.engine.preparer.prepare(prompt, GenerationOptions(**given))) for prompt, given in asked
    ]
    alone, ends = make_rig(), []
    for ticket, (prompt, given) in zip(tickets, asked, strict=True):
        *_, last = updates = [*ticket]
        done: Any = last.result
        expected = alone.one(prompt, **given)
        same = ("text", "tokens", "finish_reason", "stop_reason")
        assert [getattr(done, name) for name in same] == [getattr(expected, name) for name in same]
        assert "".join(u.chunk.text for u in updates if u.chunk) == done.text
        assert sum((u.chunk.tokens for u in updates if u.chunk), ()) == done.tokens
        assert len(done.timings.token_times) == len(expected.timings.token_times)
        if isinstance(done.stop_reason, str):
            whole, before = (bytes(t for t in tokens if t < 256) for tokens in (done.tokens, done.tokens[:-1]))
            assert done.stop_reason in whole.decode("utf-8", "replace")
            assert not any(stop in before.decode("utf-8", "replace") for stop in given["stop"])
            assert not any(stop in done.text for stop in given["stop"])
        ends.append(type(done.stop_reason))
    assert {str, int, type(None)} <= set(ends)
    assert worker.load().kv_used == 0
    worker.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_thoughts_that_end_at_their_budgets_disturb_nobody(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Thoughts that end in the midst of others' bursts, against one request at a time that wants log-probabilities: its
    steps end at the budget, and it takes the end mark token by token."""
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e9)
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    marks = Marks("<t>", "</t>")
    thought = Thinking(marks, True, tuple(marks.end.encode()), None, {})
    asked = []
    for _ in range(24):
        given = options_of(rng) if rng.random() < 0.5 else {"max_tokens": 40, "temperature": 1.0, "seed": 3}
        if rng.random() < 0.2:  # the end mark holds a stop token
            given["stop_tokens"] = rng.choice(thought.end_tokens, 1).tolist()
        asked.append((rng.integers(97, 123, 9).tolist(), {**given, "reasoning_budget": int(rng.integers(0, 40))}))
    worker = Worker(make_rig(AheadDevice() if ahead else None).engine)
    prepare = worker.engine.preparer.prepare
    tickets = [worker.submit(*prepare(p, GenerationOptions(**given), 1, None, thought)) for p, given in asked]
    dones: list[Any] = [[*ticket][-1].result for ticket in tickets]
    alone = make_rig()
    for done, (prompt, given) in zip(dones, asked, strict=True):
        (one,) = alone.engine.preparer.prepare(prompt, GenerationOptions(**{**given, "logprobs": 1}), 1, None, thought)
        alone.engine.add([one])
        expected: Any = alone.finish()[one.number]
        same = ("text", "reasoning", "reasoning_tokens", "tokens", "finish_reason", "stop_reason")
        assert [getattr(done, name) for name in same] == [getattr(expected, name) for name in same], given
        assert len(done.timings.token_times) == len(expected.timings.token_times)
    assert any(0 < done.reasoning_tokens < len(done.tokens) for done in dones)
    assert worker.load().kv_used == 0
    worker.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_drawn_after_a_constraint_has_begun_is_dropped(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Sequences whose constraints begin at random tokens, beside free ones, against a token at a time."""
    monkeypatch.setattr(pacing, "MAX_BURST", 3)
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    asked = [(rng.integers(97, 123, rng.integers(1, 30)).tolist(), options_of(rng)) for _ in range(40)]
    begins: list[int | None] = [None] * len(asked)
    sets = rng.integers(97, 123, (3, 2)).tolist()

    def run(device: Any, burst: float) -> tuple[list[Any], int]:
        monkeypatch.setattr(pacing, "BURST_SECONDS", burst)
        worker = Worker(make_rig(device).engine)
        made = [None if one is None else Lazy(one, sets, CONFIG.vocab_size) for one in begins]
        tickets = [
            worker.submit(
                *worker.engine.preparer.prepare(
                    prompt, GenerationOptions(**given), constraint=None if one is None else repeat(one).__next__
                )
            )
            for (prompt, given), one in zip(asked, made, strict=True)
        ]
        ends: list[Any] = [[*ticket][-1].result for ticket in tickets]
        for one, done in zip(made, ends, strict=True):
            # A stop string drops the tokens after it, which a constraint has seen.
            assert one is None or tuple(one.seen[: len(done.tokens)]) == done.tokens
        assert worker.load().kv_used == 0
        worker.close()
        same = ("text", "tokens", "finish_reason", "stop_reason")
        return [[getattr(done, name) for name in same] for done in ends], sum(
            bool(one and one.accepted) for one in made
        )

    free, _ = run(None, 1e-9)
    begins = [int(rng.choice(done[1])) if done[1] and rng.random() < 0.7 else None for done in free]
    expected, begun = run(None, 1e-9)
    assert begun > 3
    assert run(AheadDevice() if ahead else None, 1e9)[0] == expected


def test_a_constraint_that_waits_costs_no_rounds(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e9)
    counts = []
    for constraint in (None, lambda: Lazy(-1, [[97]], CONFIG.vocab_size)):
        engine = make_rig(AheadDevice()).engine
        executable: Any = engine._executable
        collect, rounds = executable.collect, itertools.count()
        executable.collect = lambda collect=collect, rounds=rounds: (next(rounds), collect())[1]
        worker = Worker(engine)
        options = GenerationOptions(max_tokens=60, ignore_eos=True)
        last: Any
        *_, last = worker.submit(*engine.preparer.prepare([1, 2], options, constraint=constraint))
        worker.close()
        assert last.result is not None
        assert len(last.result.tokens) == 60
        counts.append(next(rounds))
    assert counts[0] == counts[1] < 40


@pytest.mark.parametrize(("call", "after"), [("start", 1), ("fill_slot", 0)])
def test_what_has_ended_is_told_though_the_next_step_cannot_begin(make_rig: MakeRig, call: str, after: int) -> None:
    """One of two requests ends in the first step; the device is lost as the second step is handed to it."""
    engines, alone = [make_rig(AheadDevice()).engine for _ in range(2)], make_rig()
    for engine, name in zip(engines, ("one", "two"), strict=True):
        engine.device = name
    executable: Any = engines[0]._executable
    begin, calls = getattr(executable, call), itertools.count()

    def failing(*arguments: Any) -> None:
        if next(calls) >= after:
            raise DeviceLostError("it stopped answering.", device="one")
        begin(*arguments)

    setattr(executable, call, failing)
    worker, prompt = Worker(*engines), [3] * 5
    given: list[dict[str, Any]] = [
        {"max_tokens": 1, "ignore_eos": True},
        {"max_tokens": 9, "ignore_eos": True, "repetition_penalty": 1.3},
    ]
    group = [engines[0].preparer.prepare(prompt, GenerationOptions(**options))[0] for options in given]
    first, second = worker.submit_all([group])
    *_, last = second
    assert not worker._tickets, "nobody would ever be told how the first ended"
    ends: list[Any] = [[*first][-1].result, last.result]
    assert [c.tokens for c in ends] == [alone.one(prompt, **options).tokens for options in given]
    assert [c.devices[-1] for c in ends] == ["one", "two"]
    worker.close()


def test_the_text_of_a_step_comes_while_the_next_one_runs(worker: Worker) -> None:
    """The device does not finish a step before its caller has read the step before."""
    executable: Any = worker.engine._executable
    collect, read, steps = executable.collect, queue.SimpleQueue[int](), list[Any]()

    def slow() -> Any:
        steps.append(collect())
        if len(steps) > 1:
            read.get(timeout=60)
        return steps[-1]

    executable.collect = slow
    ticket = worker.submit(*worker.engine.preparer.prepare([1, 2], GenerationOptions(max_tokens=30, ignore_eos=True)))
    updates = []
    for update in ticket:
        updates.append(update)
        read.put(0)
    assert len(updates) == len(steps) > 2


def test_a_step_that_fails_takes_nothing_of_the_one_before(worker: Worker) -> None:
    executable: Any = worker.engine._executable
    collect = executable.collect
    given: list[Any] = []

    def failing() -> Any:
        if len(given) == 3:
            raise DeviceLostError("it stopped answering.", device="cpu:numpy")
        given.append(collect())
        return given[-1]

    executable.collect = failing
    ticket = worker.submit(*worker.engine.preparer.prepare([1, 2], GenerationOptions(max_tokens=90, ignore_eos=True)))
    received: list[int] = []
    with pytest.raises(DeviceLostError):
        received.extend(token for update in ticket if update.chunk for token in update.chunk.tokens)
    assert received == np.concatenate(given).ravel().tolist()


def test_an_error_in_the_text_ends_every_request(worker: Worker) -> None:
    def broken(*tokens: int) -> str:
        raise RuntimeError("no such text")

    prepared = [worker.engine.preparer.prepare([i], GenerationOptions(max_tokens=90)) for i in range(6)]
    for (sequence,) in prepared:
        sequence._text.push = broken  # type: ignore[method-assign,assignment]
    for ticket in worker.submit_all(prepared):
        with pytest.raises(RuntimeError, match="no such text"):
            list(ticket)


def test_rounds_follow_each_other_until_a_sequence_ends(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round is computed while one is taken in. A sequence leaves in the cache what it accepted."""
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e9)
    prompt = list(range(1, 10))
    plain = make_rig().one(prompt, max_tokens=60, seed=1, temperature=1.0, ignore_eos=True)
    at = next(i for i in range(25, 60) if plain.tokens[i] not in plain.tokens[:i])
    rig = make_rig(AheadDevice())
    stop = [plain.tokens[at]]
    done = rig.one(prompt, max_tokens=60, seed=1, temperature=1.0, ignore_eos=True, stop_tokens=stop)
    assert (done.tokens, done.stop_reason) == (plain.tokens[:at], plain.tokens[at])
    assert rig.executable.most == 2
    assert rig.free_blocks == 64
    text = [*prompt, *plain.tokens[: at + 1]]
    assert rig.one(text, max_tokens=10).tokens == make_rig().one(text, max_tokens=10).tokens


def test_a_newcomer_waits_for_two_rounds_at_most(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e9)
    worker = Worker(make_rig(AheadDevice()).engine)
    executable: Any = worker.engine._executable
    begin, begun, opened = executable._begin, list[int](), threading.Event()

    def held(count: int) -> None:
        begun.append(count)
        if len(begun) == 3:
            opened.wait(60)
        begin(count)

    executable._begin = held
    first = worker.submit(*worker.engine.preparer.prepare([1, 2], GenerationOptions(max_tokens=110, ignore_eos=True)))
    while len(begun) < 3:
        pass
    second = worker.submit(*worker.engine.preparer.prepare([3], GenerationOptions(max_tokens=1, ignore_eos=True)))
    at = len(begun)
    opened.set()
    assert [*second][-1].result is not None
    alone = [*itertools.takewhile(lambda count: count > 1, begun[at:])]  # until the newcomer takes part
    assert len(alone) <= 2, f"rounds begun after the newcomer had come: {begun[at:]}"
    assert sum(len(update.chunk.tokens) for update in first if update.chunk) == 110
    worker.close()


@pytest.mark.parametrize(("repeats", "run"), [(False, 4), (True, 1)])
def test_runs_are_short_where_a_draft_may_begin(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, repeats: bool, run: int
) -> None:
    """They last as long as the host needs for one, and are begun before the one before has ended."""
    monkeypatch.setattr(Generation, "repeats", property(lambda _: repeats))
    monkeypatch.setattr(DraftCosts, "token", property(lambda _: pacing.WATCHED_SECONDS))
    monkeypatch.setattr(DraftCosts, "choose", lambda *_: 0)
    rig, counts = make_rig(AheadDevice(), lookup=True), []
    go_on = rig.engine._executable.go_on

    def noted(count: int) -> None:
        counts.append(count)
        go_on(count)

    monkeypatch.setattr(rig.engine._executable, "go_on", noted)
    prompt, options = list(range(97, 107)), {"max_tokens": 60, "ignore_eos": True}
    assert rig.one(prompt, **options).tokens == make_rig().one(prompt, **options).tokens
    assert max(counts) == run
    assert sum(counts) > 30, "most tokens come from rounds that were begun ahead"
