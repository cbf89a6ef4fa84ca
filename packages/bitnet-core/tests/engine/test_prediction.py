"""Predictions of answers: what is drafted from them, and that no token depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core import InvalidInputError
from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.pacing import DRAFT_SIZES
from bitnet.core.engine.prediction import Prediction
from bitnet.core.engine.prompt_lookup import Draft, PromptLookup
from bitnet.core.hal import Device, Limits

MakeRig = Callable[..., Any]
LIMITS = Limits(max_tokens=32, max_seqs=4, max_rows=16, max_blocks=16)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    return np.random.default_rng(seed)


def edited(tokens: Sequence[int], edits: int, rng: np.random.Generator) -> list[int]:
    """``tokens`` with tokens changed, left out or added."""
    made = list(tokens)
    for _ in range(edits):
        at = int(rng.integers(len(made) + 1))
        made[at : at + int(rng.integers(2))] = rng.integers(300, 400, rng.integers(3)).tolist()
    return made


def test_drafts_go_on_behind_each_difference(rng: np.random.Generator) -> None:
    """A difference costs the tokens of an n-gram, and no more, however often the text repeats itself."""
    for _ in range(100):
        passage = rng.integers(0, 8, 30).tolist()  # pairs and triples of eight letters occur again and again
        predicted = [*passage, *rng.integers(0, 256, 60).tolist(), *passage]
        edits = int(rng.integers(4))
        answer = edited(predicted, edits, rng)
        found, right, text = Prediction(predicted), 0, [0, 1]
        for token in answer:
            right += found.draft(text, 4)[:1] == [token]
            text.append(token)
            found.follow([token])
        assert right >= len(answer) - 12 * edits
        assert edits or right == len(answer)


def test_a_prediction_comes_before_what_the_text_repeats() -> None:
    lookup = PromptLookup([7, 8, 9, 7, 8], [9, 5, 6])
    assert list(lookup.propose(4).tokens) == [9, 5, 6]
    assert lookup.predicted
    without = PromptLookup([7, 8, 9, 7, 8])
    assert list(without.propose(4).tokens) == [9, 7, 8, 9]
    assert not without.predicted


class Always:
    """Drafts wherever it can."""

    stale, token = False, 0.0

    def choose(self, drafts: Sequence[Draft], room: int) -> int:
        fit = [cap for cap in DRAFT_SIZES if sum(min(cap, len(d.tokens)) for d in drafts) <= room]
        return max(fit, default=0)

    def plain(self, seqs: int, seconds: float) -> None: ...

    def drafted(self, tokens: int, seconds: float) -> None: ...


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}])
def test_tokens_are_the_same(
    device: Device, make_rig: MakeRig, rng: np.random.Generator, options: dict[str, Any]
) -> None:
    """Predictions that are right, nearly right, wrong, too short and too long."""
    plain, rig = make_rig(device, limits=LIMITS), make_rig(device, limits=LIMITS, lookup=True)
    rig.engine._pace.drafts = Always()
    for _ in range(4):
        prompt = rng.permutation(256)[: rng.integers(1, 20)].tolist()
        wanted = plain.one(prompt, max_tokens=40, ignore_eos=True, **options)
        changed = [token % 256 for token in edited(wanted.tokens, 2, rng)]
        other = rng.integers(0, 256, 40).tolist()
        misled = [*wanted.tokens[:9], *other]
        for prediction in (wanted.tokens, changed, other, wanted.tokens[:5], misled):
            done = rig.one(prompt, max_tokens=40, ignore_eos=True, prediction=prediction, **options)
            assert (done.tokens, done.text) == (wanted.tokens, wanted.text)
            times = done.timings
            assert 0 <= times.accepted_prediction_tokens <= times.prediction_tokens <= times.drafted_tokens
            if prediction is wanted.tokens:  # every other token of a step with one draft comes from the draft
                assert times.accepted_prediction_tokens == times.prediction_tokens > 20
            if prediction is misled:
                assert times.accepted_prediction_tokens < times.prediction_tokens
    assert not wanted.timings.prediction_tokens


@pytest.mark.parametrize(
    ("prediction", "said"),
    [([999_999], "prediction has token 999999"), (7, "a text or token ids"), ("text", "takes token ids")],
)
def test_what_is_no_prediction_is_refused(device: Device, make_rig: MakeRig, prediction: Any, said: str) -> None:
    rig = make_rig(device, limits=LIMITS, lookup=True)
    with pytest.raises(InvalidInputError, match=said):
        rig.engine.preparer.prepare([1, 2], GenerationOptions(prediction=prediction))
