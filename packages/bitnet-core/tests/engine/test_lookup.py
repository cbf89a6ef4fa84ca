"""Prompt look-up: what is drafted and when; no token depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.generation import Generation
from bitnet.core.engine.pacing import COST_DECAY, DRAFT_SIZES, MAX_DRAFTED_STEPS, DraftCosts
from bitnet.core.engine.prediction import NGRAMS
from bitnet.core.engine.prompt_lookup import RECENT, Draft, PromptLookup, accepted_count
from bitnet.core.hal import Device, Limits

MakeRig = Callable[..., Any]
SAMPLED = {"temperature": 0.6, "top_k": 8, "seed": 5}


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    return np.random.default_rng(seed)


def expected(tokens: Sequence[int], most: int) -> list[int]:
    """A search of every position: what follows the latest earlier occurrence of the longest n-gram that has one."""
    for n in NGRAMS:
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        if ends:
            draft = list(tokens)
            for i in range(most):
                draft.append(draft[ends[-1] + i])
            return draft[len(tokens) :]
    return []


def test_drafts_are_those_of_a_search(rng: np.random.Generator) -> None:
    some = 0
    for _ in range(200):
        letters, most = int(rng.integers(1, 8)), int(rng.integers(0, 20))
        tokens = rng.integers(0, letters, rng.integers(1, 40)).tolist()
        lookup = PromptLookup(tokens)
        for _ in range(10):
            draft = lookup.propose(most)
            assert list(draft.tokens) == expected(tokens, most)
            some += bool(draft.tokens)
            tokens += rng.integers(0, letters, rng.integers(0, 6)).tolist()
    assert some > 500


def test_the_chance_is_how_often_drafts_were_right() -> None:
    """The probability of a draft in a text whose tokens follow one another with a known probability."""
    for right in (0.0, 0.5, 0.9, 1.0):
        rng = np.random.default_rng(3)
        tokens = list(range(12)) * 2
        lookup, chances = PromptLookup(tokens), []
        for _ in range(2000):
            draft = lookup.propose(4)
            if draft.tokens:
                chances.append(draft.probability)
                tokens += [token if rng.random() < right else int(rng.integers(12)) for token in draft.tokens]
            else:
                tokens.append(int(rng.integers(12)))
        usual = float(np.mean(chances[200:]))
        assert abs(usual - (right + (1 - right) / 12)) < 0.1, right


def test_a_text_repeats_for_a_while_after_a_passage_that_did() -> None:
    passage = list(range(100, 120))
    tokens = [*passage, 1, 2]
    lookup = PromptLookup(tokens)
    lookup.propose(15)
    assert not lookup.repeats
    for token in passage[:4]:
        tokens.append(token)
        lookup.propose(15)
    assert not lookup.repeats, "two tokens find the passage, and one or two agree with it"
    tokens += passage[4:10]
    lookup.propose(15)
    assert lookup.repeats
    tokens += range(1000, 1000 + RECENT - 1)
    lookup.propose(15)
    assert lookup.repeats
    tokens.append(2000)
    lookup.propose(15)
    assert not lookup.repeats


def test_matches_of_different_lengths_have_chances_of_their_own() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lookup = PromptLookup(tokens)
    for again in range(10, 20):
        tokens += [1, 2]
        assert lookup.propose(1).tokens
        tokens.append(again)  # after two it is something new
    passage = [30, 31, 32, 33, 34, 35, 36]
    tokens += [*passage, 1, 2]
    assert lookup.propose(4).probability < 0.2
    tokens += passage[:4]
    assert lookup.propose(4) == ([*passage[4:], 1], 0.5)


def test_what_agrees() -> None:
    assert accepted_count([], [7]) == 1
    assert accepted_count([4, 5, 6], [4, 5, 6, 9]) == 4
    assert accepted_count([4, 5, 6], [4, 5, 9, 6]) == 3
    assert accepted_count([4, 5, 6], [9, 5, 6, 9]) == 1


def simulated(plain: float, once: float, cost: float, chance: float, seqs: int, steps: int = 1500) -> float:
    """Tokens a second relative to none drafted.

    A step takes ``plain``; drafts add ``once``, however many they are, and each of their tokens ``cost``.
    """
    rng, pace, seconds, tokens = np.random.default_rng(1), DraftCosts(), 0.0, 0
    drafts = [Draft([0] * DRAFT_SIZES[-1], chance)] * seqs
    for _ in range(steps):
        cap = pace.choose(drafts, 1000)
        if cap:
            took = (plain + once + cost * cap * seqs) * rng.uniform(0.9, 1.1)
            pace.drafted(cap * seqs, took)
            right = rng.random((seqs, cap)) < chance
            tokens += seqs + int(np.cumprod(right, axis=1).sum())
        else:
            took = plain * rng.uniform(0.9, 1.1)
            pace.plain(seqs, took)
            tokens += seqs
        seconds += took
    return plain * tokens / seconds / seqs


@pytest.mark.parametrize("seqs", [1, 8])
@pytest.mark.parametrize("once", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("cost", [0.0, 0.05, 0.3, 0.6, 1.2])
@pytest.mark.parametrize("chance", [0.02, 0.3, 0.7, 0.95, 1.0])
def test_the_pace_is_near_the_best_there_is(cost: float, once: float, chance: float, seqs: int) -> None:
    plain = 10 ** np.random.default_rng().uniform(-5, 0)
    rates = [(1 + sum(chance**i for i in range(1, cap + 1))) / (1 + once + cost * cap) for cap in DRAFT_SIZES]
    found = simulated(plain, once * plain, cost * plain / seqs, chance, seqs)
    print(chance, cost, once, seqs, found, max(1, *rates))
    assert found > max(0.98 if chance < 0.1 else 0.93, 0.88 * max(rates))


def test_a_moment_of_another_program_is_forgotten() -> None:
    """Drafts that seemed ten times as slow are tried again, and turn out to be faster."""
    pace, draft = DraftCosts(), [Draft([0] * 15, 0.9)]
    pace.plain(1, 1.0)
    for _ in range(24):
        pace.drafted(7, 60.0)
    assert not pace.choose(draft, 31)
    steps = next(i for i in range(20_000) if pace.choose(draft, 31))
    assert steps < 5 / COST_DECAY
    for _ in range(30):
        pace.drafted(7, 1.5)
    assert pace.choose(draft, 31) >= 7


def test_plain_steps_are_timed_now_and_then_and_when_others_come() -> None:
    pace, draft = DraftCosts(), Draft([0] * 15, 0.9)
    assert not pace.choose([draft], 31), "nothing is known yet"
    pace.plain(1, 1.0)
    for _ in range(MAX_DRAFTED_STEPS):
        assert pace.choose([draft], 31)
        pace.drafted(7, 1.1)
    assert pace.stale
    assert not pace.choose([draft], 31)
    pace.plain(1, 1.0)
    assert pace.choose([draft], 31)
    assert not pace.choose([draft] * 2, 30), "of two nothing is known"


def test_a_step_has_no_more_than_there_is_room_for() -> None:
    pace = DraftCosts()
    pace.plain(4, 1.0)
    drafts = [Draft([0] * n, 1.0) for n in (15, 0, 2, 15)]
    for room in range(40):
        cap = pace.choose(drafts, room)
        assert sum(min(cap, len(d.tokens)) for d in drafts) <= room
        assert bool(cap) == (room >= 3)


class Random:
    """Chooses to draft at random, as no measurement would."""

    def __init__(self, rng: np.random.Generator, caps: Sequence[int] = (0, *DRAFT_SIZES)) -> None:
        self._rng, self._caps, self.stale, self.token = rng, caps, False, 0.0
        self.steps = 0

    def choose(self, drafts: Sequence[Draft], room: int) -> int:
        fit = [cap for cap in self._caps if sum(min(cap, len(d.tokens)) for d in drafts) <= room]
        return int(self._rng.choice(fit)) if fit else 0

    def plain(self, seqs: int, seconds: float) -> None: ...

    def drafted(self, tokens: int, seconds: float) -> None:
        self.steps += 1


def texts_with_repeats(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Texts of few letters, of one passage twice, and of tokens that never repeat."""
    made = []
    for _ in range(count):
        passage = rng.integers(0, 256, rng.integers(2, 20)).tolist()
        kinds = [
            rng.integers(97, 100, rng.integers(3, 40)).tolist(),
            [*passage, *rng.integers(0, 256, 3).tolist(), *passage],
            rng.permutation(256)[: rng.integers(1, 40)].tolist(),
        ]
        made.append(kinds[int(rng.integers(3))])
    return made


