"""The engine on real devices: batching, prefixes, preemption and repeated steps change no token."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import GenerationOptions, pacing
from bitnet.core.errors import ContextFullError, DeviceError, DeviceLostError, InvalidInputError
from bitnet.core.hal import Device, Limits, SequenceStep, Step, StepLayout, run

MakeRig = Callable[..., Any]
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01}


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in lengths]


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": 5}, {"logprobs": 2, **SAMPLED, "seed": 5}])
def test_alone_and_in_a_mixed_batch_give_the_same_tokens(
    device: Device, make_rig: MakeRig, options: dict[str, Any]
) -> None:
    texts = prompts(0, (1, 3, 40, 75, 17, 33))
    alone = [make_rig(device).one(text, max_tokens=24, **options) for text in texts]
    together = make_rig(device)
    greedy = together.engine.preparer.prepare(
        prompts(1, (21,))[0], GenerationOptions(repetition_penalty=1.2, max_tokens=30)
    )
    together.engine.add(greedy)
    done = together.run(texts, max_tokens=24, **options)
    assert [c.tokens for c in done] == [c.tokens for c in alone]
    if device.info.index != "numpy":  # as generate_batch promises
        assert [c.logprobs for c in done] == [c.logprobs for c in alone]
    assert together.free_blocks == 64


def test_chunks_and_repeats_do_not_matter(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = prompts(2, (50,))
    whole = make_rig(limits=Limits(64, 4, 8, 32)).one(text, max_tokens=20, seed=3, **SAMPLED)
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e9)
    rig = make_rig(limits=Limits(7, 4, 8, 32))
    counts = []
    start = rig.executable.start

    def counted(step: Step, count: int) -> None:
        counts.append(count)
        start(step, count)

    monkeypatch.setattr(rig.executable, "start", counted)
    assert rig.one(text, max_tokens=20, seed=3, **SAMPLED).tokens == whole.tokens
    assert max(counts) == pacing.MAX_BURST
    assert rig.free_blocks == 64


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": 5, "logprobs": 1, "repetition_penalty": 1.3}])
def test_log_probabilities_of_the_prompt(device: Device, make_rig: MakeRig, options: dict[str, Any]) -> None:
    """The oracle for a token is a generation from those before it. Steps are small, so that the rows come in parts."""
    rng = np.random.default_rng()
    text = rng.integers(0, 256, int(rng.integers(2, 30))).tolist()
    rig = make_rig(device, limits=Limits(7, 4, 5, 32))
    plain = rig.one(text, max_tokens=12, **options)
    found = rig.one(text, max_tokens=12, prompt_logprobs=3, **options)
    assert (found.tokens, found.finish_reason, found.text) == (plain.tokens, plain.finish_reason, plain.text)
    assert (plain.prompt_logprobs, found.timings.cached_tokens) == (None, 0)
    assert found.prompt_logprobs is not None
    assert [entry.token for entry in found.prompt_logprobs] == text[1:]
    other = make_rig(device)
    for i, entry in enumerate(found.prompt_logprobs, 1):
        (alone,) = other.one(text[:i], max_tokens=1, logprobs=260, ignore_eos=True).logprobs
        every = dict(alone.top)
        assert entry.logprob == pytest.approx(every[text[i]], abs=1e-4)
        assert [p for _, p in entry.top] == pytest.approx([p for _, p in alone.top[:3]], abs=1e-4)
    none = rig.one(text, max_tokens=0, prompt_logprobs=0)
    assert (none.tokens, none.text, none.finish_reason) == ((), "", "length")
    assert [e.logprob for e in none.prompt_logprobs] == pytest.approx(
        [e.logprob for e in found.prompt_logprobs], abs=1e-4
    )
    single = rig.one(text[:1], max_tokens=0, prompt_logprobs=2)
    assert (single.tokens, single.prompt_logprobs) == ((), ())
    assert rig.free_blocks == 64
    with pytest.raises(InvalidInputError, match="max_tokens is 0"):
        GenerationOptions(max_tokens=0)
    with pytest.raises(InvalidInputError, match="prompt_logprobs is -1"):
        GenerationOptions(prompt_logprobs=-1)


def test_tokens_past_a_stop_rule_are_thrown_away(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = prompts(3, (9,))
    plain = make_rig().one(text, max_tokens=40, seed=1, **SAMPLED)
    at = next(i for i in range(5, 40) if plain.tokens[i] not in plain.tokens[:i])
    monkeypatch.setattr(pacing, "BURST_SECONDS", 1e9)
    rig = make_rig()
    stopped = rig.one(text, max_tokens=40, seed=1, stop_tokens=[plain.tokens[at]], **SAMPLED)
    assert (stopped.tokens, stopped.finish_reason, stopped.stop_reason) == (plain.tokens[:at], "stop", plain.tokens[at])
    # What it left in the cache is what it accepted: going on from there gives what it would have given.
    assert (
        rig.one([*text, *plain.tokens[: at + 1]], max_tokens=10).tokens
        == make_rig().one([*text, *plain.tokens[: at + 1]], max_tokens=10).tokens
    )


def test_a_known_prefix_is_shared_and_changes_nothing(device: Device, make_rig: MakeRig) -> None:
    (text,) = prompts(4, (43,))
    rig = make_rig(device)
    first = rig.one(text, max_tokens=12)
    again = rig.one(text, max_tokens=12)
    assert first.timings.cached_tokens == 0
    assert again.timings.cached_tokens == 40  # ten blocks of four; the last token is always computed
    assert again.tokens == first.tokens
    longer = [*text, *first.tokens, 1, 2, 3]
    continued = rig.one(longer, max_tokens=12)
    assert continued.timings.cached_tokens == 52  # 54 positions were computed
    assert continued.tokens == make_rig(device).one(longer, max_tokens=12).tokens


def test_several_completions_of_a_prompt_share_it(make_rig: MakeRig) -> None:
    (text,) = prompts(5, (70,))
    rig = make_rig()
    done = rig.run([text], n=4, max_tokens=6, seed=11, **SAMPLED)
    assert [c.timings.cached_tokens for c in done] == [0, 68, 68, 68]
    assert len({c.tokens for c in done}) > 1
    assert len({c.seed for c in done}) == 4
    assert done[0].seed == 11
    for completion in done:
        alone = make_rig().one(text, max_tokens=6, seed=completion.seed, **SAMPLED)
        assert alone.tokens == completion.tokens


def test_preempted_sequences_end_as_if_nothing_had_happened(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts(6, (30, 20, 25, 9, 14))
    alone = [make_rig().one(text, max_tokens=60, seed=2, **SAMPLED).tokens for text in texts]
    rig = make_rig(num_blocks=33)  # one full context and a block: far too few for four
    scheduler = rig.engine._scheduler
    left = []
    leave = scheduler._leave_cache

    def counted(sequence: Any) -> None:
        left.append(sequence)
        leave(sequence)

    monkeypatch.setattr(scheduler, "_leave_cache", counted)
    done = rig.run(texts, max_tokens=60, seed=2, **SAMPLED)
    assert [c.tokens for c in done] == alone
    assert {c.timings.cached_tokens for c in done} == {0}, "what it found of its own is not from an earlier request"
    assert len(left) > len(texts), "nobody was preempted"
    assert rig.free_blocks == 33


def test_the_context_ends_a_generation(make_rig: MakeRig) -> None:
    rig = make_rig(context=30)
    (text,) = prompts(7, (20,))
    done = rig.one(text, max_tokens=None, ignore_eos=True)
    assert (len(done.tokens), done.finish_reason) == (10, "context")
    exact = rig.one(text, max_tokens=10, ignore_eos=True)
    assert (len(exact.tokens), exact.finish_reason) == (10, "length")
    last = rig.one([*text, *range(9)], max_tokens=5, ignore_eos=True)
    assert (len(last.tokens), last.finish_reason) == (1, "context")
    with pytest.raises(ContextFullError, match="30 tokens; the context holds 30"):
        rig.one([*text, *range(10)])


def test_min_tokens_forbids_the_end(make_rig: MakeRig) -> None:
    (text,) = prompts(8, (5,))
    rig = make_rig()
    free = rig.one(text, max_tokens=30, stop_tokens=range(256), ignore_eos=False)
    assert free.tokens == ()
    held = rig.one(text, max_tokens=30, min_tokens=4, stop_tokens=range(256))
    assert len(held.tokens) >= 4
    assert all(token >= 257 for token in held.tokens[:4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"stop": ["a", ""]}, "none empty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"logit_bias": {260: 1.0}}, "logit_bias has token 260"),
        ({"logit_bias": dict.fromkeys(range(260), -float("inf"))}, "logit_bias forbids every token\\."),
        (
            {"logit_bias": dict.fromkeys(range(259), -float("inf")), "min_tokens": 1, "stop_tokens": [259]},
            "logit_bias and min_tokens forbid every token\\.",
        ),
        ({"stop_tokens": [-1]}, "stop_tokens has token -1"),
        ({"temperature": 1e-38}, "temperature is 1e-38"),
        ({"temperature": 10**400}, "too large"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty"),
        ({"presence_penalty": 1e39}, "presence_penalty"),
        ({"logit_bias": {3: 1e39}}, "logit_bias"),
        *(
            ({name: 1.5}, f"{name} .*not an integer")
            for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs")
        ),
        *(
            ({name: "1"}, f"{name} .*not an integer")
            for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs")
        ),
        ({"top_k": None}, "top_k .*not an integer"),
        ({"temperature": None}, "temperature .*not a number"),
        ({"frequency_penalty": Decimal(1)}, "frequency_penalty .*not a number"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias .*not an integer"),
        ({"logit_bias": {3.0: 1.0}}, "logit_bias .*not an integer"),
        ({"logit_bias": {3: "1"}}, "logit_bias .*not a number"),
        ({"stop_tokens": [5.0]}, "stop_tokens .*not an integer"),
    ],
)
def test_options_out_of_range(make_rig: MakeRig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_rig().one([1], **options)


def test_options_are_the_callers_no_more(make_rig: MakeRig) -> None:
    """Numpy's numbers do as Python's do, and what is changed later changes nothing."""
    (text,) = prompts(12, (12,))
    bias, stops = {3: 0.5}, [7]
    given = {"seed": np.uint64(9), "temperature": np.float64(0.5), "max_tokens": np.int32(10), "top_k": np.int64(40)}
    options = GenerationOptions(**given, logit_bias=bias, stop_tokens=stops)
    bias[300], stops[0] = math.inf, -1
    rig = make_rig()
    (sequence,) = rig.engine.preparer.prepare(text, options)
    rig.engine.add([sequence])
    done = rig.finish()[sequence.number]
    plain = {"seed": 9, "temperature": 0.5, "max_tokens": 10, "top_k": 40}
    assert done.tokens == make_rig().one(text, **plain, logit_bias={3: 0.5}, stop_tokens=[7]).tokens
    assert type(done.seed) is int


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}])
def test_the_least_temperature_is_as_good_as_greedy(device: Device, make_rig: MakeRig, more: dict[str, Any]) -> None:
    """On the device and on the host, which draws where it shows log-probabilities."""
    (text,) = prompts(13, (12,))
    rig = make_rig(device)
    wanted = rig.one(text, max_tokens=10).tokens
    assert rig.one(text, max_tokens=10, temperature=1e-30, **more).tokens == wanted
    assert rig.one(text, max_tokens=10, temperature=1e-30, logprobs=0, **more).tokens == wanted


@pytest.mark.parametrize("prompt", [[], [260], [-1]])
def test_prompts_out_of_range(make_rig: MakeRig, prompt: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="the prompt has"):
        make_rig().one(prompt)


def test_cancel_at_every_stage(make_rig: MakeRig) -> None:
    rig = make_rig(limits=Limits(8, 2, 8, 32))
    texts = prompts(9, (30, 30, 30))
    sequences = [
        rig.engine.preparer.prepare(text, GenerationOptions(max_tokens=20, ignore_eos=True), 2) for text in texts
    ]
    for pair in sequences:
        rig.engine.add(pair)
    waiting, unqueued = sequences[2]
    for sequence in (unqueued, waiting):
        update = rig.engine.cancel(sequence)
        assert update.result.finish_reason == update.chunk.finish_reason == "cancelled"
    rig.engine.step()  # the others are in the middle of their prompts
    prefilling = rig.engine.cancel(sequences[1][0])
    assert prefilling.result.tokens == ()
    tokens = 0
    while tokens < 3:
        tokens += sum(len(u.chunk.tokens) for u in rig.engine.step() if u.sequence == sequences[0][0].number)
    decoding = rig.engine.cancel(sequences[0][0])
    assert len(decoding.result.tokens) == tokens
    assert rig.engine.cancel(sequences[0][0]) is None
    done = rig.finish()
    assert set(done) == {sequences[0][1].number, sequences[1][1].number}
    assert all(len(c.tokens) == 20 for c in done.values())
    assert rig.free_blocks == 64


def test_a_lost_device_ends_everything(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    rig.engine.add(rig.engine.preparer.prepare([1, 2, 3], GenerationOptions()))
    rig.engine.step()

    def lose(*_: Any) -> None:
        raise DeviceLostError("it stopped answering.", device="cpu:numpy")

    monkeypatch.setattr(rig.executable, "start", lose)
    with pytest.raises(DeviceLostError):
        rig.engine.step()
    monkeypatch.undo()
    with pytest.raises(DeviceLostError):
        rig.engine.step()
    with pytest.raises(DeviceLostError):
        rig.engine.add(rig.engine.preparer.prepare([1], GenerationOptions()))


def test_a_token_that_cannot_be_is_a_device_error(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    monkeypatch.setattr(rig.executable, "collect", lambda: np.full((1, 1), 260, np.int32))
    rig.engine.add(rig.engine.preparer.prepare([1], GenerationOptions()))
    with pytest.raises(DeviceError, match="outside the vocabulary"):
        rig.engine.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 5, "logprobs": 3},
        {"repetition_penalty": 1.2, "temperature": 1.0, "top_k": 5},
    ],
)
@pytest.mark.parametrize("where", ["output", "token_embd"])
def test_logits_that_are_no_numbers_are_a_device_error(
    device: Device, make_rig: MakeRig, where: str, options: dict[str, Any]
) -> None:
    """A damaged weight in the head makes one logit of every row NaN; in an embedding, all logits of one row."""
    with pytest.raises(DeviceError, match=r"logits that are NaN"):
        make_rig(device, nan_in=where).one([5, 7], max_tokens=20, ignore_eos=True, **options)


def test_scores_of_logits_that_are_no_numbers_are_a_device_error(device: Device, make_rig: MakeRig) -> None:
    rig = make_rig(device, nan_in="token_embd")
    rig.engine.add([rig.engine.preparer.prepare_score([5, 6, 7, 8])])
    with pytest.raises(DeviceError, match=r"logits that are NaN"):
        rig.finish()


def test_scores_match_the_logits_of_one_step(device: Device, make_rig: MakeRig) -> None:
    (text,) = prompts(10, (60,))
    limits = Limits(60, 1, 60, 15)
    whole = make_rig(device, limits=limits)
    step = Step(StepLayout(limits), [SequenceStep(text, 60, range(15), range(60))], block_size=4)
    run(whole.executable, step)
    logits = whole.executable.read("logits").astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = exact[np.arange(59), text[1:]]
    rig = make_rig(device)
    for start in (1, 2, 30, 59):
        sequences = [
            rig.engine.preparer.prepare_score(text, start),
            rig.engine.preparer.prepare_score(text[:50], min(start, 49)),
        ]
        rig.engine.add(rig.engine.preparer.prepare(text[:11], GenerationOptions(max_tokens=40)))
        for sequence in sequences:
            rig.engine.add([sequence])
        done = rig.finish()
        np.testing.assert_allclose(done[sequences[0].number], expected[start - 1 :], atol=2e-5)
        np.testing.assert_allclose(done[sequences[1].number], expected[min(start, 49) - 1 : 49], atol=2e-5)
    for start in (0, 60):
        with pytest.raises(InvalidInputError, match="start"):
            rig.engine.preparer.prepare_score(text, start)
    with pytest.raises(ContextFullError):
        rig.engine.preparer.prepare_score([1] * 129)


def test_logprobs_are_of_the_models_own_logits(make_rig: MakeRig) -> None:
    (text,) = prompts(11, (12,))
    rig = make_rig()
    plain = rig.one(text, max_tokens=10, logprobs=5, seed=4, **SAMPLED)
    assert plain.tokens == make_rig().one(text, max_tokens=10, seed=4, **SAMPLED).tokens
    assert plain.logprobs is not None
    tokens = [*text, *plain.tokens]
    scoring = rig.engine.preparer.prepare_score(tokens, len(text))
    rig.engine.add([scoring])
    scores = rig.finish()[scoring.number]
    np.testing.assert_allclose([entry.logprob for entry in plain.logprobs], scores, atol=2e-5)
    for token, entry in zip(plain.tokens, plain.logprobs, strict=True):
        assert entry.token == token
        values = [value for _, value in entry.top]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert dict(entry.top).get(token, entry.logprob) == entry.logprob
        assert values[0] >= entry.logprob
    biased = rig.one(text, max_tokens=3, logprobs=0, logit_bias={77: 100.0})
    assert biased.tokens == (77, 77, 77)
    assert all(entry.logprob < -1 and entry.top == () for entry in biased.logprobs)
