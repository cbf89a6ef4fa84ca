"""The bounds of hybrid models' logits: luck of rounding does not pass them, and a wrong device does."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest

from bitnet.core.hal import DenseWeight, Limits, Program, TernaryWeight
from bitnet.core.reference import ReferenceDevice
from bitnet.core.testing.hybrid_steps import (
    SHAPES,
    Feed,
    assert_same_model,
    hybrid_program,
    logits_of,
    neighbour,
    steps,
)
from bitnet.core.testing.rig import Array, dense
from bitnet.core.testing.whole_model import END_TO_END

LIMITS = Limits(40, 3, 24, 2)
Fed = list[list[Feed]]


def _weight(ending: str, change: Callable[[Array], Array]) -> Callable[[Program, Fed], tuple[Program, Fed]]:
    """A device that reads one kind of weight wrongly."""

    def wrong(program: Program, fed: Fed) -> tuple[Program, Fed]:
        name = next(name for name in program.weights if name.endswith(ending))
        weight = program.weights[name]
        if isinstance(weight, TernaryWeight):
            data = weight.load()
            changed = replace(weight, load=lambda: data._replace(codes=np.ascontiguousarray(change(data.codes))))
            return replace(program, weights={**program.weights, name: changed}), fed
        assert isinstance(weight, DenseWeight)
        turned = dense(np.ascontiguousarray(change(weight.load())))
        return replace(program, weights={**program.weights, name: turned}), fed

    return wrong


def _source(program: Program, fed: Fed) -> tuple[Program, Fed]:
    """A device that goes on from the state that the draft has left."""
    feeds = [*fed[3]]
    feeds[0] = feeds[0]._replace(source=4)
    return program, [*fed[:3], feeds, *fed[4:]]


WRONG = {
    "the draft's state is kept": _source,
    "taps are read backwards": _weight("ssm_conv1d", lambda a: a[:, ::-1]),
    "heads share one decay": _weight("ssm_a", lambda a: np.full_like(a, a[0])),
    "dt's bias is left out": _weight("ssm_dt.bias", np.zeros_like),
    "rows of queries are exchanged": _weight("attn_q", lambda a: a[::-1]),
    "the gate's rows are exchanged": _weight("attn_gate", lambda a: a[::-1]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_device_is_found(wrong: Callable[[Program, Fed], tuple[Program, Fed]]) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    program, fed = hybrid_program(rng, SHAPES["odd"], LIMITS), [*steps(rng)]
    exact = logits_of(ReferenceDevice(), program, fed)
    found = logits_of(ReferenceDevice(), *wrong(program, fed))
    others = [neighbour(program, rng) for _ in range(2)]
    with pytest.raises(AssertionError, match="errors of the rows"):
        assert_same_model(found, exact, lambda: (logits_of(ReferenceDevice(), other, fed) for other in others))


def test_a_row_that_roundings_move_is_judged_by_what_they_do() -> None:
    """One row of a right device is moved by more than the plain bound, as in its neighbours; another row may not be."""
    exact = np.ones((40, 7))
    moved, other = exact.copy(), exact.copy()
    moved[3] *= 1 + 1.2 * END_TO_END
    other[3] *= 1 - 0.7 * END_TO_END
    assert_same_model(moved, exact, lambda: [exact, other])
    with pytest.raises(AssertionError):
        assert_same_model(moved, exact, lambda: [exact, exact])
    moved[[3, 4]] = moved[[4, 3]]
    with pytest.raises(AssertionError):
        assert_same_model(moved, exact, lambda: [exact, other])

    def unasked() -> NoReturn:
        raise AssertionError("neighbours are computed although no row differs by much")

    assert_same_model(exact * (1 + 0.5 * END_TO_END), exact, unasked)