def repeating(make_rig: MakeRig, *arguments: Any, **more: Any) -> Any:
    """A rig whose model mostly repeats its input, as tied random heads do."""
    return make_rig(*arguments, tied_embeddings=True, **more)


def ask(rig: Any, texts: Sequence[list[int]], options: Sequence[dict[str, Any]]) -> list[Any]:
    """Generations of all texts at once; completions in their order."""
    numbers = []
    for text, given in zip(texts, options, strict=True):
        (sequence,) = rig.engine.preparer.prepare(text, GenerationOptions(**given))
        rig.engine.add([sequence])
        numbers.append(sequence.number)
    finished = rig.finish()
    return [finished[number] for number in numbers]


def same(done: Sequence[Any], wanted: Sequence[Any], *, bits: bool = True) -> None:
    """Log-probabilities have the same bits where a row of a product does not depend on the others."""
    for name in ("tokens", "text", "finish_reason", "stop_reason", *(["logprobs"] if bits else [])):
        assert [getattr(c, name) for c in done] == [getattr(c, name) for c in wanted], name
    assert not any(c.timings.drafted_tokens for c in wanted)


def verified(done: Sequence[Any]) -> tuple[int, int]:
    return sum(c.timings.drafted_tokens for c in done), sum(c.timings.accepted_tokens for c in done)


