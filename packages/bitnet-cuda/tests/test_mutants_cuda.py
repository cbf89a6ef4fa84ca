"""Defects of the kernels for mixtures of experts and windows, which the conformance suite must catch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.cuda.backend import BACKEND

SUITE = Path(__file__).with_name("test_conformance_cuda.py")
ROUTE, TIES, MIXTURE = "test_route and 33", "test_equal_logits", "test_a_whole_mixture and 33"
SAME, GROUPS = (f"test_all_rows_on_the_same_experts and {case}" for case in ("70", "256"))
TILES, ONE_TILE = "test_products_of_experts_on and 1030", "test_products_of_experts_on and 100"
NARROW, MANY = "test_window and 37", "test_windows_of_many and 300"
UP = "-at_most(-at_most(u, limit), limit)"
LAST, GONE = "min(count - begin, TILE);", " || behind_window(p, position + 1)"
MUTANTS = (
    Mutant("a tie takes the higher expert", "max(first, ~(unsigned)(i", "max(first, (unsigned)(i", TIES),
    Mutant("an expert is taken twice", "== expert) keys[i] = 0;", "== expert) keys[i] = keys[i];", ROUTE),
    Mutant("shares that do not add up to one", "shares[(size_t)m * top + j] /= total;", "total += 0.0f;", ROUTE),
    Mutant("not a number is no choice", "logit != logit ? 0xFFFFFFFFu", "logit != logit ? 1u", "not_finite"),
    Mutant("the norm of another token", "warp_reduce<Sum>(sums[t])", "warp_reduce<Sum>(sums[0])", ROUTE),
    Mutant("the first expert's matrices", "* EXPERTS + expert) * rows", "* EXPERTS) * rows", SAME),
    Mutant("a tile's last pair is not there", LAST, LAST.replace("TILE", "TILE - 1"), SAME),
    Mutant("pairs of the first tile", "return order[begin + t]; };", "return order[t]; };", GROUPS),
    Mutant("the scale of the first group", "units)[of * COUNT + s]", "units)[of * COUNT]", GROUPS),
    Mutant("tensor cores: pairs of the first tile", "order[begin + min((int)", "order[min((int)", TILES),
    Mutant("tensor cores: a scale of another row", "units[matrix_row(n, expert, rows)]", "units[n]", ONE_TILE),
    Mutant("tensor cores: a row too many", "if (n >= total) continue;", "if (n >= total + 1) continue;", ONE_TILE),
    Mutant("shares of the first expert", "shares[pair]));", "shares[(size_t)m * top]));", TILES),
    Mutant("sums in place of the row", "*to = __fadd_rn(*to, sum);", "*to = sum;", TILES),
    Mutant("up is not limited", UP, "u", "test_glu_of_several and 0.5"),
    Mutant("few tokens: the next expert", "j <= blockIdx.y; j++", "j < blockIdx.y; j++", MIXTURE),
    Mutant(
        "few tokens: another token's row", "x + (size_t)m * COLS, threadIdx.x + i * THREADS", "x, threadIdx.x", MIXTURE
    ),
    Mutant("few tokens: shares not divided", "share /= total;", "share /= 1.0f;", MIXTURE),
    Mutant("few tokens: ups for gates", "gate + (size_t)EXPERTS * F", "gate", MIXTURE),
    Mutant("few tokens: sums in place of the row", "*to = __fadd_rn(old, sum);", "*to = sum;", MIXTURE),
    Mutant("a window of one more", "p < length - WINDOW;", "p < length - WINDOW - 1;", NARROW),
    Mutant("all tokens see the first one's window", GONE, "", MANY),
    Mutant(
        "decoding from the first position on", "p < end && !behind_window(p, length) ? sum", "p < end ? sum", NARROW
    ),
)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path, require_device: Callable[[str, str | None], None]) -> None:
    found = BACKEND.probe()
    require_device("cuda:0", None if found.devices else found.reason or "there is no CUDA device")
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
