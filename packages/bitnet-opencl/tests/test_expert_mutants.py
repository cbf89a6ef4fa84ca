"""Defects of the kernels for mixtures of experts and windows, which the conformance suite must catch."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant

SUITE = Path(__file__).with_name("test_conformance_opencl.py")
SAME = "test_all_rows_on_the_same_experts and 70"
MUTANTS = (
    Mutant("a tie takes the higher expert", "~(uint)e));", "(uint)e));", "test_equal_logits"),
    Mutant("an expert is taken twice", "key[chosen] = TAKEN;", "key[0] = TAKEN;", "test_route and 33"),
    Mutant(
        "shares that do not add up to one", "shares[(size_t)m * top + j] /= total;", "total += 0;", "test_route and 33"
    ),
    Mutant("not a number is no choice", "isnan(row[e]) ? NOT_A_NUMBER :", "isnan(row[e]) ? 1u :", "not_finite"),
    Mutant(
        "the first expert's matrices", "(size_t)(n / rows) * experts + expert", "(size_t)(n / rows) * experts", SAME
    ),
    Mutant(
        "the last tile is not there", "begin < count; begin += TOKENS", "begin + TOKENS <= count; begin += TOKENS", SAME
    ),
    Mutant("pairs of the first tile", "order[begin + t] : begin) / per", "order[t] : begin) / per", SAME),
    Mutant("the first pair's result", "order[begin + t] : begin;", "order[begin] : begin;", SAME),
    Mutant("a window of one more", "(length) - (WINDOW))", "(length) - (WINDOW) - 1)", "test_window and 37"),
    Mutant("all tokens see the first one's window", "&& p >= WINDOW_BEGIN(offset + m + 1);", ";", "test_window and 37"),
    Mutant("up is not limited", "up > limit ? limit : up < -limit ? -limit : up", "up", "test_glu_of_several and 0.5"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