@pytest.mark.parametrize("options", [{}, SAMPLED, {"temperature": 0.5, "min_p": 0.1, "top_p": 0.9, "seed": 3}])
def test_tokens_are_the_same(
    device: Device, make_rig: MakeRig, rng: np.random.Generator, options: dict[str, Any]
) -> None:
    """Each alone without drafts, against all in a batch with drafts of any length; some reach the context's end."""
    texts = [*texts_with_repeats(rng, 10), *(rng.integers(97, 99, n).tolist() for n in (50, 61))]
    given = [{**options, "max_tokens": int(n)} for n in rng.integers(1, 60, 10)]
    given += [{**options, "max_tokens": None, "ignore_eos": True}, {**options, "max_tokens": None, "min_tokens": 20}]
    given[0] |= {"repetition_penalty": 1.1}
    limits = Limits(max_tokens=32, max_seqs=4, max_rows=16, max_blocks=16)
    plain = repeating(make_rig, device, limits=limits)
    rig = repeating(make_rig, device, limits=limits, lookup=True)
    rig.engine._pace.drafts = Random(rng)
    wanted = [plain.one(text, **more) for text, more in zip(texts, given, strict=True)]
    done = ask(rig, texts, given)
    same(done, wanted)
    assert rig.free_blocks == 64
    drafted, accepted = verified(done)
    assert 0 < accepted <= drafted
    assert not done[0].timings.drafted_tokens


