"""When the answers of a device pass for the CPU's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bitnet.core.testing import answers
from bitnet.core.testing.answers import FORMS, FURTHER, assert_same_answers


class Compared:
    """In place of the comparison: so many answers part among the first questions, and so many among the further."""

    def __init__(self, *parted: int) -> None:
        self._parted = list(parted)
        self.asked: list[list[str]] = []

    def __call__(self, device: str, asked: Sequence[str], seed: int, max_tokens: int) -> tuple[int, int]:
        self.asked.append([*asked])
        return 10 * len(asked), self._parted.pop(0)


@pytest.mark.parametrize(
    ("parted", "passes"),
    [((0,), True), ((1,), True), ((2, 0), True), ((2, 9), True), ((2, 10), False), ((30, 0), False)],
)
def test_more_is_asked_before_a_device_fails(
    parted: tuple[int, ...], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % of 30 and of 230 answers may part."""
    compared = Compared(*parted)
    monkeypatch.setattr(answers, "_compared", compared)
    if passes:
        assert assert_same_answers("acme:0", 3, seed=7) == 10 * sum(map(len, compared.asked))
    else:
        with pytest.raises(AssertionError, match=rf"{sum(parted)} of 230 answers differ \(seed 7\)"):
            assert_same_answers("acme:0", 3, seed=7)
    assert [len(asked) for asked in compared.asked] == [len(FORMS) * each for each in (3, FURTHER)[: len(parted)]]
    if len(parted) > 1:  # they are others
        assert len({*compared.asked[0]} & {*compared.asked[1]}) < 15


def test_a_device_that_says_the_same() -> None:
    """NumPy's sums are those of the native kernels."""
    assert assert_same_answers("cpu:numpy", 1, seed=11, max_tokens=8) > 40
