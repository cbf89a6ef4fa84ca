"""Defects of the kernels for mixtures of experts and windows, which the conformance suite must catch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.vulkan.backend import BACKEND

SUITE = Path(__file__).with_name("test_conformance_vulkan.py")
SAME = "test_all_rows_on_the_same_experts and 70"
SUMS = "test_expert_matmul_adds"
ROUTE, TIES = "test_route and 33", "test_equal_logits"
PROMPT, DECODE = "test_window and 37", "test_window and f32 and 130"
LANES = "for (uint i = 1; i < LANES; i++) sum += part[item + i];"
LAST, SEEN = "begin < count; begin += TOKENS", "&& from + p >= WINDOW_BEGIN(start + 4 * band + t + 1);"
MUTANTS = (
    Mutant("a tie takes the higher expert", "uvec2(keys[e], ~e)", "uvec2(keys[e], e)", TIES),
    Mutant("an expert is taken twice", "keys[chosen] = TAKEN;", "keys[0] = TAKEN;", ROUTE),
    Mutant("shares that do not add up to one", "shares[m * top + j] /= total;", "total += 0.0;", ROUTE),
    Mutant("a share of the lanes' products", LANES, "", ROUTE),
    Mutant("not a number is no choice", "? NOT_A_NUMBER :", "? 1u :", "not_finite"),
    Mutant("the first expert's matrices", "(n / rows * experts + expert) * rows", "n / rows * experts * rows", SAME),
    Mutant("the last tile is not there", LAST, LAST.replace("begin <", "begin + TOKENS <="), SAME),
    Mutant("pairs of the first tile", "uint at = begin + min(t, count - 1);", "uint at = min(t, count - 1);", SAME),
    Mutant("the first pair's result", "chosen[begin + t] : begin, of", "chosen[begin] : begin, of", SAME),
    Mutant("shares of the first expert", "* shares[m * top + j];", "* shares[m * top];", SUMS),
    Mutant("sums in place of the row", "sums[m * columns + n] + sum_from_zero(sum)", "sum", SUMS),
    Mutant("a window of one more", "(length) - WINDOW)", "(length) - WINDOW - 1)", PROMPT),
    Mutant("all tokens see the first one's window", SEEN, ";", PROMPT),
    Mutant("decoding from the first position on", "begin = seen + part * PART;", "begin = part * PART;", DECODE),
    Mutant("up is not limited", "-at_most(-at_most(up, limit), limit)", "up", "test_glu_of_several and 0.5"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path, require_device: Callable[[str, str | None], None]) -> None:
    found = BACKEND.probe()
    require_device("vulkan:0", None if found.devices else found.reason or "there is no Vulkan device")
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