class Foresight:
    """Drafts that are right up to some token, from the known continuation of a text."""

    def __init__(self, rng: np.random.Generator, known: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._rng, self._known = rng, known

    def draft(self, sequence: Generation, most: int) -> Draft:
        most = min(most, sequence.steps_left - 1)
        if sequence.needs_logits or sequence.wants_slot or most < 1:
            return Draft((), 0.0)
        right = self._known[sequence._prompt][sequence._generated :][:most]
        draft = [*right, *self._rng.integers(0, 256, most - len(right)).tolist()]
        wrong = int(self._rng.integers(2 * most))
        if wrong < most:
            draft[wrong] = (draft[wrong] + 1) % 256
        return Draft(draft, 0.5)


def with_foresight(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, wanted: Sequence[Any], caps: Sequence[int], *rigs: Any
) -> None:
    foresight = Foresight(rng, {c.prompt_tokens: c.tokens for c in wanted})

    def draft(sequence: Generation, most: int) -> Draft:
        return foresight.draft(sequence, most)

    monkeypatch.setattr(Generation, "draft", draft)
    for rig in rigs:
        rig.engine._pace.drafts = Random(rng, caps)


SLOTS = Limits(max_tokens=32, max_seqs=4, max_rows=16, max_blocks=32)


def test_every_rule_holds_in_the_middle_of_a_draft(
    device: Device, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Stop tokens and strings, lengths, the context's end, log-probabilities, and requests that get no drafts."""
    texts = [rng.integers(97, 123, rng.integers(1, 40)).tolist() for _ in range(16)]
    kinds: list[dict[str, Any]] = [
        {"stop_tokens": rng.integers(0, 260, 12).tolist()},
        {"stop": [chr(c) for c in rng.integers(32, 127, 5)]},
        {"max_tokens": int(rng.integers(1, 20))},
        {"max_tokens": None, "ignore_eos": True},
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"min_tokens": 9, "stop_tokens": rng.integers(0, 260, 60).tolist()},
        {"temperature": 1.0, "seed": 11},
    ]
    given = [{"max_tokens": 50, **kinds[i % len(kinds)]} for i in range(len(texts))]
    free = [make_rig(device, limits=SLOTS).one(text, **{**more, "stop": (), "stop_tokens": (), "max_tokens": 60})
            for text, more in zip(texts, given, strict=True)]  # fmt: skip
    # one that comes for certain, unless the answer ends at once
    given[0]["stop_tokens"] = [*kinds[0]["stop_tokens"], *free[0].tokens[:4][-1:]]
    plain = make_rig(device, limits=SLOTS, context=64)
    wanted = [plain.one(text, **more) for text, more in zip(texts, given, strict=True)]
    rig = make_rig(device, limits=SLOTS, context=64)
    with_foresight(monkeypatch, rng, free, (0, 1, 3, 7), rig)
    done = ask(rig, texts, given)
    same(done, wanted, bits=device.info.index != "numpy")
    assert rig.free_blocks == 64
    drafted, accepted = verified(done)
    assert 0 < accepted < drafted
    assert {c.finish_reason for c in done} == {"stop", "length", "context"}


def test_what_was_rejected_is_nobodys_prefix(
    device: Device, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Later requests find accepted tokens in the cache, and never those that a rejected draft left there."""
    texts = [rng.integers(0, 256, rng.integers(1, 30)).tolist() for _ in range(8)]
    wanted = [make_rig(device).one(text, max_tokens=50) for text in texts]
    rig = make_rig(device, num_blocks=256)
    with_foresight(monkeypatch, rng, wanted, (1, 3, 7), rig)
    same(ask(rig, texts, [{"max_tokens": 50}] * 8), wanted)
    monkeypatch.undo()
    cached = 0
    for text, before in zip(texts, wanted, strict=True):
        longer = [*text, *before.tokens, 1]
        plain, again = make_rig(device).one(longer, max_tokens=20), rig.one(longer, max_tokens=20)
        assert again.tokens == plain.tokens
        cached += again.timings.cached_tokens
        assert len(longer) - again.timings.cached_tokens <= 6, "what was accepted can be shared"
    assert cached


def test_preempted_and_cancelled(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    texts = [rng.integers(0, 256, n).tolist() for n in (30, 20, 25, 9, 14)]
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 2}
    wanted = [make_rig().one(text, **options) for text in texts]
    known = make_rig().one([1, 2, 3], max_tokens=60, ignore_eos=True)
    rig = make_rig(num_blocks=33)  # one full context and a block: far too few for four
    with_foresight(monkeypatch, rng, [*wanted, known], (0, 1), rig)
    left, leave = [], rig.engine._scheduler._leave_cache

    def counted(sequence: Generation) -> None:
        left.append(sequence)
        leave(sequence)

    monkeypatch.setattr(rig.engine._scheduler, "_leave_cache", counted)
    cancelled = rig.engine.preparer.prepare([1, 2, 3], GenerationOptions(max_tokens=60, ignore_eos=True))[0]
    rig.engine.add([cancelled])
    for _ in range(3):  # of 16 tokens at most
        rig.engine.step()
    update = rig.engine.cancel(cancelled)
    assert update is not None
    assert update.result.tokens == known.tokens[: len(update.result.tokens)]
    done = ask(rig, texts, [options] * 5)
    same(done, wanted)
    assert len(left) > len(texts) + 1, "nobody was preempted"
    assert verified(done)[1] > 0
    assert rig.free_blocks == 33
